// What each layer became: its sizes, its bytes, its error before and after training, and how training went.

function drawLayers(host, run, student) {
  const layers = student ? student.layers : run.plan;
  if (!layers) return false;
  const names = shortNames(layers.map((layer) => layer.name));
  $("layers").querySelector(".lead").textContent = layersLead(layers);
  host.replaceChildren(el("div", { class: "card" }, layerTable(layers, names, student)));
  if (!student) return true;
  const curves = [
    student.losses && lossChart(student.losses, names, layers),
    student.end_to_end && endToEndChart(student.end_to_end),
  ].filter(Boolean);
  host.append(curves.length ? el("div", { class: "columns" }, curves) : note(untrainedWords(layers)));
  if (student.seconds) host.append(aside(`Trained for ${whole(student.seconds)} s.`));
  return true;
}

const hasFeatures = (layer) => layer.parts[0] > 0,
  hasExact = (layer) => layer.parts[1] > 0,
  hasTiers = (layer) => layer.parts[2].length > 0;

function layersLead(layers) {
  const [features, exact, tiers] = [hasFeatures, hasExact, hasTiers].map((has) => layers.some(has)),
    several = layers.some((layer) => layer.tiers?.some((own) => own.length > 1));
  return [
    exact && "The local window and the attention sinks (the first tokens) are kept as they are, or in int8.",
    several && "Tokens that leave the window pass through tiers, each with fewer bits than the one before.",
    tiers && !several && "Tokens that leave the window are kept in fewer bits.",
    layers.some((layer) => layer.kept) && "Of the oldest, the heavy hitters stay: those that draw most attention.",
    features ? `Features sum up ${exact || tiers ? "older tokens" : "the tokens"}.` : "Older tokens are evicted.",
  ]
    .filter(Boolean)
    .join(" ");
}

function untrainedWords(layers) {
  if (layers.some(hasFeatures)) return "Nothing was trained: the features are as they were drawn.";
  const measured = layers.some(hasTiers) && ": the codes of its tiers were calibrated on a few windows";
  return `There are no features, and nothing was trained${measured || ""}.`;
}

function layerTable(layers, names, student) {
  const most = Math.max(...layers.map((layer) => layer.bytes), 1);
  // Of layers that see nothing of the far past, KL has no end.
  const which = layers.some((layer) => layer.after && layer.after.kl === null) ? "output_error" : "kl";
  const errors = layers
    .flatMap((layer) => [layer.before, layer.after])
    .filter((x) => x && x[which] > 0)
    .map((x) => x[which]);
  const low = Math.min(...errors) / 1.2,
    high = Math.max(...errors) * 1.2,
    trained = layers.some((layer) => layer.before);
  const error = (found) => (found ? digits(found[which]) : "–");
  // Columns that are `wide` go where there is no room; of a layer kept softmax a cell is `kept`.
  const columns = [
    { head: "Layer", cell: (layer, n) => names[n] },
    { head: "Features", kept: "softmax", cell: featureCell },
    layers.some(hasExact) && { head: "Window", wide: true, kept: "all", cell: (layer) => sizeRange(layer, 1) },
    layers.some(hasTiers) && { head: "Tiers", wide: true, kept: "", cell: (layer) => tierCell(layer.tiers) },
    layers.some(hasExact) && { head: "Sinks", wide: true, kept: "", cell: (layer) => sizeRange(layer, 2) },
    { head: "Map", wide: true, kept: "kept", cell: mapWords },
    { head: "Bytes", kept: "a cache", cell: (layer) => byteCell(layer, most) },
    student && trained && { head: "Before", cell: (layer) => error(layer.before) },
    student && { head: trained ? "After" : "Error", cell: (layer) => error(layer.after) },
    student && {
      head: el("span", { class: "unseen" }, "Error, drawn"),
      wide: true,
      cell: (layer) => el("td", { class: "wide-cell drop" }, dumbbell(layer, which, low, high)),
    },
  ].filter(Boolean);
  const heads = columns.map(({ head, wide }) => (wide ? el("th", { scope: "col", class: "drop" }, head) : head));
  const rows = layers.map((layer, n) =>
    columns.map(({ cell, kept, wide }) => {
      const shown = layer.sizes || kept === undefined ? cell(layer, n) : kept;
      return wide && !(shown instanceof Node) ? el("td", { class: "drop" }, shown) : shown;
    }),
  );
  const box = table(heads, rows, { class: "layers" });
  box.setAttribute("aria-label", "Layers");
  box.append(
    el(
      "p",
      { class: "legend drop" },
      el("span", {}, "Bytes, from the oldest tokens:"),
      segments(allParts(layers)).map(swatch),
    ),
  );
  if (student)
    box.append(
      el(
        "p",
        { class: "legend" },
        el("span", {}, `Error: ${ERROR_WORDS[which]}, held-out text, logarithmic scale;`),
        trained && el("span", {}, "○ before training,"),
        el("span", {}, el("b", { class: "student" }, "●"), trained ? "after" : "this model"),
      ),
    );
  return box;
}

const ERROR_WORDS = {
  kl: "KL of the layer’s attention from the original’s, nats",
  output_error: "of what the layer’s attention gives, beside the size of what the original’s gives",
};

const sizeRange = (layer, at) => range(layer.sizes.map((size) => size[at]));

function featureCell(layer) {
  const [features, window, sinks] = [0, 1, 2].map((at) => sizeRange(layer, at));
  const tiers = tierWords(layer.tiers).map((words) => words.replaceAll(" ", "\u00a0"));
  const near = window === "0" && sinks === "0" ? [] : [`window\u00a0${window}`, ...tiers, `sinks\u00a0${sinks}`];
  return el("td", {}, layer.map === "none" ? "none" : features, el("span", { class: "narrow" }, near.join(", ")));
}

const mapWords = (layer) => layer.map + (layer.tokens === "int8" && sizeRange(layer, 1) !== "0" ? ", int8 window" : "");

const tierCell = (tiers) =>
  el("td", { class: "drop", on: pointed(tiersByHead(tiers)) }, tierWords(tiers).join(", ") || "none");

function byteCell(layer, most) {
  return el(
    "td",
    { on: pointed(partWords(layer.parts)) },
    el(
      "span",
      { class: "drop share", "aria-hidden": "true" },
      segments(layer.parts).map(({ name, style, bytes: size }) =>
        el("i", { class: name, style: { ...style, width: `${(72 * size) / most}px` } }),
      ),
    ),
    bytes(layer.bytes),
  );
}

function dumbbell(layer, which, low, high) {
  const x = scale("log", low, high, 4, 196),
    picture = svg("svg", {
      class: "dumbbell",
      viewBox: "0 0 200 18",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
  const host = el("div", { style: { position: "relative" } });
  const place = (error) => (error && error[which] > 0 ? x(error[which]) : null),
    before = place(layer.before),
    after = place(layer.after);
  picture.append(svg("line", { class: "grid", x1: 0, x2: 200, y1: 9, y2: 9 }));
  if (before !== null && after !== null)
    picture.append(
      svg("line", {
        x1: before,
        x2: after,
        y1: 9,
        y2: 9,
        "vector-effect": "non-scaling-stroke",
        style: { stroke: after <= before ? "var(--student)" : "var(--no)", "stroke-width": "2.5" },
      }),
    );
  host.append(picture);
  const dot = (at, full) =>
    at !== null &&
    host.append(
      el("i", {
        style: {
          position: "absolute",
          left: `calc(${at / 2}% - 5px)`,
          top: "4px",
          width: "10px",
          height: "10px",
          "border-radius": "50%",
          border: `2px solid var(--${full ? "student" : "strong-line"})`,
          background: full ? "var(--student)" : "var(--surface)",
        },
      }),
    );
  dot(before, false);
  dot(after, true);
  return host;
}

const LOSS_WORDS = {
  output: "KL + error of the output",
  softmax: "KL, nats",
  l2: "log of the relative error",
  direct: "next-token loss, nats",
  kl: "KL of next tokens, nats",
  embedding: "loss of embeddings",
};

function lossChart({ loss, steps, curves }, names, layers) {
  const own = Object.entries(curves),
    number = new Map(layers.map((layer, n) => [layer.name, names[n]]));
  const average = steps.map((_, n) => mean(own.map(([, values]) => values[n])));
  const worst = own.reduce((a, b) => (b[1].at(-1) > a[1].at(-1) ? b : a));
  const points = (values) => values.map((value, n) => [steps[n], value]);
  const lines =
    own.length > 1
      ? own.map(([, values]) => ({ points: points(values), color: "var(--strong-line)", thin: true }))
      : [];
  lines.push({
    name: own.length > 1 ? "mean of layers" : LOSS_WORDS[loss] || loss,
    points: points(average),
    color: "var(--student)",
    dots: false,
  });
  if (own.length > 1)
    lines.push({
      name: `layer ${number.get(worst[0]) ?? worst[0]}, the largest`,
      points: points(worst[1]),
      color: "var(--third)",
      dash: "5 4",
      dots: false,
    });
  return trainingChart("Training, layer by layer", loss, lines, own.length > 1 ? "Each thin line is a layer." : "");
}

function endToEndChart({ loss, steps, curves }) {
  const points = Object.values(curves)[0].map((value, n) => [steps[n], value]);
  const line = { name: LOSS_WORDS[loss] || loss, points, color: "var(--student)", dots: false };
  return trainingChart("Training, end to end", loss, [line], "");
}

function trainingChart(title, loss, lines, words) {
  const kind = lines.every((line) => line.points.every(([, value]) => value > 0)) ? "log" : "linear";
  return lineChart({
    title,
    lines,
    table: false,
    words,
    x: { label: "step", kind: "linear", format: whole },
    y: { label: LOSS_WORDS[loss] || loss, kind, format: (x) => digits(x, 2) },
  });
}
