// Attention of original and student side by side, where they differ, and the text under it.

async function unpacked(text, size) {
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const all = new Uint8Array(await new Response(stream).arrayBuffer());
  return Array.from({ length: all.length / size ** 2 }, (_, head) =>
    all.subarray(head * size ** 2, (head + 1) * size ** 2),
  );
}

function drawAttention(host, run, student) {
  const { maps } = student,
    text = run.text;
  if (!maps || !text) {
    host.replaceChildren(missing(run, student, "maps", "Attention"));
    return true;
  }
  const layers = Object.keys(maps.layers),
    names = shortNames(layers),
    size = text.pieces.length;
  const moved = layers.map((name) => maps.moved[name]),
    top = Math.max(0.05, ...moved.flat());
  const worst = moved.flatMap((row, r) => row.map((value, c) => [value, r, c])).reduce((a, b) => (b[0] > a[0] ? b : a));
  const now = { layer: worst[1], head: worst[2], row: size - 1, column: 0, teacher: null, student: null };
  const select = (id, title, options, choose) => {
    const list = el(
      "select",
      { id, on: { change: () => choose(Number(list.value)) } },
      options.map((words, n) => el("option", { value: n }, words)),
    );
    return { list, node: el("label", {}, title, list) };
  };
  const layerPick = select("layer", "Layer", names, (n) => pick(n, Math.min(now.head, moved[n].length - 1)));
  const headPick = select("head", "Head", [], (n) => pick(now.layer, n));
  const words = el("p", { class: "readout" }),
    picker = el("div", { class: "heat" });
  const frames = ["teacher", "student", "difference"].map((name) =>
    mapFrame(name, size, (row, column) => look(row, column)),
  );
  const strips = ["teacher", "student"].map((who) => strip(who, text.pieces, (row) => look(row, now.column)));
  const exactly = student.layers.some(hasExact),
    coded_tiers = student.layers.some(hasTiers);
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  let width = 0,
    latest = 0;
  const drawPicker = () =>
    width &&
    picker.replaceChildren(
      heatMap(
        {
          rows: moved,
          names,
          top,
          height: Math.min(60, Math.max(7, Math.floor(width / layers.length))),
          format: (x) => percent(x),
          chosen: [now.layer, now.head],
          label: "Share of attention that falls on other tokens, by layer and head. Arrow keys read it, Enter chooses.",
          choose: (r, c) => moved[r] && c >= 0 && c < moved[r].length && pick(r, c),
          describe: (r, c) => `Layer ${names[r]}, head ${c}: ${percent(moved[r][c], 1)} of the attention falls on other tokens`,
        },
        width,
      ),
    );
  const share = (who, row, column) => (now[who][row * size + column] / text.levels) ** 2;
  const paint = () => {
    if (!now.teacher || !now.student) return;
    frames[0].paint((n) => ramp("map", now.teacher[n] / text.levels));
    frames[1].paint((n) => ramp("map", now.student[n] / text.levels));
    // Square roots as in the maps, so that small differences show.
    frames[2].paint((n) => {
      const difference = (now.student[n] / text.levels) ** 2 - (now.teacher[n] / text.levels) ** 2;
      return diverging(Math.sign(difference) * Math.sqrt(Math.abs(difference)));
    });
    mark();
  };
  const mark = () => {
    const layer = student.layers.find((x) => x.name === layers[now.layer]);
    frames.forEach((frame) => frame.cross(now.row, now.column));
    const share_ = layer.sizes.length / now.teacherHeads,
      own = [layer.sizes, layer.tiers].map((heads) => heads[Math.floor(now.head * share_)]);
    frames.slice(1).forEach((frame) => frame.edges(...own, run.language));
    strips.forEach((one, n) => one.paint(now.row, (column) => share(["teacher", "student"][n], now.row, column)));
    const named = (n) => `“${visible(text.pieces[n])}” (${n})`;
    const shares = ["teacher", "student"].map((who) => percent(share(who, now.row, now.column), 1));
    const looks = `${named(now.row)} looks at ${named(now.column)}`;
    readout.textContent = `${looks}: original ${shares[0]}, this model ${shares[1]}${keptAs(...own, now.row, now.column)}.`;
  };
  const look = (row, column) => {
    now.row = Math.min(Math.max(row, 0), size - 1);
    now.column = Math.min(Math.max(column, 0), size - 1);
    if (now.teacher) mark();
  };
  async function pick(layer, head) {
    Object.assign(now, { layer, head });
    layerPick.list.value = layer;
    headPick.list.replaceChildren(...moved[layer].map((_, n) => el("option", { value: n }, n)));
    headPick.list.value = head;
    words.textContent = `In this head ${percent(moved[layer][head], 1)} of the attention falls on other tokens than in the original, in this text.`;
    drawPicker();
    const order = (latest += 1);
    const [teacher, own] = await Promise.all([
      unpacked(text.maps[layers[layer]], size),
      unpacked(maps.layers[layers[layer]], size),
    ]);
    if (order !== latest) return;
    Object.assign(now, { teacher: teacher[head], student: own[head], teacherHeads: teacher.length });
    // Begin where they differ most, but not at the first tokens, which have little to look at.
    const differ = (n) => Math.abs(share("teacher", 0, n) - share("student", 0, n));
    const places = Array.from({ length: size * size }, (_, n) => n).slice((size * size) >> 1);
    const most = places.reduce((best, n) => (differ(n) > differ(best) ? n : best));
    Object.assign(now, { row: Math.floor(most / size), column: most % size });
    paint();
  }
  host.replaceChildren(
    el(
      "div",
      { class: "card" },
      el("div", { class: "picks" }, layerPick.node, headPick.node, words),
      el(
        "div",
        { class: "maps" },
        el("div", {}, el("h3", {}, "Where they differ"), picker),
        frames.map((frame) => frame.node),
      ),
      el(
        "p",
        { class: "legend" },
        exactly && el("span", {}, "Dashed: window and attention sinks, which stay as they are or in int8."),
        coded_tiers &&
          el("span", {}, "Dotted: where a tier ends; older tokens have fewer bits, are in features, or are evicted."),
        el("span", { class: "teacher" }, "Blue: less attention than the original’s."),
        el("span", { class: "student" }, "Orange: more attention."),
      ),
    ),
    el(
      "div",
      { class: "card" },
      aside("Choose a token to see what it looks at."),
      el(
        "div",
        { class: "two" },
        strips.map((one) => one.node),
      ),
      readout,
    ),
  );
  onWidth(picker, (found) => {
    width = found;
    drawPicker();
  });
  redraw.attention = () => {
    drawPicker();
    paint();
  };
  pick(now.layer, now.head);
  return true;
}
