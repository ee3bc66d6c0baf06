// A heat map of layers and heads, with cells that can be pointed at, walked over with arrow keys, and chosen.

// spec: rows [[number or null]], names (of rows), top (value of the darkest), format, describe(row, column),
// choose(row, column), visit(row, column), left (width for names), height (of a row), chosen [row, column]
function heatMap(spec, width) {
  const columns = Math.max(...spec.rows.map((row) => row.length)),
    rows = spec.rows.length;
  const left = spec.left ?? 30,
    tall = spec.height,
    wide = (width - left) / columns;
  const gap = wide > 12 && tall > 12 ? 2 : 0.5;
  const picture = drawing(width, rows * tall, spec.label, { tabindex: "0" });
  const ring = svg("rect", {
    fill: "none",
    rx: 3,
    style: { stroke: "var(--ink)", "stroke-width": "2", visibility: "hidden" },
  });
  const place = (row, column) => ({
    x: left + column * wide + gap / 2,
    y: row * tall + gap / 2,
    width: wide - gap,
    height: tall - gap,
  });
  const every = Math.ceil(13 / tall);
  spec.rows.forEach((row, r) => {
    if (r % every === 0)
      picture.append(svg("text", { x: left - 7, y: (r + 0.5) * tall + 4, "text-anchor": "end" }, spec.names[r]));
    row.forEach((value, c) => {
      const color = value === null ? null : ramp("heat", value / spec.top);
      picture.append(
        svg("rect", { ...place(r, c), rx: gap > 1 ? 3 : 0, style: { fill: color ? css(color) : "var(--line)" } }),
      );
      if (color && wide > 30 && tall > 15) {
        const text = svg(
          "text",
          {
            x: left + (c + 0.5) * wide,
            y: (r + 0.5) * tall + 4,
            "text-anchor": "middle",
            style: { fill: inkOn(color) },
          },
          spec.format(value),
        );
        picture.append(text);
      }
    });
  });
  picture.append(ring);
  let [at, over] = spec.chosen || [0, 0];
  const mark = () => {
    fill(ring, place(at, over), []);
    ring.style.visibility = "visible";
  };
  const go = (row, column, event) => {
    at = Math.min(Math.max(row, 0), rows - 1);
    over = Math.min(Math.max(column, 0), spec.rows[at].length - 1);
    mark();
    const words = spec.describe(at, over);
    if (event) tip(words, event);
    else say(words);
    if (spec.visit) spec.visit(at, over);
  };
  const under = (event) => {
    const frame = picture.getBoundingClientRect(),
      factor = width / frame.width;
    return [
      Math.floor(((event.clientY - frame.top) * factor) / tall),
      Math.floor(((event.clientX - frame.left) * factor - left) / wide),
    ];
  };
  picture.addEventListener("pointermove", (event) => go(...under(event), event));
  picture.addEventListener("pointerleave", () => {
    tip("");
    if (spec.chosen) {
      [at, over] = spec.chosen;
      mark();
    } else ring.style.visibility = "hidden";
  });
  onArrows(picture, (across, down) => go(at + down, over + across), true);
  if (spec.choose) {
    picture.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      spec.choose(at, over);
    });
    picture.style.cursor = "pointer";
    picture.addEventListener("click", (event) => spec.choose(...under(event)));
  }
  if (spec.chosen) mark();
  return picture;
}

function heatLegend(top, format) {
  const stops = [0, 0.2, 0.4, 0.6, 0.8, 1].map((share) => css(ramp("heat", share)));
  return el(
    "div",
    { class: "legend" },
    el("span", {}, "0"),
    el("span", {
      class: "scale",
      style: {
        width: "110px",
        height: "10px",
        "border-radius": "5px",
        background: `linear-gradient(90deg, ${stops.join(", ")})`,
      },
      "aria-hidden": "true",
    }),
    el("span", {}, format(top)),
  );
}
