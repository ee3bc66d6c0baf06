// Small things that every part uses: elements, numbers in words, colors, theme, hints.

const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [name, act] of Object.entries(value)) node.addEventListener(name, act);
    else if (key === "style") for (const [name, to] of Object.entries(value)) node.style.setProperty(name, to);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// Numbers in words

function bytes(count) {
  let value = count;
  for (const unit of ["B", "KiB", "MiB"]) {
    if (value < 1024) return unit === "B" ? `${Math.round(value)} B` : `${value.toFixed(1)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(2)} GiB`;
}

// Of round numbers, as at the ticks of an axis.
const plainBytes = (count) => bytes(count).replace(".0 ", " ");

const whole = (value) => Math.round(value).toLocaleString("en-GB");
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;

function digits(value, count = 3) {
  if (value === null || value === undefined) return "∞";
  const size = Math.abs(value);
  if (size >= 1000) return whole(value);
  if (size !== 0 && size < 0.001) return String(Number(value.toPrecision(1))).replace("-", "−");
  const places = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : count;
  return value.toFixed(places).replace("-", "−");
}

function time(seconds) {
  const [value, unit] = seconds < 0.001 ? [seconds * 1e6, "µs"] : seconds < 1 ? [seconds * 1e3, "ms"] : [seconds, "s"];
  return `${Number(value.toPrecision(3))} ${unit}`;
}

function roughly(tokens) {
  const unit = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(tokens, 1))) - 1);
  return whole(Math.round(tokens / unit) * unit);
}

const times = (ratio) => `${ratio >= 10 ? whole(ratio) : ratio.toFixed(1)} ×`;
const capital = (word) => word[0].toUpperCase() + word.slice(1);

// The increase of the perplexity that goes with one of the loss.
function perplexity(increase) {
  const more = Math.expm1(increase);
  if (more >= 1) return `× ${digits(1 + more)}`;
  return `${more < 0 ? "−" : "+"}${digits(100 * Math.abs(more), 2)} %`;
}

const range = (values) => {
  const low = Math.min(...values),
    high = Math.max(...values);
  return low === high ? `${low}` : `${low}–${high}`;
};
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const sum = (values) => values.reduce((a, b) => a + b, 0);

// "model.layers.12.self_attn" → "12"; whatever has no number, or a number that others have too, keeps its name.
function shortNames(names) {
  const short = names.map((name) => (name.match(/\d+/g) || [name]).at(-1));
  return new Set(short).size === names.length ? short : names;
}

// Hints beside the pointer, and words for those who hear the page.

function tip(text, event) {
  const box = $("tip");
  box.hidden = !text;
  if (!text) return;
  box.textContent = text;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(6, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
  box.style.top = `${event.clientY + height + 24 > innerHeight ? event.clientY - height - 12 : event.clientY + 16}px`;
}

const say = (text) => {
  $("said").textContent = text;
};

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = el("textarea", { style: { position: "fixed", opacity: "0" } }, text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  say("Copied");
  setTimeout(() => {
    button.textContent = before;
  }, 1500);
}

function copyButton(label, text) {
  const button = el("button", { type: "button", class: "button", on: { click: () => copy(text, button) } }, label);
  return button;
}

// A command with its copy button.
const command = (text) => el("div", { class: "command" }, el("code", {}, text), copyButton("Copy", text));

const folded = (title, ...children) => el("details", {}, el("summary", {}, title), ...children);
const aside = (...children) => el("p", { class: "small quiet" }, ...children);
const note = (...children) => el("p", { class: "note" }, ...children);
const adds = (what, words) => note(`${what}: `, el("code", {}, words));

// A part that a model lacks, and why, or what adds it.
function missing(run, student, what, title) {
  const why = student.left_out[what];
  return why
    ? note(`${title} left out: ${why}.`)
    : adds(`${title}: measured when the model can be opened`, run.commands.report);
}

function table(heads, rows, attributes) {
  const cell = (tag) => (value) =>
    value instanceof Node && /^T[DH]$/.test(value.tagName)
      ? value
      : el(tag, tag === "th" ? { scope: "col" } : {}, value);
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    el(
      "table",
      attributes,
      el("thead", {}, el("tr", {}, heads.map(cell("th")))),
      el(
        "tbody",
        {},
        rows.map((row) => el("tr", {}, row.map(cell("td")))),
      ),
    ),
  );
}

const drawing = (width, height, label, attributes) =>
  svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", ...attributes, "aria-label": label });

// Arrow keys walk over a node: across, and down as well if it has several rows.
function onArrows(node, walk, rows) {
  const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ...(rows && { ArrowDown: [0, 1], ArrowUp: [0, -1] }) };
  node.addEventListener("keydown", (event) => {
    if (!(event.key in steps)) return;
    event.preventDefault();
    walk(...steps[event.key]);
  });
}

// Draw again whenever the width changes; what is hidden has none.
function onWidth(host, draw) {
  let last = 0;
  const again = () => {
    const width = Math.floor(host.clientWidth);
    if (width > 0 && width !== last) {
      last = width;
      draw(width);
    }
  };
  new ResizeObserver(again).observe(host);
  again();
}
