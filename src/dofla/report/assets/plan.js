// A plan, drawn beside the degrees of freedom it may come from.

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
  if (alike)
    return bits[0].map((each, n) =>
      words(
        tiers.map((own) => own[n][0]),
        [each],
      ),
    );
  return [
    words(
      tiers.map((own) => sum(own.map((tier) => tier[0]))),
      bits.flat(),
    ),
  ];
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

function planFigure(tables, plan, wanted, names, student, width, readout) {
  const rows = tables.dof[wanted.lambda],
    tall = rows.length > 40 ? 14 : rows.length > 16 ? 18 : rows.length > 8 ? 26 : 34;
  const wide = width > 680,
    half = Math.round(width * (wide ? 0.45 : 0.5));
  const room = 14 + 6.2 * Math.max(0, ...(plan.layers || []).map((layer) => sizeWords(layer).length));
  const words = wide && room < 0.6 * (width - half) ? room : 0; // otherwise pointing at a layer says them
  const left = Math.max(26, 8 + 7 * Math.max(...names.map((name) => name.length)));
  const beside = (layer) => (own.has(layer.name) ? `\nthe student shown: ${bytes(own.get(layer.name))}` : "");
  const given = (layer) => `${sizeWords(layer)} = ${bytes(layer.bytes)}`;
  const errors = tables.errors[wanted.lambda];
  const describe = (row, column) => {
    const error = errors[row][column];
    const shown = digits(rows[row][column]) + (error === null ? "" : ` ± ${digits(error)}`);
    const words = `Layer ${names[row]}, head ${column}: ${shown} degrees of freedom`;
    return plan.error ? words : `${words}\n${given(plan.layers[row])}`;
  };
  const heat = heatMap(
    {
      rows,
      names,
      left: Math.min(left, half / 3),
      height: tall,
      top: Math.max(...rows.flat()),
      format: (x) => digits(x),
      describe,
      visit: (row, column) => {
        readout.textContent = describe(row, column).replace("\n", ": ");
      },
      label: `Degrees of freedom of ${rows.length} layers by head. Arrow keys read them.`,
    },
    half,
  );
  const picture = svg("svg", {
    viewBox: `0 0 ${width - half} ${rows.length * tall}`,
    height: rows.length * tall,
    role: "img",
    "aria-label": "Bytes of each layer in this plan",
  });
  const own = new Map((student ? student.layers : []).map((layer) => [layer.name, layer.bytes]));
  const most = Math.max(1, ...own.values(), ...(plan.layers || []).map((layer) => layer.bytes));
  const x = (value) => 14 + (value / most) * (width - half - words - 20);
  (plan.layers || []).forEach((layer, n) => {
    const top = n * tall + tall * 0.18,
      height = tall * 0.64;
    let from = 0;
    const bars = segments(layer.parts).map(({ name, style, bytes: size }) => {
      const bar = svg("rect", { class: name, style, x: x(from), y: top, height, width: x(size) - x(0), rx: 2 });
      from += size;
      return bar;
    });
    picture.append(
      svg(
        "g",
        {
          class: "plan-row",
          "data-name": layer.name,
          "data-sizes": JSON.stringify(layer.sizes),
          "data-tiers": JSON.stringify(layer.tiers),
          "data-bytes": layer.bytes,
        },
        bars,
        own.get(layer.name) &&
          svg("line", {
            x1: x(own.get(layer.name)),
            x2: x(own.get(layer.name)),
            y1: n * tall + 1,
            y2: (n + 1) * tall - 1,
            style: { stroke: "var(--ink)", "stroke-width": "2" },
          }),
        words > 0 && svg("text", { x: width - half, y: (n + 0.5) * tall + 4, "text-anchor": "end" }, sizeWords(layer)),
        svg("rect", {
          class: "row-hit",
          x: 0,
          y: n * tall,
          width: width - half,
          height: tall,
          on: {
            pointermove: (event) => {
              tip(`Layer ${names[n]}: ${given(layer)}\n${partWords(layer.parts)}${beside(layer)}`, event);
            },
            pointerleave: () => tip(""),
          },
        }),
      ),
    );
  });
  return el(
    "div",
    { style: { display: "grid", "grid-template-columns": `${half}px ${width - half}px` } },
    heat,
    picture,
  );
}
