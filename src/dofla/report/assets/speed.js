// Seconds and bytes against the length of the context, with the lengths from which the original is behind.

function drawSpeed(host, run, student) {
  host.replaceChildren();
  const charts = [
    run.language && memoryChart(run, student),
    timeChart(run, student, "write"),
    timeChart(run, student, "read"),
  ].filter(Boolean);
  if (charts.length) host.append(el("div", { class: "columns" }, charts));
  if (!student.speed) host.append(timingsLeftOut(run, student));
  else host.append(aside(howTimed(student.speed)));
  return true;
}

function timingsLeftOut(run, student) {
  const why = student.left_out.speed;
  return why ? note(`Timings left out: ${why}.`) : adds("Timings are made when asked for", run.commands.speed);
}

function howTimed({ threads, machine }) {
  const where = machine ? ` of ${machine.gpu || machine.processor || machine.platform}` : "";
  return (
    `A first impression: batch of one, ${threads} ${threads === 1 ? "thread" : "threads"}${where}, the best of a few ` +
    "times, one model after the other. Writing after long contexts is timed with a cache filled up by repetition."
  );
}

function memoryChart(run, student) {
  const { state_bytes: state, cache_bytes: token, kept_bytes: kept, smaller_from: from } = student;
  const last = Math.max(16384, run.longest || 0),
    lengths = [];
  for (let n = 16; n <= last; n *= 2) lengths.push(n);
  return lineChart({
    title: "Memory per sequence",
    lines: [
      {
        name: "original",
        color: "var(--teacher)",
        dash: "6 4",
        dots: false,
        points: lengths.map((n) => [n, n * token]),
      },
      { name: student.word, color: "var(--student)", dots: false, points: lengths.map((n) => [n, state + kept * n]) },
    ],
    marks: from && from > 16 && from < last ? [{ x: from, words: `smaller from ${roughly(from)} tokens on` }] : [],
    words: from
      ? `Smaller than the original’s from ${whole(from)} tokens on.`
      : "As large as the original’s.",
    x: { label: "tokens of context", kind: "binary", format: tokens },
    y: { label: "bytes", kind: "binary", format: plainBytes },
  });
}

const tokens = (n) => (n >= 1024 && n % 1024 === 0 ? `${n / 1024}k` : whole(n));

function timeChart(run, student, what) {
  const theirs = student.speed && student.speed.teacher[what],
    own = student.speed && student.speed.student[what],
    from = student.crossings[what];
  if (!theirs || !own) return null;
  const first = own[0][0],
    last = own.at(-1)[0],
    ratio = theirs.at(-1)[1] / own.at(-1)[1];
  const words =
    from === null
      ? `At ${tokens(last)} tokens it takes ${times(1 / ratio)} as long as the original.`
      : `At ${tokens(last)} tokens it is ${times(ratio)} as fast as the original.`;
  return lineChart({
    title: what === "write" ? "Writing one more token" : "Reading a text",
    lines: [
      { name: "original", color: "var(--teacher)", dash: "6 4", points: theirs },
      { name: student.word, color: "var(--student)", points: own },
    ],
    marks: from !== null && from > first ? [{ x: from, words: `faster from ${roughly(from)} tokens on` }] : [],
    words,
    x: { label: "tokens of context", kind: "binary", format: tokens },
    y: { label: "seconds", kind: "log", format: time },
  });
}
