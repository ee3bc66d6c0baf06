// What `dofla frontier` found: the sentence, the table, then loss increase and KL against bytes, by length.

function drawSizes(host, runs) {
  const own = runs.filter((run) => run.sizes);
  if (!own.length) return false;
  host.replaceChildren(...own.flatMap((run) => [sizesFound(run, runs.length > 1), sizesChart(run)]).filter(Boolean));
  return true;
}

function sizesFound(run, named) {
  const { lengths, target, texts, made } = run.sizes;
  const rows = lengths.flatMap(({ length, cache, worst, student }) =>
    worst.map((p) => {
      const met = student && p.size === student.size;
      const cells = [whole(length), bytes(p.bytes), times(cache / p.bytes), digits(p.loss_increase), perplexity(p.loss_increase), digits(p.kl)];
      return cells.map((cell) => (met ? el("b", {}, cell) : cell));
    }),
  );
  const heads = ["Tokens", "Cache", "Smaller", "Loss +", "Perplexity", "KL"];
  const folders = [...new Set(lengths.filter((one) => one.student).map((one) => one.student.folder))];
  const several = Object.keys(texts).length > 1;
  return el(
    "div",
    { class: "card" },
    named && el("h3", {}, `${run.model.title} (${run.name})`),
    named && el("p", {}, run.sizes.verdict),
    table(heads, rows),
    el(
      "p",
      { class: "small quiet below" },
      "Loss +: increase of the loss; KL: divergence from the original; both in nats per token. ",
      several && "Of several texts, the one that loses most. ",
      target && folders.length > 0 && `Bold: the smallest whose loss increase and KL are within ${target}. `,
      `Calibrated on ${made.windows} windows of ${whole(made.length)} tokens: ${made.source}`,
      made.context ? `, for a context of ${whole(made.context)} tokens` : "",
      made.retrieval_heads ? `, with ${made.retrieval_heads} retrieval heads. ` : ". ",
      `Evaluated on ${Object.values(texts).join(", ")}.`,
    ),
    several && folded("Every text", textsTable(lengths)),
    el("div", { class: "commands" }, folders.map((folder) => command(`dofla chat ${folder}`))),
  );
}

function sizesChart(run) {
  const { lengths, target, texts } = run.sizes,
    several = Object.keys(texts).length > 1;
  const worst = lengths.flatMap((one) => one.worst);
  if (new Set(worst.map((p) => p.bytes)).size < 2) return null; // one size: the table has it all
  const held = [...worst.map((p) => p.bytes), ...lengths.map((one) => one.cache)];
  const losses = [...worst.flatMap((p) => [p.loss_increase, p.kl]), target].filter((loss) => loss > 0);
  const color = (n) => RUN_COLORS[n % RUN_COLORS.length];
  const line = (one, n, what, looks) => ({
    name: `${what === "kl" ? "KL" : "loss increase"}, ${whole(one.length)} tokens`,
    color: color(n),
    points: one.worst.map((p) => [p.bytes, p[what], what === "loss_increase" ? p.error : 0]).filter(([, loss]) => loss > 0),
    ...looks,
  });
  return lineChart({
    title: `Loss against bytes, ${run.model.title}`,
    height: 360,
    lines: lengths.flatMap((one, n) => [line(one, n, "loss_increase", {}), line(one, n, "kl", { dash: "5 4", dots: false })]),
    marks: lengths.map((one, n) => ({
      x: one.cache,
      words: `original’s cache, ${whole(one.length)} tokens`,
      color: color(n),
    })),
    rules: target ? [{ y: target, words: `target ${target}` }] : [],
    words: `${several ? "At each size the text that loses most. " : ""}Bands are 95 % intervals over windows.`,
    x: {
      label: "cache per sequence",
      kind: "binary",
      format: plainBytes,
      from: Math.min(...held) / 1.3,
      to: Math.max(...held) * 1.3,
    },
    y: {
      label: "nats per token",
      kind: "log",
      format: digits,
      from: Math.min(...losses) / 1.5,
      to: Math.max(...losses) * 1.3,
    },
  });
}

function textsTable(lengths) {
  const rows = lengths.flatMap(({ length, points }) =>
    points.map((p) => [p.text, whole(length), bytes(p.bytes), `${digits(p.loss_increase)} ± ${digits(p.error)}`, digits(p.kl)]),
  );
  return table(["Text", "Tokens", "Cache", "Loss increase", "KL"], rows);
}
