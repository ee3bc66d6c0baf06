// Where the bytes go: by KV head, and by what they are spent on.

function sizeWords({ sizes, tiers }) {
  if (!sizes) return "softmax kept";
  const [features, window, sinks] = [0, 1, 2].map((n) => range(sizes.map((size) => size[n])));
  const parts = [];
  if (features !== "0") parts.push(`${features} ${features === "1" ? "feature" : "features"}`);
  if (window !== "0") parts.push(`window ${window}`);
  parts.push(...tierWords(tiers));
  if (sinks !== "0") parts.push(`${sinks} ${sinks === "1" ? "sink" : "sinks"}`);
  return parts.join(", ");
}

// Tiers of all heads: of each, tokens over heads and bits; all tokens together where heads have other bits.
function tierWords(tiers) {
  const words = (counts, bits) => `${range(counts)} @ ${range(bits)} bits`;
  const bits = tiers.map((own) => own.map((tier) => tier[1])),
    alike = bits.every((own) => String(own) === String(bits[0]));
  const tokensOf = (n) => tiers.map((own) => own[n][0]);
  if (alike) return bits[0].map((each, n) => words(tokensOf(n), [each]));
  const together = tiers.map((own) => sum(own.map((tier) => tier[0])));
  return [words(together, bits.flat())];
}

// A line for all heads of the same tiers; nothing where they are all alike.
function tiersByHead(tiers) {
  const kinds = new Map();
  tiers.forEach((own, n) => {
    const words = tierWords([own]).join(", ") || "no tiers";
    kinds.set(words, [...(kinds.get(words) || []), n]);
  });
  const line = ([words, heads]) => `${heads.length > 1 ? "heads" : "head"} ${heads.join(", ")}: ${words}`;
  return kinds.size > 1 ? [...kinds].map(line).join("\n") : "";
}

// What bytes are spent on, the oldest of a text first, from parts [features, window and sinks, [[bits, bytes]]].
function segments([features, exact, tiers]) {
  return [
    { words: "features", name: "bar-features", bytes: features },
    ...[...tiers].reverse().map(([bits, size]) => ({
      words: `${bits} bits`,
      of: "in",
      name: "bar-tier",
      bytes: size,
      // The fewer bits, the paler.
      style: { "--strength": `${Math.round(100 * (bits / 6) ** 1.2)}%` },
    })),
    { words: "window and sinks", name: "bar-tokens", bytes: exact },
  ].filter((segment) => segment.bytes);
}

const pointed = (words) => ({
  pointermove: (event) => tip(words, event),
  pointerleave: () => tip(""),
});

const swatch = ({ name, style, words }) => el("span", {}, el("i", { class: `swatch ${name}`, style }), words);

const partWords = (parts) =>
  segments(parts)
    .map((segment) => `${bytes(segment.bytes)} ${segment.of || "of"} ${segment.words}`)
    .join(", ");

// Parts of all layers together.
function allParts(layers) {
  const coded = new Map();
  for (const [bits, size] of layers.flatMap((layer) => layer.parts[2])) coded.set(bits, (coded.get(bits) || 0) + size);
  const all = (n) => sum(layers.map((layer) => layer.parts[n]));
  return [all(0), all(1), [...coded].sort((a, b) => b[0] - a[0])];
}

// Left, a map of KV heads: their bytes or, where features are given out by them, their degrees of freedom. Right, rows
// aligned, what each layer's bytes are spent on.
function drawBytes(host, run, student) {
  const layers = (student ? student.layers : run.plan || []).filter((layer) => layer.sizes);
  const free = run.profile && (!layers.length || layers.some(hasFeatures)) ? run.profile : null;
  if (!free && !layers.length) return false;
  const map = free
    ? { names: free.names, rows: free.values, words: (x) => `${digits(x)} degrees of freedom`, format: (x) => digits(x) }
    : { names: layers.map((x) => x.name), rows: layers.map((x) => x.heads), words: bytes, format: bytes };
  $("bytes").querySelector(".lead").textContent = bytesLead(free, layers);
  const names = shortNames(map.names),
    by = new Map(layers.map((layer) => [layer.name, layer])),
    rows = map.names.map((name) => by.get(name));
  const describe = (row, column) => {
    const error = free && free.errors[row][column];
    const words = map.words(map.rows[row][column]) + (error === null || !error ? "" : ` ± ${digits(error)}`);
    const given = rows[row] ? `\n${sizeWords(rows[row])} = ${bytes(rows[row].bytes)}` : "";
    return `Layer ${names[row]}, KV head ${column}: ${words}${given}`;
  };
  const readout = el("p", { class: "readout", "aria-live": "polite" }, "Point at a layer, or use the arrow keys.");
  const figure = el("div", { class: "heat", id: "plan" });
  const legend = el("div", { class: "legend" });
  let width = 0;
  const again = () => {
    if (width) figure.replaceChildren(planFigure({ ...map, rowNames: names, describe }, rows, width, readout));
    const scale = heatLegend(Math.max(...map.rows.flat()), map.format);
    const left = el("span", {}, free ? `Degrees of freedom at λ = ${digits(free.lambda, 5)}:` : "Bytes of a KV head:");
    legend.replaceChildren(left, scale, ...(layers.length ? segments(allParts(layers)).map(swatch) : []));
  };
  host.replaceChildren(el("div", { class: "card" }, layers.length && totals(layers), legend, figure, readout));
  onWidth(figure, (now) => {
    width = now;
    again();
  });
  redraw.bytes = again;
  const skipped = free ? free.skipped : [];
  if (skipped.length) host.append(note(`Left softmax: ${skipped.map((x) => `${x.name} (${x.reason})`).join("; ")}.`));
  return true;
}

function bytesLead(free, layers) {
  const left = free
    ? "degrees of freedom: how many directions the attention of a head needs at the tolerance λ."
    : "bytes of each KV head, which were given out by how much more or fewer bytes change what the model predicts.";
  return layers.length ? `Left, ${left} Right, what the bytes of each layer are spent on.` : `Shown are the ${left}`;
}

const totals = (layers) =>
  el(
    "div",
    { class: "sum", id: "plan-sum" },
    el("strong", {}, `${bytes(sum(layers.map((layer) => layer.bytes)))} per sequence`),
    el("span", { class: "quiet" }, partWords(allParts(layers))),
  );

function planFigure(map, layers, width, readout) {
  const tall = map.rows.length > 40 ? 14 : map.rows.length > 16 ? 18 : map.rows.length > 8 ? 26 : 34;
  const drawn = layers.some(Boolean),
    half = drawn ? Math.round(width * (width > 680 ? 0.45 : 0.5)) : width;
  const left = Math.max(26, 8 + 7 * Math.max(...map.rowNames.map((name) => name.length)));
  const heat = heatMap(
    {
      rows: map.rows,
      names: map.rowNames,
      left: Math.min(left, half / 3),
      height: tall,
      top: Math.max(...map.rows.flat()),
      format: map.format,
      describe: map.describe,
      visit: (row, column) => {
        readout.textContent = map.describe(row, column).replace("\n", ": ");
      },
      label: `${map.rows.length} layers by KV head. Arrow keys read them.`,
    },
    half,
  );
  if (!drawn) return heat;
  const columns = { display: "grid", "grid-template-columns": `${half}px ${width - half}px` };
  return el("div", { style: columns }, heat, barsOfLayers(layers, map.rowNames, width - half, tall));
}

function barsOfLayers(layers, names, width, tall) {
  const picture = drawing(width, layers.length * tall, "Bytes of each layer");
  const there = layers.filter(Boolean);
  const room = 14 + 6.4 * Math.max(...there.map((layer) => sizeWords(layer).length));
  const words = room < 0.6 * width ? room : 0; // otherwise pointing at a layer says them
  const most = Math.max(1, ...there.map((layer) => layer.bytes));
  const x = (value) => 14 + (value / most) * (width - words - 20);
  layers.forEach((layer, n) => {
    if (!layer) return;
    let from = 0;
    const bars = segments(layer.parts).map(({ name, style, bytes: size }) => {
      const place = { x: x(from), y: n * tall + tall * 0.18, height: tall * 0.64, width: x(size) - x(0), rx: 2 };
      from += size;
      return svg("rect", { class: name, style, ...place });
    });
    const hit = { class: "row-hit", x: 0, y: n * tall, width, height: tall };
    const hint = `Layer ${names[n]}: ${sizeWords(layer)} = ${bytes(layer.bytes)}\n${partWords(layer.parts)}`;
    picture.append(
      svg(
        "g",
        { class: "plan-row" },
        bars,
        words > 0 && svg("text", { x: width, y: (n + 0.5) * tall + 4, "text-anchor": "end" }, sizeWords(layer)),
        svg("rect", { ...hit, on: pointed(hint) }),
      ),
    );
  });
  return picture;
}
