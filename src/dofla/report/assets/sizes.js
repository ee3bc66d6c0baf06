// What `dofla frontier` found: quality against bytes of state, by length, and the smallest state within a target.

function drawSizes(host, runs) {
  const own = runs.filter((run) => run.sizes);
  if (!own.length) return false;
  host.replaceChildren(...own.flatMap((run) => [sizesChart(run), sizesFound(run)]));
  return true;
}

function sizesChart(run) {
  const { lengths, target, texts } = run.sizes,
    several = Object.keys(texts).length > 1;
  const worst = lengths.flatMap((one) => one.worst);
  const held = [...worst.map((p) => p.bytes), ...lengths.map((one) => one.cache)];
  const losses = [...worst.flatMap((p) => [p.gap, p.kl]), target].filter((loss) => loss > 0);
  const line = (one, n, what, looks) => ({
    name: `${what === "kl" ? "KL" : "gap"}, ${whole(one.length)} tokens`,
    colour: RUN_COLOURS[n % RUN_COLOURS.length],
    points: one.worst.map((p) => [p.bytes, p[what], what === "gap" ? p.error : 0]),
    ...looks,
  });
  return lineChart({
    title: `Gap against state, ${run.model.title}`,
    height: 360,
    lines: lengths.flatMap((one, n) => [
      line(one, n, "gap", {}),
      line(one, n, "kl", { dash: "5 4", dots: false }),
    ]),
    marks: lengths.map((one) => ({ x: one.cache, words: `softmax, ${whole(one.length)} tokens` })),
    rules: target ? [{ y: target, words: `target ${target}` }] : [],
    words: `${several ? "At each size the text that is kept worst. " : ""}Bands are intervals of 95 % over windows.`,
    x: {
      label: "state per sequence",
      kind: "binary",
      format: plainBytes,
      from: Math.min(...held) / 1.3,
      to: Math.max(...held) * 1.3,
    },
    y: {
      label: "gap and KL, nats per token",
      kind: "log",
      format: digits,
      from: Math.min(...losses) / 1.5,
      to: Math.max(...losses) * 1.3,
    },
  });
}

function sizesFound(run) {
  const { lengths, target, texts, made } = run.sizes;
  const rows = lengths.map(({ length, cache, student }) => [
    whole(length),
    bytes(cache),
    ...(student
      ? [bytes(student.bytes), times(cache / student.bytes), digits(student.gap), digits(student.kl), student.text]
      : ["none tried", "–", "–", "–", "–"]),
  ]);
  const folders = [...new Set(lengths.filter((one) => one.student).map((one) => one.student.folder))];
  return el(
    "div",
    { class: "card" },
    target && el("h3", {}, `The smallest state whose gap and KL are within ${target}`),
    target && table(["Tokens", "Softmax cache", "State", "Smaller", "Gap", "KL", "Worst text"], rows),
    el(
      "div",
      { class: "commands" },
      folders.map((folder) => command(`dofla generate ${folder}`).node),
    ),
    el("details", {}, el("summary", {}, "Every text"), textsTable(lengths)),
    el(
      "p",
      { class: "small quiet" },
      `Made from ${made.windows} windows of ${whole(made.length)} tokens: ${made.source}`,
      made.context ? `, for a context of ${whole(made.context)} tokens` : "",
      made.retrieval_heads ? `, with ${made.retrieval_heads} retrieval heads. ` : ". ",
      `Evaluated on ${Object.values(texts).join(", ")}.`,
    ),
  );
}

function textsTable(lengths) {
  const rows = lengths.flatMap(({ length, points }) =>
    points.map((p) => [p.text, whole(length), bytes(p.bytes), `${digits(p.gap)} ± ${digits(p.error)}`, digits(p.kl)]),
  );
  return table(["Text", "Tokens", "State", "Gap", "KL"], rows);
}
