// What `dofla frontier` found: quality against bytes of state, by length and text, and the smallest state within a target.

const DASHES = [null, "7 4", "2 3", "10 3 2 3"];

function drawSizes(host, runs) {
  const own = runs.filter((run) => run.sizes);
  if (!own.length) return false;
  host.replaceChildren(...own.map((run) => el("div", {}, sizesChart(run), sizesFound(run))));
  return true;
}

function sizesChart(run) {
  const { lines, lengths, target, texts } = run.sizes,
    several = Object.keys(texts).length > 1;
  const values = lines.flatMap((line) => line.points.map((p) => p.gap)).filter((gap) => gap > 0);
  const held = [...lines.flatMap((line) => line.points.map((p) => p.bytes)), ...lengths.map((one) => one.cache)];
  const low = Math.min(...values, target || Infinity),
    high = Math.max(...values, target || 0);
  const order = [...new Set(lines.map((line) => line.length))];
  return lineChart({
    title: `Gap against state, ${run.model.title}`,
    height: 360,
    lines: lines.map((line) => ({
      name: `${tokens(line.length)} tokens${several ? `, ${line.text}` : ""}`,
      colour: RUN_COLOURS[order.indexOf(line.length) % RUN_COLOURS.length],
      dash: DASHES[Object.keys(texts).indexOf(line.text) % DASHES.length],
      points: line.points.map((p) => [p.bytes, p.gap, several ? 0 : (p.interval[1] - p.interval[0]) / 2]),
    })),
    marks: lengths.map((one) => ({ x: one.cache, words: `softmax, ${tokens(one.length)} tokens` })),
    rules: target ? [{ y: target, words: `target ${target}` }] : [],
    words: several ? "" : "Bands are intervals of 95 % over the windows that were read.",
    x: {
      label: "state per sequence",
      kind: "binary",
      format: plainBytes,
      from: Math.min(...held) / 1.3,
      to: Math.max(...held) * 1.3,
    },
    y: { label: "gap, nats per token", kind: "log", format: digits, from: low / 1.5, to: high * 1.3 },
  });
}

function sizesFound(run) {
  const { lengths, target, texts, made } = run.sizes;
  const words = `Made from ${made.windows} windows of ${made.length} tokens: ${made.source}. Judged on ${Object.values(texts).join(", ")}.`;
  if (!target) return el("p", { class: "small quiet" }, words);
  const rows = lengths.map(({ length, cache, student }) =>
    student
      ? [
          tokens(length),
          bytes(cache),
          bytes(student.bytes),
          times(cache / student.bytes),
          digits(student.loss),
          student.budget,
        ]
      : [tokens(length), bytes(cache), "none tried", "–", "–", "–"],
  );
  const folders = [...new Set(lengths.filter((one) => one.student).map((one) => one.student.folder))];
  return el(
    "div",
    { class: "card" },
    el("h3", {}, `The smallest state that loses ${target} or less`),
    table(["Tokens", "Softmax cache", "State", "Smaller", "Lost", "Budget"], rows),
    folders.map((folder) => command(`dofla generate ${folder}`).node),
    el("p", { class: "small quiet" }, words),
  );
}
