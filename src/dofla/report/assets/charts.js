// A line chart: axes, lines with a band of error, marks, a cursor for pointer and keys, and its numbers as a table.

// spec: title, words, x and y {label, kind, format, from, to}, lines [{name, color, points [[x, y, error]], dash,
// dots, thin, wide (to lie under another), unseen (only read, not drawn)}], marks [{x, words, color}], rules [{y,
// words}], height. Lines without points are left out; without any line there is no chart.
function lineChart(given) {
  const lines = given.lines.filter((line) => line.points.some((point) => point[1] !== null));
  if (!lines.some((line) => !line.unseen)) return null;
  // A line of one point is a marker.
  const spec = { ...given, lines: lines.map((line) => (line.points.length > 1 ? line : { ...line, dots: true })) };
  const head = el("div", { class: "chart-title" }, el("h3", {}, spec.title));
  const legend = el(
    "div",
    { class: "legend" },
    [
      ...spec.lines.filter((line) => line.name && !line.unseen),
      // Rules and marks are named here, as words inside a narrow chart would lie on its lines.
      ...[...(spec.rules || []), ...(spec.marks || [])].map(({ words, color, x }) => ({
        name: words,
        color: color || "var(--ink)",
        dash: "2 3",
        dots: false,
        upright: x !== undefined,
      })),
    ].map((line) => el("span", {}, sample(line), line.name)),
  );
  const host = el("div", { class: "chart" });
  const readout = el("p", { class: "readout", "aria-live": "polite" }, spec.words || "");
  const figure = el("figure", { class: "card" }, head, legend, host, readout, spec.table !== false && numbers(spec));
  onWidth(host, (width) => host.replaceChildren(draw(spec, width, readout)));
  return figure;
}

function sample(line) {
  const style = { stroke: line.color, "stroke-width": line.wide ? "7" : "2.5", opacity: line.wide ? ".4" : "1" };
  const ends = line.upright ? { x1: 13, x2: 13, y1: 0, y2: 10 } : { x1: 1, x2: 25, y1: 5, y2: 5 };
  return svg(
    "svg",
    { viewBox: "0 0 26 10", "aria-hidden": "true" },
    svg("line", { ...ends, style, "stroke-dasharray": line.dash }),
    line.dots !== false && !line.wide && svg("circle", { cx: 13, cy: 5, r: 3.2, style: { fill: line.color } }),
  );
}

const pointAt = (line, x) => line.points.find((point) => point[0] === x);

// The lines that have a name, and all places of theirs.
function readable(spec) {
  const named = spec.lines.filter((line) => line.name);
  const places = [...new Set(named.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
  return { named, places };
}

function numbers(spec) {
  const { named, places } = readable(spec);
  const rows = places.map((x) => [
    spec.x.format(x),
    ...named.map((line) => (pointAt(line, x) ? spec.y.format(pointAt(line, x)[1]) : "–")),
  ]);
  return folded("The numbers", table([spec.x.label, ...named.map((line) => line.name)], rows));
}

function looks({ thin, wide }) {
  return { "stroke-width": thin ? "1" : wide ? "8" : "2.25", opacity: thin ? ".45" : wide ? ".4" : "1" };
}

function extent(spec, axis) {
  const { from, to } = spec[axis];
  const values = spec.lines
    .filter((line) => !line.unseen)
    .flatMap((line) => line.points.flatMap((p) => (axis === "x" ? [p[0]] : [p[1] - (p[2] || 0), p[1] + (p[2] || 0)])));
  const usable = values.filter((value) => spec[axis].kind === "linear" || value > 0);
  let low = from ?? Math.min(...usable),
    high = to ?? Math.max(...usable);
  if (low === high) [low, high] = spec[axis].kind === "linear" ? [low - 1, high + 1] : [low / 2, high * 2];
  if (axis === "y" && spec.y.kind !== "linear") [low, high] = [low / 1.15, high * 1.15];
  if (axis === "y" && spec.y.kind === "linear" && from === undefined) low -= (high - low) * 0.06;
  if (axis === "y" && spec.y.kind === "linear" && to === undefined) high += (high - low) * 0.06;
  return [low, high];
}

// A grid line at each tick of y, a mark at each of x, and below them what both are; x and y: {at, ticks, format}.
function axes(picture, { left, right, bottom, height, middle }, x, y, words) {
  for (const tick of y.ticks)
    picture.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: y.at(tick), y2: y.at(tick) }),
      svg("text", { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, y.format(tick)),
    );
  for (const tick of x.ticks)
    picture.append(
      svg("line", { class: "axis", x1: x.at(tick), x2: x.at(tick), y1: bottom, y2: bottom + 4 }),
      svg("text", { x: x.at(tick), y: bottom + 17, "text-anchor": "middle" }, x.format(tick)),
    );
  picture.append(
    svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { x: middle, y: height - 4, "text-anchor": "middle" }, words),
  );
}

function draw(spec, width, readout) {
  const height = spec.height || 250,
    [left, right, top, bottom] = [56, 18, 14, 38];
  const [x0, x1] = extent(spec, "x"),
    [y0, y1] = extent(spec, "y");
  const x = scale(spec.x.kind, x0, x1, left, width - right),
    y = scale(spec.y.kind, y0, y1, height - bottom, top);
  const clamp = (value) => y(Math.min(Math.max(value, spec.y.kind === "linear" ? -Infinity : y0), y1));
  const label = `${spec.title}. Left and right arrow keys read it.`;
  const picture = drawing(width, height, label, { tabindex: "0" });
  axes(
    picture,
    { left, right: width - right, bottom: height - bottom, height, middle: (left + width - right) / 2 },
    { at: x, ticks: TICKS[spec.x.kind](x0, x1, Math.max(3, Math.floor((width - left) / 60))), format: spec.x.format },
    { at: y, ticks: TICKS[spec.y.kind](y0, y1, 5), format: spec.y.format },
    `${spec.x.label}  ·  ${spec.y.label}`,
  );
  const dashed = (ends, color) =>
    picture.append(svg("line", { ...ends, style: { stroke: color || "var(--ink)" }, "stroke-dasharray": "2 3" }));
  for (const rule of spec.rules || []) dashed({ x1: left, x2: width - right, y1: y(rule.y), y2: y(rule.y) });
  for (const mark of spec.marks || [])
    dashed({ x1: x(mark.x), x2: x(mark.x), y1: top, y2: height - bottom }, mark.color);
  for (const line of spec.lines.filter((one) => !one.unseen)) {
    const points = line.points.filter((p) => p[1] !== null);
    if (points.some((p) => p[2])) {
      const edge = (sign) => points.map((p) => `${x(p[0])},${clamp(p[1] + sign * (p[2] || 0))}`);
      picture.append(
        svg("polygon", {
          points: [...edge(1), ...edge(-1).reverse()].join(" "),
          style: { fill: line.color, opacity: ".15" },
        }),
      );
    }
    picture.append(
      svg("polyline", {
        points: points.map((p) => `${x(p[0])},${clamp(p[1])}`).join(" "),
        fill: "none",
        "stroke-dasharray": line.dash,
        "stroke-linejoin": "round",
        style: { stroke: line.color, ...looks(line) },
      }),
    );
    if (line.dots !== false && !line.thin && !(line.wide && points.length > 1))
      picture.append(
        ...points.map((p) => svg("circle", { cx: x(p[0]), cy: clamp(p[1]), r: 3.2, style: { fill: line.color } })),
      );
  }
  cursor(picture, spec, x, { top, bottom: height - bottom, width }, readout);
  return picture;
}

function cursor(picture, spec, x, box, readout) {
  const { named, places } = readable(spec);
  const hair = svg("line", {
    y1: box.top,
    y2: box.bottom,
    style: { stroke: "var(--strong-line)", visibility: "hidden" },
  });
  picture.append(hair);
  let at = -1;
  const words = (place) => [
    `${spec.x.label} ${spec.x.format(place)}`,
    ...named
      .map((line) => [line, pointAt(line, place)])
      .filter(([, point]) => point)
      .map(
        ([line, point]) => `${line.name} ${spec.y.format(point[1])}${point[2] ? ` ± ${spec.y.format(point[2])}` : ""}`,
      ),
  ];
  const show = (n) => {
    at = n;
    hair.setAttribute("x1", x(places[n]));
    hair.setAttribute("x2", x(places[n]));
    hair.style.visibility = "visible";
    readout.textContent = words(places[n]).join(" · ");
  };
  const leave = () => {
    at = -1;
    hair.style.visibility = "hidden";
    readout.textContent = spec.words || "";
    tip("");
  };
  picture.addEventListener("pointermove", (event) => {
    const frame = picture.getBoundingClientRect(),
      here = (event.clientX - frame.left) * (box.width / frame.width);
    const nearest = places.reduce(
      (best, place, n) => (Math.abs(x(place) - here) < Math.abs(x(places[best]) - here) ? n : best),
      0,
    );
    show(nearest);
    tip(words(places[nearest]).join("\n"), event);
  });
  picture.addEventListener("pointerleave", leave);
  picture.addEventListener("blur", leave);
  onArrows(picture, (step) => show(Math.min(Math.max(at + step, 0), places.length - 1)));
}
