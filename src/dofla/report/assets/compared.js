// All models of all runs: a bar for each or, where most differ in bytes, their loss against the bytes.

const RUN_COLORS = ["var(--student)", "var(--teacher)", "var(--third)", "var(--care)", "var(--no)", "var(--use)"];
const SHAPES = [
  (x, y) => `M${x - 5} ${y}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0`,
  (x, y) => `M${x - 5} ${y - 5}h10v10h-10z`,
  (x, y) => `M${x} ${y - 6}l6 11h-12z`,
  (x, y) => `M${x} ${y - 7}l7 7l-7 7l-7 -7z`,
];

const ALIKE = 1.05; // bytes that differ by less than that are equal

function drawCompared(host, runs, shown) {
  const groups = [
    [true, "Loss increase", "nats per token"],
    [false, "1 − cosine of embeddings", ""],
  ].map(([language, ...words]) => [runs.filter((run) => run.language === language), ...words]);
  const charts = groups
    .filter(([own]) => sum(own.map((run) => run.students.length)) > 1)
    .map(([own, title, unit]) => comparedChart(own, runs, shown, title, unit));
  if (!charts.length) return false;
  host.replaceChildren(...charts);
  return true;
}

function comparedChart(own, runs, shown, title, unit) {
  const points = own
    .flatMap((run) =>
      run.students.map((student) => ({
        run,
        student,
        x: student.state_bytes + student.kept_bytes * (run.length || 0),
        y: student.lost,
        spread: (student.quality.loss_increase || student.quality.cosine).spread,
      })),
    )
    .filter((point) => point.y !== null && point.x > 0)
    .sort((a, b) => a.y - b.y);
  const several = own.length > 1,
    sizes = [...points].sort((a, b) => a.x - b.x).filter((p, n, all) => !n || p.x > ALIKE * all[n - 1].x);
  const heads = ["Model", ...(several ? ["Run"] : []), "Cache", title, ...(own[0].language ? ["Perplexity"] : [])];
  const rows = points.map((p) => [
    p.student.name,
    ...(several ? [p.run.name] : []),
    bytes(p.x),
    digits(p.y),
    ...(own[0].language ? [perplexity(p.y)] : []),
  ]);
  const numbers = folded("The numbers", table(heads, rows));
  if (2 * sizes.length <= points.length) return el("figure", { class: "card" }, lossBars(points, several, shown, title, unit), numbers);
  const legend = several && el("div", { class: "legend" }, own.map((run) => runKey(run, runs)));
  const host = el("div", { class: "chart" }),
    readout = el("p", { class: "readout", "aria-live": "polite" });
  onWidth(host, (width) => host.replaceChildren(comparedPicture(points, runs, shown, width, title, unit, readout)));
  const lead = "Further down is closer to the original, further left is smaller; the line joins those that no other beats in both.";
  const head = el("h3", {}, `${title} against bytes${several ? "" : `, ${own[0].model.title}`}`);
  return el("figure", { class: "card" }, head, aside(lead), legend, host, readout, numbers);
}

const runKey = (run, runs) =>
  el(
    "span",
    {},
    svg("svg", { viewBox: "0 0 26 14", "aria-hidden": "true" }, pointMark(runs.indexOf(run), 13, 7)),
    `${run.model.title} (${run.name})`,
  );

// A bar for each, the closest to the original first. Logarithmic where the largest would hide the others.
function lossBars(points, several, shown, title, unit) {
  const low = Math.min(...points.map((p) => p.y)),
    high = Math.max(...points.map((p) => p.y)),
    log = low > 0 && high > 20 * low;
  const share = (y) => (log ? Math.log((2 * y) / low) / Math.log((2 * high) / low) : Math.max(y, 0) / high);
  const row = (p) =>
    el("div", { class: "row" }, [
      el(p.student === shown ? "b" : "span", {}, several ? `${p.student.name} (${p.run.name})` : p.student.name),
      el(
        "div",
        { class: "track" },
        el("div", {
          class: "fill",
          style: { width: `${100 * share(p.y)}%`, background: `var(--${p.student === shown ? "student" : "teacher"})` },
        }),
      ),
      el("span", {}, digits(p.y), unit && ` (${perplexity(p.y)})`, el("span", { class: "quiet" }, ` ${bytes(p.x)}`)),
    ]);
  const words = `${unit && `${unit}, in brackets the perplexity; then the cache per sequence. `}Shorter is better`;
  return [
    el("h3", {}, title),
    aside(`${words}${log ? "; logarithmic scale" : ""}. The model shown is in orange.`),
    el("div", { class: "bars compared" }, points.map(row)),
  ];
}

const pointMark = (n, x, y) =>
  svg("path", { d: SHAPES[n % SHAPES.length](x, y), style: { fill: RUN_COLORS[n % RUN_COLORS.length] } });

function comparedPicture(points, runs, shown, width, title, unit, readout) {
  const height = width > 640 ? 360 : 300,
    [left, right, top, bottom] = [56, 20, 18, 40];
  const xs = points.map((p) => p.x),
    ys = points.map((p) => p.y),
    kind = ys.every((y) => y > 0) ? "log" : "linear";
  const pad =
    kind === "log"
      ? [Math.min(...ys) / 1.6, Math.max(...ys) * 1.6]
      : [Math.min(...ys) - 0.02, Math.max(...ys) * 1.1 + 0.01];
  const middle = Math.sqrt(Math.min(...xs) * Math.max(...xs)),
    x0 = Math.min(Math.min(...xs) / 1.3, middle / 2.2),
    x1 = Math.max(Math.max(...xs) * 1.5, middle * 2.2);
  const x = scale("log", x0, x1, left, width - right),
    y = scale(kind, ...pad, height - bottom, top);
  const hint = `${title} against bytes. Left and right arrow keys read the models.`;
  const picture = drawing(width, height, hint, { tabindex: "0" });
  axes(
    picture,
    { left, right: width - right, bottom: height - bottom, height, middle: (left + width) / 2 },
    { at: x, ticks: TICKS.binary(x0, x1, Math.max(3, Math.floor(width / 110))), format: plainBytes },
    { at: y, ticks: TICKS[kind](...pad, 9), format: (tick) => digits(tick, kind === "log" && tick < 0.01 ? 4 : 2) },
    `cache per sequence  ·  ${title.toLowerCase()}${unit ? `, ${unit}` : ""}`,
  );
  for (const run of new Set(points.map((p) => p.run))) {
    let best = Infinity;
    const front = points
      .filter((p) => p.run === run)
      .sort((a, b) => a.x - b.x || a.y - b.y)
      .filter((p) => p.y < best && ((best = p.y), true));
    const path = front.map((p, n) => (n ? `H${x(p.x)}V${y(p.y)}` : `M${x(p.x)} ${y(p.y)}`)).join("");
    picture.append(
      svg("path", {
        d: path,
        fill: "none",
        "stroke-dasharray": "3 4",
        style: { stroke: RUN_COLORS[runs.indexOf(run) % RUN_COLORS.length], "stroke-width": "1.5" },
      }),
    );
  }
  const order = [...points].sort((a, b) => a.x - b.x || a.y - b.y);
  const words = (p) => {
    const name = runs.length > 1 ? `${p.student.name}, ${p.run.name}` : p.student.name;
    const value = p.spread ? `${digits(p.y)} ± ${digits(p.spread)}` : digits(p.y);
    return `${name}: ${title.toLowerCase()} ${value} at ${bytes(p.x)}`;
  };
  const places = new Map(points.map((p) => [p, [x(p.x), y(p.y)]]));
  const taken = [...places.values()].map(([across, down]) => [across - 7, down - 7, 14, 14]);
  for (const p of order) {
    const [across, down] = places.get(p);
    if (p.student === shown) {
      const style = { stroke: "var(--ink)", "stroke-width": "1.5" };
      picture.append(svg("circle", { cx: across, cy: down, r: 10, fill: "none", style }));
    }
    const pointed = { pointermove: (event) => tip(words(p), event), pointerleave: () => tip("") };
    const target = svg("circle", { cx: across, cy: down, r: 14, fill: "transparent" });
    picture.append(svg("g", { on: pointed }, pointMark(runs.indexOf(p.run), across, down), target));
    const name = p.student.name.length > 26 ? `${p.student.name.slice(0, 25)}…` : p.student.name;
    const label = freePlace(across, down, name.length * 6.6, taken, [left, width - right]);
    if (!label) continue; // the hint and the table have it
    taken.push(label.box);
    const looks = { class: p.student === shown ? "halo strong" : "halo", "text-anchor": label.anchor };
    picture.append(svg("text", { x: label.x, y: label.y, ...looks }, name));
  }
  let at = -1;
  onArrows(picture, (step) => {
    at = Math.min(Math.max(at + step, 0), order.length - 1);
    readout.textContent = words(order[at]);
  });
  return picture;
}

// Where words of this width can stand beside a point: right, left, above or below it, over nothing else.
function freePlace(across, down, wide, taken, [from, to]) {
  const sides = [
    { x: across + 13, y: down + 4, anchor: "start", left: across + 13 },
    { x: across - 13, y: down + 4, anchor: "end", left: across - 13 - wide },
    { x: across, y: down - 13, anchor: "middle", left: across - wide / 2 },
    { x: across, y: down + 22, anchor: "middle", left: across - wide / 2 },
  ];
  const meets = ([x, y, w, h], [a, b, c, d]) => x < a + c && a < x + w && y < b + d && b < y + h;
  for (const side of sides) {
    side.box = [side.left, side.y - 11, wide, 14];
    const inside = side.left >= from && side.left + wide <= to;
    if (inside && !taken.some((other) => meets(side.box, other))) return side;
  }
  return null;
}
