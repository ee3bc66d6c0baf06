// Degrees of freedom by layer and head; beside them, rows aligned, what a plan gives each layer.

const STRATEGIES = {
  measured: "measured",
  hybrid: "hybrid",
  compressed: "compressed",
  dof: "dof",
  dof_clip: "dof_clip",
  fixed: "fixed",
};

function drawSliders(host, run, student) {
  const tables = run.sliders;
  if (!tables) return false;
  const asked = (student && student.made_by) || {};
  const start = tables.lambdas.indexOf(tables.lambda);
  const unit = sum(tables.layers.map((layer) => layer.heads * layer.cost[layer.tokens][0])); // bytes of one feature per head
  const wanted = {
    strategy: asked.strategy || tables.strategy || (tables.curves.length ? "measured" : "hybrid"),
    budget: asked.size ? Math.max(Math.round(asked.size / unit), 1) : asked.budget || tables.budget,
    lambda: start,
    curves: 0,
    headBudgets: asked.head_budgets,
    context: student && student.context,
    whole: asked.retrieval_heads,
  };
  const lacks = {
    measured: !tables.curves.length && "needs error curves: dofla curves",
    compressed: !canCompress(tables) && "needs a decoder, and heads of a multiple of 8 numbers",
  };
  if (!(wanted.strategy in STRATEGIES) || lacks[wanted.strategy]) wanted.strategy = "hybrid";
  wanted.budget = Math.min(wanted.budget, tables.most);
  const budget = slider("budget", "Budget", 1, tables.most, wanted.budget);
  const lambda = slider("lambda", "Tolerance λ", 0, tables.lambdas.length - 1, wanted.lambda);
  const total = el("div", { class: "sum", id: "plan-sum" });
  const figure = el("div", { class: "heat", id: "plan" });
  const readout = el(
    "p",
    { class: "readout", "aria-live": "polite" },
    "Point at a layer, or read the map with the arrow keys.",
  );
  const line = command("");
  const legend = el("div", { class: "legend" });
  let width = 0;
  const names = shortNames(tables.layers.map((layer) => layer.name));
  const again = () => {
    const plan = allocate(tables, wanted);
    budget.words.textContent = `${wanted.budget} features’ bytes per head = ${bytes(plan.full)}`;
    lambda.words.textContent = digits(tables.lambdas[wanted.lambda], 5);
    budget.hint.textContent = tables.length
      ? `the original’s cache: ${bytes(tables.length * student.cache_bytes)} at ${whole(tables.length)} tokens`
      : "averaged over the layers";
    lambda.hint.textContent = wanted.strategy.startsWith("dof")
      ? "decides the plan as well"
      : `only the map on the left: ${wanted.strategy} goes by ${GOES_BY[wanted.strategy]}`;
    line.set(allocateCommand(tables, wanted));
    total.replaceChildren(...totals(plan, tables));
    total.dataset.total = plan.error ? "" : plan.total;
    if (width) figure.replaceChildren(planFigure(tables, plan, wanted, names, student, width, readout));
    const top = Math.max(...tables.dof[wanted.lambda].flat());
    const keys = [
      el("span", {}, "Degrees of freedom"),
      heatLegend(top, (x) => digits(x)),
      ...segments(allParts(plan.layers || [])).map(swatch),
      student && el("span", {}, "│ the student shown"),
    ];
    legend.replaceChildren(...keys.filter(Boolean));
  };
  budget.input.addEventListener("input", () => {
    wanted.budget = Number(budget.input.value);
    again();
  });
  lambda.input.addEventListener("input", () => {
    wanted.lambda = Number(lambda.input.value);
    again();
  });
  const choose = el(
    "fieldset",
    { class: "segments" },
    el("legend", {}, "Strategy"),
    Object.entries(STRATEGIES).map(([name, words]) =>
      el(
        "label",
        { title: lacks[name] },
        el("input", {
          type: "radio",
          name: "strategy",
          value: name,
          checked: name === wanted.strategy,
          disabled: Boolean(lacks[name]),
          on: {
            change: () => {
              wanted.strategy = name;
              again();
            },
          },
        }),
        el("span", {}, words),
      ),
    ),
  );
  const files =
    tables.curves.length > 1 &&
    el(
      "label",
      { class: "picker" },
      "Error curves",
      el(
        "select",
        {
          id: "curves",
          on: {
            change: (event) => {
              wanted.curves = Number(event.target.value);
              again();
            },
          },
        },
        tables.curves.map((found, n) => el("option", { value: n }, found.file.split("/").at(-1))),
      ),
    );
  host.replaceChildren(
    el("div", { class: "card" }, el("div", { class: "controls" }, choose, files, budget.node, lambda.node)),
    el("div", { class: "card" }, total, legend, figure, readout),
    el("div", { class: "card commands" }, el("h3", {}, "The command for this plan"), line.node),
  );
  onWidth(figure, (now) => {
    width = now;
    again();
  });
  redraw.sliders = again;
  if (tables.skipped.length)
    host.append(note(`Left softmax: ${tables.skipped.map((x) => `${x.name} (${x.reason})`).join("; ")}.`));
  if (!tables.curves.length)
    host.append(note("Strategy measured needs error curves; ", el("code", {}, "dofla curves"), " measures them."));
  return true;
}

const GOES_BY = {
  fixed: "nothing",
  hybrid: "nothing: all layers are alike",
  compressed: "head budgets, if the model shown has any",
  measured: "the error curves",
};

function slider(id, title, low, high, value) {
  const input = el("input", { type: "range", id, min: low, max: high, step: 1, value });
  const words = el("output", { for: id }),
    hint = el("span", { class: "small quiet" });
  return {
    input,
    words,
    hint,
    node: el(
      "div",
      { class: "slider" },
      el("div", { class: "line" }, el("label", { for: id }, title), words),
      input,
      hint,
    ),
  };
}

function totals(plan, tables) {
  if (plan.error) return [el("strong", {}, "No such plan"), el("span", {}, plan.error)];
  return [
    el("strong", {}, `${bytes(plan.total)} of state per sequence`),
    el(
      "span",
      { class: "quiet" },
      `${partWords(allParts(plan.layers))}; ${percent(plan.total / plan.full, 1)} of the budget`,
    ),
  ];
}
