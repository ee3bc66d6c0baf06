// Colors: ramps between stops, and black or white for what is written on them.

const RAMPS = {
  light: {
    heat: ["#f1f4f8", "#c5d9ec", "#83b0d8", "#3f7fb8", "#1a4f86", "#0b2a52"],
    map: ["#fbfbfa", "#d5d9e6", "#969fc0", "#5a6599", "#2c3569", "#0d1233"],
    less: "#2355c4",
    none: "#f4f4f3",
    more: "#b8430a",
  },
  dark: {
    heat: ["#1b212b", "#203a55", "#2b5f8c", "#4a8fc4", "#8dc0e6", "#dff0fc"],
    map: ["#11151b", "#2b3149", "#4c5684", "#8089bd", "#b9c0e6", "#f3f5ff"],
    less: "#86abff",
    none: "#1b2028",
    more: "#ff9b5c",
  },
};

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mixed = (a, b, part) => a.map((value, n) => Math.round(value + (b[n] - value) * part));
const css = (color) => `rgb(${color.join(" ")})`;
const dark = () => document.documentElement.dataset.theme === "dark";
const ramps = () => RAMPS[dark() ? "dark" : "light"];

function ramp(name, share) {
  const stops = ramps()[name],
    place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  return mixed(rgb(stops[first]), rgb(stops[first + 1]), place - first);
}

function diverging(share) {
  const { less, none, more } = ramps();
  return mixed(rgb(none), rgb(share < 0 ? less : more), Math.min(1, Math.abs(share)));
}

function inkOn(color) {
  const [r, g, b] = color.map((value) =>
    value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
}

// Theme: the system's, until someone chooses.

const themed = [];
const onTheme = (draw) => themed.push(draw);

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  const button = $("theme"),
    isDark = name === "dark";
  button.setAttribute("aria-pressed", String(isDark));
  button.replaceChildren(el("span", { "aria-hidden": "true" }, isDark ? "☾" : "☀"), isDark ? "Dark" : "Light");
  themed.forEach((draw) => draw());
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = false;
  setTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", () => {
    if (!chosen) setTheme(system.matches ? "dark" : "light");
  });
  $("theme").addEventListener("click", () => {
    chosen = true;
    setTheme(dark() ? "light" : "dark");
  });
}
