// The answer first: one sentence, and four figures with what they are compared with.

const LEVELS = { use: ["✓", "Close"], care: ["!", "Worse"], no: ["✕", "No"] };

function drawAnswer(host, run, student) {
  const [sign, words] = LEVELS[student.verdict.level],
    { unchecked } = student.verdict;
  host.replaceChildren(
    el(
      "div",
      { class: "answer" },
      el("p", { class: "kicker" }, `${student.word === "compressed" ? "Compressed cache" : "Student"} · run ${run.name}`),
      el("h1", { id: "answer-title" }, run.model.title),
      el(
        "div",
        { class: `verdict ${student.verdict.level}` },
        el("span", { class: "badge" }, el("span", { "aria-hidden": "true" }, sign), words),
        el(
          "div",
          {},
          el("p", { id: "verdict" }, unbroken(student.verdict.sentence)),
          unchecked.length && el("p", { class: "unchecked" }, `Not checked: ${unchecked.join(", ")}.`),
        ),
      ),
      el(
        "div",
        { class: "tiles" },
        qualityTile(run, student),
        run.language ? wordsTile(run, student) : likenessTile(student),
        memoryTile(run, student),
        student.speed && speedTile(run, student),
      ),
      el(
        "p",
        { class: "facts" },
        el("span", {}, `Shown: ${student.name}`),
        el("span", {}, `${run.model.class}, ${whole(run.model.parameters / 1e6)} M parameters`),
        student.word === "student" && el("span", {}, `budget: the bytes of ${run.budget} features per head`),
        el("span", {}, `evaluated on ${run.windows} ${run.length ? `windows of ${run.length} tokens` : "inputs"}`),
        student.seeds.length > 1 && el("span", {}, `${student.seeds.length} seeds`),
      ),
      folded("How the sentence is chosen", el("p", { class: "lead small" }, data.rule)),
    ),
  );
  return true;
}

function drawTitle(host, run) {
  const words = run.sizes ? "Sizes of the compressed cache" : run.plan ? "Plan" : "Profile";
  const title = el("h1", { id: "answer-title" }, run.model.title);
  const sentence = run.sizes && el("div", { class: "verdict" }, el("p", { id: "verdict" }, unbroken(run.sizes.verdict)));
  host.replaceChildren(el("div", { class: "answer" }, el("p", { class: "kicker" }, words), title, sentence || ""));
  return true;
}

// A figure stays beside its sign.
const unbroken = (text) => text.replace(/ (%|x|KiB|MiB)/g, "\u00a0$1");

function tile(title, big, unit, more, ...rest) {
  return el(
    "div",
    { class: "card tile" },
    el("h2", {}, title),
    el("p", { class: "big" }, big),
    el("p", { class: "unit" }, unit),
    ...rest,
    more.filter(Boolean).map((line) => el("p", { class: "more" }, line)),
  );
}

function bars(rows) {
  const top = Math.max(...rows.map((row) => row.value));
  return el(
    "div",
    { class: "bars", "aria-hidden": "true" },
    rows.map((row) => [
      el("span", {}, row.name),
      el(
        "div",
        { class: "track" },
        el("div", { class: "fill", style: { width: `${(100 * row.value) / top}%`, background: row.color } }),
      ),
      el("span", {}, row.words),
    ]),
  );
}

const both = (word, teacher, student, words) =>
  bars([
    { name: "original", value: teacher, words: words(teacher), color: "var(--teacher)" },
    { name: word, value: student, words: words(student), color: "var(--student)" },
  ]);

const overSeeds = ({ spread }, seeds) => (seeds.length > 1 ? ` ± ${digits(spread)} over ${seeds.length} seeds` : "");

function qualityTile(run, { word, quality, seeds }) {
  if (!run.language) {
    return tile("Embeddings", digits(quality.cosine.mean), "cosine to the original’s", [
      `Rank correlation of similarities ${digits(quality.spearman.mean)}${overSeeds(quality.spearman, seeds)}.`,
    ]);
  }
  const gap = quality.loss_increase.mean;
  const sure = overSeeds(quality.loss_increase, seeds) || `95 % interval ${quality.interval.map((x) => digits(x)).join(" to ")}`;
  return tile(
    "Perplexity increase",
    perplexity(gap),
    `loss +${digits(gap)} nats per token`.replace("+−", "−"),
    [`Loss increase: ${sure.replace(/^ /, "")}.`],
    both(word, quality.teacher_loss.mean, quality.student_loss.mean, (x) => digits(x)),
  );
}

function likenessTile({ quality }) {
  return tile("Attention", digits(quality.attention_output_error.mean), "error of its outputs", [
    `Divergence of attention ${digits(quality.attention_kl.mean)} nats, mean over layers.`,
  ]);
}

function wordsTile(run, { quality, agreed, tasks }) {
  return tile("Same next token", percent(quality.top1_agreement.mean), "of the positions", [
    agreed && agreed.share === 1
      ? `Greedy continuations of ${agreed.prompts} prompts are the same as the original’s.`
      : agreed &&
        `In greedy continuations of ${agreed.prompts} prompts, the first ${percent(agreed.share)} of the tokens are ` +
          "the original’s.",
    tasks &&
      `Tasks (${tasks.rows.length}): ${percent(tasks.student, 1)} right, the original ${percent(tasks.teacher, 1)}.`,
  ]);
}

function memoryTile(run, student) {
  const { state_bytes: state, cache_bytes: token, kept_bytes: kept, smaller_from: from } = student,
    length = run.length;
  if (!run.language) {
    return tile("Size", bytes(state), "as the cache of a decoder is counted", [
      "An encoder keeps none: the bytes say how large its features and windows are.",
    ]);
  }
  const here = state + kept * length,
    ratio = (token * length) / here;
  return tile(
    "Cache",
    ratio >= 1 ? `${times(ratio)} smaller` : `${times(1 / ratio)} larger`,
    `at ${whole(length)} tokens`,
    [kept ? "Some layers keep softmax attention, and grow." : "The same size at any length.", from && `Smaller from ${roughly(from)} tokens on.`],
    both(student.word, token * length, here, bytes),
  );
}

function speedTile(run, { word, speed, crossings }) {
  const what = run.language ? "write" : "read",
    own = speed.student[what],
    theirs = speed.teacher[what];
  if (!own || !theirs) return null;
  const [length, seconds] = own.at(-1),
    original = theirs.at(-1)[1],
    from = crossings[what];
  const big = original >= seconds ? [times(original / seconds), "as fast"] : [times(seconds / original), "as long"];
  return tile(
    run.language ? "Writing a token" : "Reading",
    big[0],
    `${big[1]} as the original, at ${whole(length)} tokens`,
    [from === null ? "Not faster at the longest context timed." : `Faster from ${roughly(from)} tokens on.`],
    both(word, original, seconds, time),
  );
}
