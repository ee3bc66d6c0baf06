// One attention map, and the text under it, shaded by what a token looks at.

const visible = (piece) => piece.replaceAll("\n", "↵").trim() || "␣";

const TITLES = { teacher: "Original", student: "This model", difference: "This model − original" };

function mapFrame(name, size, look) {
  const canvas = el("canvas", {
    width: size,
    height: size,
    tabindex: "0",
    role: "img",
    id: `map-${name}`,
    "aria-label": `${TITLES[name]}: attention of ${size} tokens. Arrow keys move through it.`,
  });
  const over = svg("svg", { viewBox: `0 0 ${size} ${size}`, "aria-hidden": "true" });
  const hair = svg("path", {
    fill: "none",
    style: { stroke: "var(--ink)", "stroke-width": "1", opacity: ".55" },
    "vector-effect": "non-scaling-stroke",
  });
  const edge = (dash) =>
    svg("path", {
      fill: "none",
      "stroke-dasharray": dash,
      style: { stroke: "var(--strong-line)", "stroke-width": "1.4" },
      "vector-effect": "non-scaling-stroke",
    });
  const [kept, older] = [edge("4 3"), edge("2 3")];
  over.append(kept, older, hair);
  let at = [size - 1, 0];
  const go = (row, column) => look((at = [row, column])[0], column);
  const under = (event) => {
    const frame = canvas.getBoundingClientRect();
    return [
      Math.floor(((event.clientY - frame.top) / frame.height) * size),
      Math.floor(((event.clientX - frame.left) / frame.width) * size),
    ];
  };
  canvas.addEventListener("pointermove", (event) => go(...under(event)));
  onArrows(canvas, (across, down) => go(at[0] + down, at[1] + across), true);
  return {
    node: el(
      "div",
      {},
      el("h3", { class: name === "difference" ? "" : name }, TITLES[name]),
      el("div", { class: "map-frame" }, canvas, over),
    ),
    paint(color) {
      const context = canvas.getContext("2d"),
        image = context.createImageData(size, size);
      for (let n = 0; n < size * size; n += 1) image.data.set([...color(n), 255], 4 * n);
      context.putImageData(image, 0, 0);
    },
    cross(row, column) {
      at = [row, column];
      hair.setAttribute("d", `M0 ${row}H${size}M0 ${row + 1}H${size}M${column} 0V${size}M${column + 1} 0V${size}`);
    },
    // The edge of the window, of the sinks, and of what tiers hold.
    edges([, window, sinks], tiers, causal) {
      const behind = (tokens) => `M0 ${tokens}L${size - tokens} ${size}`;
      const left = behind(window),
        right = `M${window} 0L${size} ${size - window}`;
      const inside = window > 0 && window < size;
      const ends = tiers.map((_, n) => window + sum(tiers.slice(0, n + 1).map((tier) => tier[0])));
      const inner = ends.filter((end) => end < size);
      older.setAttribute("d", inner.map(behind).join(""));
      const parts = [inside ? left : "", inside && !causal ? right : "", sinks ? `M${sinks} 0V${size}` : ""];
      kept.setAttribute("d", parts.join(""));
    },
  };
}

// How the cache holds the token at a distance of so many: "in 4 bits", or nothing to say where features do.
function keptAs([, window, sinks], tiers, row, column) {
  if (!tiers.length || column > row) return "";
  let left = row - column - window;
  if (left < 0 || column < sinks) return "";
  const tier = tiers.find(([tokens]) => (left -= tokens) < 0);
  return tier ? `, which holds it in ${tier[1]} bits` : "";
}

// The text, shaded by how much the chosen token looks at each.
function strip(who, pieces, choose) {
  const buttons = pieces.map((piece, n) =>
    el(
      "button",
      {
        type: "button",
        tabindex: n === pieces.length - 1 ? "0" : "-1",
        "aria-label": `${visible(piece)}, token ${n}`,
        on: { click: () => choose(n) },
      },
      piece.replaceAll("\n", "↵ "),
    ),
  );
  const box = el(
    "div",
    {
      class: "strip",
      role: "group",
      "aria-label": `${TITLES[who]}: the text, shaded by attention. Arrow keys choose a token.`,
    },
    el("span", { class: `who ${who}` }, TITLES[who]),
    buttons,
  );
  onArrows(box, (step) => {
    const next = Math.min(Math.max(buttons.indexOf(document.activeElement) + step, 0), buttons.length - 1);
    choose(next);
    buttons[next].focus();
  });
  return {
    node: box,
    paint(row, share) {
      buttons.forEach((button, n) => {
        const color = mixed(
          rgb(dark() ? "#171b22" : "#ffffff"),
          rgb(ramps()[who === "teacher" ? "less" : "more"]),
          Math.sqrt(share(n)),
        );
        button.style.background = css(color);
        button.style.color = inkOn(color);
        button.setAttribute("aria-pressed", String(n === row));
        button.tabIndex = n === row ? 0 : -1;
      });
    },
  };
}
