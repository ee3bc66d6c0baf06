// What each layer became: its sizes, its bytes, its error before and after training, and how training went.

function drawLayers(host, run, student) {
  const layers = student ? student.layers : run.plan;
  if (!layers) return false;
  const names = shortNames(layers.map((layer) => layer.name));
  host.replaceChildren(el("div", { class: "card" }, layerTable(layers, names, student)));
  if (!student) return true;
  const curves = [
    student.losses && lossChart(student.losses, names, layers),
    student.end_to_end && endToEndChart(student.end_to_end),
  ].filter(Boolean);
  host.append(
    curves.length
      ? el("div", { class: "columns" }, curves)
      : note("This student was not trained: its features are as they were drawn."),
  );
  if (student.seconds) host.append(el("p", { class: "small quiet" }, `Trained for ${whole(student.seconds)} s.`));
  return true;
}

function layerTable(layers, names, student) {
  const most = Math.max(...layers.map((layer) => layer.bytes), 1);
  const errors = layers
    .flatMap((layer) => [layer.before, layer.after])
    .filter((x) => x && x.kl > 0)
    .map((x) => x.kl);
  const low = Math.min(...errors) / 1.2,
    high = Math.max(...errors) * 1.2,
    trained = layers.some((layer) => layer.before);
  const exactly = layers.some((layer) => layer.sizes && layer.sizes.some((size) => size[1] + size[2]));
  const wide = (words) => el("th", { scope: "col", class: "drop" }, words);
  const heads = ["Layer", "Features", ...(exactly ? [wide("Window"), wide("Sinks")] : []), wide("Map"), "Bytes"];
  if (student)
    heads.push(
      ...(trained ? ["Before"] : []),
      trained ? "After" : "Error",
      wide(el("span", { class: "unseen" }, "Error, drawn")),
    );
  const rows = layers.map((layer, n) => {
    const cells = [names[n]];
    if (layer.sizes) {
      const [features, window, sinks] = [0, 1, 2].map((at) => range(layer.sizes.map((size) => size[at])));
      const exact = window === "0" && sinks === "0" ? "" : `window\u00a0${window}, sinks\u00a0${sinks}`;
      cells.push(
        el("td", {}, layer.map === "none" ? "none" : features, el("span", { class: "narrow" }, exact)),
        ...(exactly ? [drop(window), drop(sinks)] : []),
        drop(layer.map + (layer.tokens === "int8" && window !== "0" ? ", 8-bit window" : "")),
        byteCell(layer, most),
      );
    } else cells.push("softmax", ...(exactly ? [drop("all"), drop("")] : []), drop("kept"), "a cache");
    if (!student) return cells;
    const at = (when) => (layer[when] ? digits(layer[when].kl) : "–");
    return [
      ...cells,
      ...(trained ? [at("before")] : []),
      at("after"),
      el("td", { class: "wide-cell drop" }, dumbbell(layer, low, high)),
    ];
  });
  const box = table(heads, rows, { class: "layers" });
  box.setAttribute("aria-label", "Layers");
  if (student)
    box.append(
      el(
        "p",
        { class: "legend" },
        el(
          "span",
          {},
          "Error: KL of the layer’s attention from the original’s, nats, held-out text, logarithmic scale;",
        ),
        trained && el("span", {}, "○ before training,"),
        el("span", {}, el("b", { class: "student" }, "●"), trained ? "after" : "the student"),
      ),
    );
  return box;
}

const drop = (text) => el("td", { class: "drop" }, text);

function byteCell(layer, most) {
  const [feature, token] = layer.cost,
    parts = [sum(layer.sizes.map((x) => x[0])) * feature, sum(layer.sizes.map((x) => x[1] + x[2])) * token];
  return el(
    "td",
    {},
    el(
      "span",
      { class: "drop share", "aria-hidden": "true" },
      ["bar-features", "bar-tokens"].map((name, n) =>
        el("i", { class: name, style: { width: `${(72 * parts[n]) / most}px` } }),
      ),
    ),
    bytes(layer.bytes),
  );
}

function dumbbell(layer, low, high) {
  const x = scale("log", low, high, 4, 196),
    picture = svg("svg", {
      class: "dumbbell",
      viewBox: "0 0 200 18",
      preserveAspectRatio: "none",
      "aria-hidden": "true",
    });
  const host = el("div", { style: { position: "relative" } });
  const place = (error) => (error && error.kl > 0 ? x(error.kl) : null),
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
  const positive = own.every(([, values]) => values.every((value) => value > 0));
  const lines =
    own.length > 1
      ? own.map(([, values]) => ({ points: points(values), colour: "var(--strong-line)", thin: true }))
      : [];
  lines.push({
    name: own.length > 1 ? "mean of layers" : LOSS_WORDS[loss] || loss,
    points: points(average),
    colour: "var(--student)",
    dots: false,
  });
  if (own.length > 1)
    lines.push({
      name: `layer ${number.get(worst[0]) ?? worst[0]}, the largest`,
      points: points(worst[1]),
      colour: "var(--third)",
      dash: "5 4",
      dots: false,
    });
  return lineChart({
    title: "Training, layer by layer",
    lines,
    table: false,
    words: own.length > 1 ? "Each thin line is a layer." : "",
    x: { label: "step", kind: "linear", format: whole },
    y: { label: LOSS_WORDS[loss] || loss, kind: positive ? "log" : "linear", format: (x) => digits(x, 2) },
  });
}

function endToEndChart({ loss, steps, curves }) {
  const [values] = Object.values(curves);
  return lineChart({
    title: "Training, end to end",
    table: false,
    lines: [
      {
        name: LOSS_WORDS[loss] || loss,
        points: values.map((value, n) => [steps[n], value]),
        colour: "var(--student)",
        dots: false,
      },
    ],
    x: { label: "step", kind: "linear", format: whole },
    y: {
      label: LOSS_WORDS[loss] || loss,
      kind: values.every((x) => x > 0) ? "log" : "linear",
      format: (x) => digits(x, 2),
    },
  });
}
