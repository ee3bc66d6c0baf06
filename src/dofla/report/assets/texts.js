// What both write, token by token; loss by position; recall by distance; tasks.

function drawTexts(host, run, student) {
  if (!run.language) return false;
  host.replaceChildren();
  if (student.texts) host.append(...student.texts.map((text) => textCard(text, student.word)));
  else host.append(missing(run, student, "texts", "Continuations"));
  const charts = [
    student.positions && positionChart(student.positions, student.word),
    student.recall && recallChart(student.recall, student.word),
  ].filter(Boolean);
  if (charts.length) host.append(el("div", { class: "columns" }, charts));
  if (!student.positions) host.append(missing(run, student, "positions", "Loss by position"));
  if (!student.recall) host.append(missing(run, student, "recall", "Recall by distance"));
  host.append(student.tasks ? taskCard(student.tasks, student.word) : adds("Tasks are added by", student.commands.tasks));
  const larger = adds("Larger samples of recall, loss by position and generation", student.commands.probe);
  host.append(folded("More prompts, and more questions", larger));
  return true;
}

// The middle of a long prompt says little.
const shortened = (text) => (text.length > 600 ? `${text.slice(0, 330)} […] ${text.slice(-170)}` : text);

// A student that has lost its way may write nothing but empty lines.
const calm = (text) => text.replace(/\n{3,}/g, (lines) => `\n↵ × ${lines.length}\n`);

function textCard({ prompt, teacher, student, agree }, word) {
  const parted = agree < Math.max(teacher.length, student.length);
  const one = (who, pieces) => {
    const same = pieces.slice(0, agree).join(""),
      first = pieces[agree] || "",
      space = first.match(/^\s*/)[0];
    return el(
      "div",
      { class: `written ${who}-text` },
      el("h4", { class: who }, who === "teacher" ? "Original" : capital(word)),
      el(
        "p",
        { class: "part" },
        el("span", { class: "same" }, (same + space).trimStart()),
        first &&
          el(
            "mark",
            { title: "the first token that differs" },
            first.trim() ? first.slice(space.length) : visible(first),
          ),
        calm(pieces.slice(agree + 1).join("")),
      ),
    );
  };
  return el(
    "article",
    { class: "card text-card" },
    el(
      "div",
      { class: "prompt" },
      el("h4", { class: "quiet" }, "Prompt"),
      el("p", { class: "part" }, shortened(calm(prompt).trimStart())),
    ),
    el("div", { class: "two" }, one("teacher", teacher), one("student", student)),
    aside(
      parted
        ? `${agree} ${agree === 1 ? "token is" : "tokens are"} the same; the first that differs is marked.`
        : `All ${agree} tokens are the same.`,
    ),
  );
}

function positionChart({ bins, windows }, word) {
  const place = (bin) => Math.sqrt((bin.first + 1) * (bin.last + 1));
  const line = (name, key, color, wide) => ({ name, color, wide, points: bins.map((bin) => [place(bin), bin[key]]) });
  const gaps = { name: "loss increase", unseen: true, points: bins.map((bin) => [place(bin), bin.loss_increase, bin.loss_increase_error]) };
  const gap = bins.at(-1).loss_increase - bins[0].loss_increase,
    late = bins.at(-1);
  return lineChart({
    title: "Loss by position",
    lines: [
      line("original", "teacher_loss", "var(--teacher)", true),
      line(word, "student_loss", "var(--student)"),
      gaps,
    ],
    words:
      `Loss increase at positions ${late.first} to ${late.last}: ${digits(late.loss_increase)}, ` +
      `${digits(Math.abs(gap))} ${gap < 0 ? "less" : "more"} than at the beginning (${windows} windows).`,
    x: { label: "position in the text", kind: "binary", format: whole },
    y: { label: "nats per token", kind: "linear", format: (x) => digits(x, 2) },
  });
}

function recallChart({ text, points }, word) {
  const line = (name, key, color, wide) => ({ name, color, wide, points: points.map((p) => [p.distance, p[key]]) });
  return lineChart({
    title: "Recall by distance",
    lines: [
      line("original", "teacher", "var(--teacher)", true),
      line(word, "student", "var(--student)"),
      { ...line("guessing", "chance", "var(--strong-line)"), dash: "2 4", dots: false },
    ],
    words: `Facts (${text}) stated so many tokens before the question; ${sum(points.map((p) => p.n))} questions.`,
    x: { label: "tokens since the fact", kind: "binary", format: whole },
    y: { label: "right among the choices", kind: "linear", from: 0, to: 1, format: (x) => percent(x) },
  });
}

function taskCard({ rows }, word) {
  const signed = (x) => `${x < 0 ? "−" : "+"}${(100 * Math.abs(x)).toFixed(1)}`;
  const body = rows.map((row) => [
    row.task,
    whole(row.items),
    percent(row.teacher, 1),
    percent(row.student, 1),
    `${signed(row.difference)} ± ${(100 * row.difference_stderr).toFixed(1)}`,
    percent(row.agreement),
  ]);
  return el(
    "div",
    { class: "card" },
    el("h3", {}, "Tasks"),
    aside("Share of right answers; the difference in points with its standard error; how often both choose the same."),
    table(["Task", "Items", "Original", capital(word), "Difference", "Same"], body),
  );
}
