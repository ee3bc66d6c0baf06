// A plan, drawn beside the degrees of freedom it may come from.

function sizeWords(sizes) {
  if (!sizes) return "softmax kept";
  const [features, window, sinks] = [0, 1, 2].map((n) => range(sizes.map((size) => size[n])));
  const parts = [`${features} ${features === "1" ? "feature" : "features"}`];
  if (window !== "0") parts.push(`window ${window}`);
  if (sinks !== "0") parts.push(`${sinks} ${sinks === "1" ? "sink" : "sinks"}`);
  return parts.join(", ");
}

function planFigure(tables, plan, wanted, names, student, width, readout) {
  const rows = tables.dof[wanted.lambda],
    tall = rows.length > 40 ? 14 : rows.length > 16 ? 18 : rows.length > 8 ? 26 : 34;
  const wide = width > 680,
    half = Math.round(width * (wide ? 0.45 : 0.5));
  const words = wide ? 14 + 6.2 * Math.max(0, ...(plan.layers || []).map((layer) => sizeWords(layer.sizes).length)) : 0;
  const left = Math.max(26, 8 + 7 * Math.max(...names.map((name) => name.length)));
  const beside = (layer) => (own.has(layer.name) ? `\nthe student shown: ${bytes(own.get(layer.name))}` : "");
  const given = (layer) => `${sizeWords(layer.sizes)} = ${bytes(sum(layer.parts))}`;
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
  const most = Math.max(1, ...own.values(), ...(plan.layers || []).map((layer) => sum(layer.parts)));
  const x = (value) => 14 + (value / most) * (width - half - words - 20);
  (plan.layers || []).forEach((layer, n) => {
    const [features, tokens] = layer.parts,
      top = n * tall + tall * 0.18,
      height = tall * 0.64;
    picture.append(
      svg(
        "g",
        {
          class: "plan-row",
          "data-name": layer.name,
          "data-sizes": JSON.stringify(layer.sizes),
          "data-bytes": features + tokens,
        },
        svg("rect", { class: "bar-features", x: x(0), y: top, height, width: x(features) - x(0), rx: 2 }),
        svg("rect", {
          class: "bar-tokens",
          x: x(features),
          y: top,
          height,
          width: x(features + tokens) - x(features),
          rx: 2,
        }),
        own.get(layer.name) &&
          svg("line", {
            x1: x(own.get(layer.name)),
            x2: x(own.get(layer.name)),
            y1: n * tall + 1,
            y2: (n + 1) * tall - 1,
            style: { stroke: "var(--ink)", "stroke-width": "2" },
          }),
        wide && svg("text", { x: width - half, y: (n + 0.5) * tall + 4, "text-anchor": "end" }, sizeWords(layer.sizes)),
        svg("rect", {
          class: "row-hit",
          x: 0,
          y: n * tall,
          width: width - half,
          height: tall,
          on: {
            pointermove: (event) => {
              tip(`Layer ${names[n]}: ${given(layer)}${beside(layer)}`, event);
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
