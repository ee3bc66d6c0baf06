// The whole page: which student is shown, and which parts there are.

const data = JSON.parse($("data").textContent);
const redraw = {}; // what depends on the colors of the theme

const NAV = {
  answer: "Answer",
  sizes: "Sizes",
  compared: "Compared",
  bytes: "Bytes",
  layers: "Layers",
  attention: "Attention",
  texts: "Texts",
  speed: "Speed",
  repeat: "Repeat",
};

function show(run, student) {
  tip("");
  const parts = {
    answer: (host) => (student ? drawAnswer(host, run, student) : drawTitle(host, run)),
    sizes: (host) => drawSizes(host, data.runs),
    compared: student && ((host) => drawCompared(host, data.runs, student)),
    bytes: (host) => drawBytes(host, run, student),
    layers: (host) => drawLayers(host, run, student),
    attention: student && ((host) => drawAttention(host, run, student)),
    texts: student && ((host) => drawTexts(host, run, student)),
    speed: student && ((host) => drawSpeed(host, run, student)),
    repeat: student && ((host) => drawRepeat(host, run, student)),
  };
  const there = Object.keys(parts).filter((name) => {
    const section = $(name),
      host = section.querySelector(":scope > .body") || section;
    section.hidden = false; // so that what is drawn has a width
    section.hidden = !(parts[name] && parts[name](host));
    return !section.hidden;
  });
  $("nav").replaceChildren(...there.map((name) => el("a", { href: `#${name}` }, NAV[name])));
  $("toolbar").hidden = there.length < 4;
}

function start() {
  const list = $("student"),
    all = data.runs.flatMap((run) => run.students.map((student) => [run, student]));
  const option = ([run, student], n) =>
    el("option", { value: n }, data.runs.length > 1 ? `${student.name} (${run.name})` : student.name);
  list.append(...all.map(option));
  $("picker").hidden = all.length < 2;
  list.addEventListener("change", () => show(...all[Number(list.value)]));
  if (!all.length) return show(data.runs[0], null);
  const first = all.findIndex(([run, student]) => run === data.runs[0] && run.students[run.best] === student);
  list.value = first;
  return show(...all[first]);
}

startTheme();
onTheme(() => Object.values(redraw).forEach((draw) => draw()));
start();
