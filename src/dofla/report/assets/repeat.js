// Everything needed to repeat the run.

function drawRepeat(host, run, student) {
  if (!run.recipe) return false;
  const pairs = (record) =>
    el(
      "dl",
      { class: "pairs" },
      Object.entries(record)
        .filter(([, value]) => value !== null && value !== undefined)
        .map(([key, value]) => [el("dt", {}, key.replaceAll("_", " ")), el("dd", {}, String(value))]),
    );
  const line = (what, words) =>
    words && el("div", { class: "line" }, aside(what), command(words));
  const recipe = el("pre", { tabindex: "0", role: "region", "aria-label": "Recipe" }, el("code", {}, run.recipe));
  host.replaceChildren(
    el(
      "div",
      { class: "columns" },
      el(
        "div",
        { class: "card" },
        el("h3", {}, "Run"),
        pairs({
          folder: run.folder,
          model: run.model.name,
          class: run.model.class,
          seeds: student.seeds.join(", "),
          "evaluated on": run.source,
          windows: `${run.windows}${run.length ? ` of ${run.length} tokens` : ""}`,
        }),
      ),
      el("div", { class: "card" }, el("h3", {}, "Machine and versions"), pairs(run.machine)),
    ),
    el(
      "div",
      { class: "card commands" },
      el("h3", {}, "Commands"),
      line("the whole run", run.commands.again),
      line("this page", run.commands.report),
      line("generate with the model shown", run.language && student.commands.generate),
      line("evaluate it on tasks", run.language && student.commands.tasks),
    ),
    el(
      "div",
      { class: "card" },
      el("div", { class: "chart-title" }, el("h3", {}, "Recipe"), copyButton("Copy the recipe", run.recipe)),
      el("div", { style: { "margin-top": ".6rem" } }, recipe),
    ),
  );
  run.notes.forEach((words) => host.append(note(words)));
  return true;
}
