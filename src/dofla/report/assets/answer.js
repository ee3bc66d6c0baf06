// The answer first: one sentence, and four figures with what they are compared with.

const LEVELS = { use: ["✓", "Use it"], care: ["!", "With care"], no: ["✕", "Not this one"] };

function drawAnswer(host, run, student) {
  const [sign, words] = LEVELS[student.verdict.level];
  host.replaceChildren(
    el(
      "div",
      { class: "answer" },
      el("p", { class: "kicker" }, `Linear attention instead of softmax · run ${run.name}`),
      el("h1", { id: "answer-title" }, run.model.title),
      el(
        "div",
        { class: `verdict ${student.verdict.level}` },
        el("span", { class: "badge" }, el("span", { "aria-hidden": "true" }, sign), words),
        el("p", { id: "verdict" }, student.verdict.sentence),
      ),
      el(
        "div",
        { class: "tiles" },
        qualityTile(run, student),
        run.language ? wordsTile(student) : likenessTile(student),
        memoryTile(run, student),
        speedTile(run, student),
      ),
      el(
        "p",
        { class: "facts" },
        el("span", {}, `Student: ${student.name}`),
        el("span", {}, `${run.model.class}, ${whole(run.model.parameters / 1e6)} M parameters`),
        el("span", {}, `budget: the bytes of ${run.budget} features per head`),
        el("span", {}, `judged on ${run.windows} ${run.length ? `windows of ${run.length} tokens` : "inputs"}`),
        student.seeds.length > 1 && el("span", {}, `${student.seeds.length} seeds`),
      ),
      el("details", {}, el("summary", {}, "How the sentence is chosen"), el("p", { class: "lead small" }, data.rule)),
    ),
  );
  return true;
}

function drawTitle(host, run) {
  const words = run.sizes ? "how many bytes it needs" : "a plan";
  const named = run.sizes || run.plan ? `Linear attention instead of softmax · ${words}` : "Profile";
  const kicker = el("p", { class: "kicker" }, named);
  const title = el("h1", { id: "answer-title" }, run.model.title);
  host.replaceChildren(el("div", { class: "answer" }, kicker, title));
  return true;
}

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
        el("div", { class: "fill", style: { width: `${(100 * row.value) / top}%`, background: row.colour } }),
      ),
      el("span", {}, row.words),
    ]),
  );
}

const both = (teacher, student, words) =>
  bars([
    { name: "original", value: teacher, words: words(teacher), colour: "var(--teacher)" },
    { name: "student", value: student, words: words(student), colour: "var(--student)" },
  ]);

const overSeeds = ({ spread }, seeds) => (seeds.length > 1 ? ` ± ${digits(spread)} over ${seeds.length} seeds` : "");

function qualityTile(run, { quality, seeds }) {
  if (!run.language) {
    return tile("Embeddings", digits(quality.cosine.mean), "cosine to the original’s", [
      `Rank correlation of similarities ${digits(quality.spearman.mean)}${overSeeds(quality.spearman, seeds)}.`,
    ]);
  }
  const increase = quality.loss_increase.mean,
    more = Math.exp(increase) - 1;
  const sure = overSeeds(quality.loss_increase, seeds) || `95 % interval ${quality.interval.map((x) => digits(x)).join(" to ")}`;
  const higher = more < 1 ? `${more < 0 ? "−" : "+"}${percent(Math.abs(more), 1)}` : `× ${digits(1 + more)}`;
  return tile(
    "Quality lost",
    digits(increase),
    "nats per token",
    [`Perplexity ${higher}; ${sure}.`],
    both(quality.teacher_loss.mean, quality.student_loss.mean, (x) => digits(x)),
  );
}

function likenessTile({ quality }) {
  return tile("Attention", digits(quality.attention_output_error.mean), "error of its outputs", [
    `Divergence of attention ${digits(quality.attention_kl.mean)} nats, mean over layers.`,
  ]);
}

function wordsTile({ quality, agreed, tasks }) {
  return tile("Same next token", percent(quality.top1_agreement.mean), "of the time", [
    agreed &&
      `Left to themselves, both write the same for ${agreed.tokens.toFixed(1)} of ${agreed.of} tokens ` +
        `(${agreed.prompts} prompts).`,
    tasks
      ? `Tasks (${tasks.rows.length}): ${percent(tasks.student, 1)} right, the original ${percent(tasks.teacher, 1)}.`
      : "Tasks: not asked yet; the command is below.",
  ]);
}

function memoryTile(run, student) {
  const { state_bytes: state, cache_bytes: token, kept_bytes: kept, smaller_from: from } = student,
    length = run.length;
  if (!run.language) {
    return tile("Size", bytes(state), "counted as a decoder’s state", [
      "An encoder keeps none: the bytes say how large its features and windows are.",
    ]);
  }
  const here = state + kept * length,
    ratio = (token * length) / here,
    less = ratio >= 1 ? `${times(ratio)} less` : `${times(1 / ratio)} more`;
  return tile(
    "Memory",
    bytes(here),
    kept ? `at ${whole(length)} tokens` : "whatever the length",
    [`${less} than the original at ${whole(length)} tokens${from ? `; smaller from ${roughly(from)} tokens on` : ""}.`],
    both(token * length, here, bytes),
  );
}

function speedTile(run, { speed, crossings }) {
  const what = run.language ? "write" : "read",
    own = speed && speed.student[what],
    theirs = speed && speed.teacher[what];
  if (!own || !theirs)
    return tile(
      "Speed",
      "–",
      "not timed",
      [],
      el("p", { class: "more" }, "Timed when asked for: ", el("code", {}, run.commands.speed)),
    );
  const [length, seconds] = own.at(-1),
    against = theirs.at(-1)[1],
    from = crossings[what];
  const big = against >= seconds ? [times(against / seconds), "as fast"] : [times(seconds / against), "as long"];
  return tile(
    run.language ? "Writing a token" : "Reading",
    big[0],
    `${big[1]} as the original, at ${whole(length)} tokens`,
    [from === null ? "Not faster at the longest context timed." : `Faster from ${roughly(from)} tokens on.`],
    both(against, seconds, time),
  );
}
