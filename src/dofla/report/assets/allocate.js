// A plan from a budget, as dofla.allocate makes it: whole numbers where it reckons with fractions, and tables it made.

// A double as mantissa · 2^exponent, both whole.
function exactly(value) {
  const view = new DataView(new ArrayBuffer(8));
  view.setFloat64(0, value);
  const all = view.getBigUint64(0),
    power = Number((all >> 52n) & 0x7ffn),
    rest = all & 0xfffffffffffffn;
  return power ? [rest | 0x10000000000000n, power - 1075] : [rest, -1074];
}

// Whole numbers in the ratio of doubles.
function inRatio(values) {
  const parts = values.map(exactly),
    lowest = Math.min(...parts.map(([, power]) => power));
  return parts.map(([number, power]) => number << BigInt(power - lowest));
}

const smaller = (a, b) => (a < b ? a : b);

// Wishes of each layer as [numerators, common denominator].
const WISHES = {
  fixed: (costs, dof, budget) => [costs.map(() => budget), 1n],
  dof(costs, dof, budget) {
    const shares = inRatio(dof),
      total = costs.reduce((a, b) => a + b, 0n);
    return [shares.map((share) => budget * total * share), shares.reduce((a, share, n) => a + share * costs[n], 0n)];
  },
  dof_clip(costs, dof, budget, heads) {
    const [wishes, unit] = WISHES.dof(costs, dof, budget);
    return [wishes.map((wish, n) => smaller(wish, BigInt(heads[n]) * unit)), unit];
  },
};

// Whole numbers near the wishes, at least 1, of no more cost than the budget everywhere.
function rounded(costs, [wishes, unit], budget) {
  const counts = wishes.map((wish) => (wish / unit > 1n ? wish / unit : 1n));
  let spare = costs.reduce((left, cost, n) => left + (budget - counts[n]) * cost, 0n);
  while (spare < 0n) {
    // Of those above 1, the first whose count is largest beside its wish.
    let most = -1;
    counts.forEach((count, n) => {
      if (count > 1n && (most < 0 || count * wishes[most] > counts[most] * wishes[n])) most = n;
    });
    counts[most] -= 1n;
    spare += costs[most];
  }
  const short = counts.map((count, n) => wishes[n] - count * unit);
  const order = counts.map((_, n) => n).sort((a, b) => (short[a] === short[b] ? a - b : short[a] > short[b] ? -1 : 1));
  for (const n of order) {
    if (short[n] > 0n && costs[n] <= spare) {
      counts[n] += 1n;
      spare -= costs[n];
    }
  }
  return counts.map(Number);
}

// From the smallest sizes up, always the step that gains most per byte, passing by those that no longer fit.
function knapsack(names, choices, total) {
  const at = choices.map(() => 0),
    stuck = new Set();
  let left = total - sum(choices.map((own) => own[0][0]));
  if (left < 0) return null;
  const steps = choices.flatMap((own, layer) =>
    own.slice(1).map((after, n) => ({
      layer,
      n,
      gain: (own[n][1] - after[1]) / (after[0] - own[n][0]),
      price: after[0] - own[n][0],
    })),
  );
  steps.sort(
    (a, b) =>
      b.gain - a.gain || (names[a.layer] < names[b.layer] ? -1 : names[a.layer] > names[b.layer] ? 1 : a.n - b.n),
  );
  for (const step of steps) {
    if (stuck.has(step.layer) || step.price > left) {
      stuck.add(step.layer);
      continue;
    }
    at[step.layer] = step.n + 1;
    left -= step.price;
  }
  return choices.map((own, layer) => own[at[layer]][2]);
}

// Stages [tokens, bits, bytes] of all heads of a layer → [bits, bytes], most bits first.
function byBits(stages) {
  const found = new Map();
  for (const [, bits, size] of stages) found.set(bits, (found.get(bits) || 0) + size);
  return [...found].sort((a, b) => b[0] - a[0]);
}

// HeadBudgets.at_most: of each layer's heads, most of a layer and what the heads of one cost; whole, by layer, the heads that
// hold every token. Null where these would take more than half of the bytes.
function atMost(shares, most, costs, whole) {
  const found = shares.map((own) => [...own]);
  const heads = shares.flatMap((own, layer) =>
    own.map((share, head) => ({ layer, head, share, whole: whole[layer].includes(head) })),
  );
  let left = sum(heads.map(({ layer, share }) => share * costs[layer])),
    wanted = left;
  const beyond = Math.max(left / sum(heads.map(({ layer }) => most[layer] * costs[layer])), 1);
  const held = sum(heads.map((own) => own.whole * most[own.layer] * costs[own.layer]));
  if (held > 0.5 * left * (1 + 1e-9)) return null;
  heads.sort((a, b) => b.whole - a.whole || b.share / most[b.layer] - a.share / most[a.layer]);
  for (const { layer, head, share, whole } of heads) {
    const bound = beyond * most[layer];
    found[layer][head] = (left / wanted) * share;
    if (found[layer][head] > bound || whole) {
      found[layer][head] = bound;
      left -= bound * costs[layer];
      wanted -= share * costs[layer];
    }
  }
  return found;
}

// tables: of tables.py; wanted: {strategy, budget, lambda (its place), curves (its place), headBudgets {layer: relative to an even split, by head},
// context (positions, null for all), whole {layer: heads that hold every token}}
// → {layers [{name, sizes [[features, window, sinks]] and stages [[[tokens, bits]]] by head, parts [bytes of features, of
// window and sinks, [[bits, bytes]] of stages], bytes}], total (bytes), full (bytes of the budget)}, or {error, full}
function allocate(tables, wanted) {
  const { layers } = tables,
    { strategy, budget } = wanted;
  const found = tables.curves[wanted.curves || 0];
  const kept = (layer) =>
    strategy === "measured" ? found.tokens : strategy === "hybrid" || strategy === "compressed" ? layer.tokens : "model";
  const price = layers.map((layer) => layer.cost[kept(layer)]);
  const full = budget * sum(layers.map((layer, n) => layer.heads * price[n][0]));
  let sizes,
    stages = layers.map(({ heads }) => Array(heads).fill([]));
  if (strategy === "compressed") {
    let shares = layers.map(({ name, heads }) => (wanted.headBudgets || {})[name] ?? Array(heads).fill(1));
    const context = tables.contexts.indexOf(wanted.context ?? null);
    if (wanted.headBudgets && tables.fillable[context]) {
      const most = tables.shapes.map((shape) => tables.fillable[context][shape] / budget);
      const costs = price.map(([feature]) => feature);
      const whole = layers.map(({ name }) => (wanted.whole || {})[name] || []);
      shares = atMost(shares, most, costs, whole);
      if (!shares) return { error: "Retrieval heads would take more than half of the bytes.", full };
    }
    const own = shares.map((heads, n) =>
      heads.map((share) => tables.compressed[context][tables.shapes[n]][Math.floor(share * budget + 1e-9) - 1]),
    );
    if (!own.flat().every(Boolean)) return { error: "The budget is too small for a token of each kind.", full };
    sizes = own.map((heads) => heads.map(([window, sinks]) => [0, window, sinks]));
    stages = own.map((heads) => heads.map((each) => each[2]));
  } else if (strategy === "measured") {
    sizes = knapsack(
      layers.map((layer) => layer.name),
      found.choices,
      full,
    );
    if (!sizes) return { error: "The error curves were measured at larger sizes: measure them at this budget.", full };
  } else if (strategy === "hybrid") {
    sizes = layers.map((layer, n) => Array(layer.heads).fill(tables.even[tables.shapes[n]][budget - 1]));
  } else {
    const costs = layers.map((layer, n) => BigInt(layer.heads * price[n][0]));
    const wishes = WISHES[strategy](
      costs,
      tables.largest[wanted.lambda],
      BigInt(budget),
      layers.map((layer) => layer.head_dim),
    );
    sizes = rounded(costs, wishes, BigInt(budget)).map((count, n) => Array(layers[n].heads).fill([count, 0, 0]));
  }
  const made = layers.map(({ name }, n) => {
    const [feature, token] = price[n],
      features = sum(sizes[n].map((size) => size[0])) * feature,
      exact = sum(sizes[n].map((size) => size[1] + size[2])) * token,
      coded = byBits(stages[n].flat());
    const own = stages[n].map((each) => each.map(([tokens, bits]) => [tokens, bits]));
    const all = features + exact + sum(coded.map((each) => each[1]));
    const kept = strategy === "compressed",
      parts = [features, exact, coded];
    return { name, sizes: sizes[n], stages: own, kept, parts, bytes: all };
  });
  return { layers: made, full, total: sum(made.map((layer) => layer.bytes)) };
}

// Whether a compressed cache is possible, at some budget: of a decoder whose heads are of fitting sizes.
const canCompress = (tables) => tables.compressed[0].every((budgets) => budgets.some(Boolean));

function allocateCommand(tables, wanted) {
  if (wanted.strategy === "compressed") {
    const kept = tables.skipped.map((layer) => `--keep-softmax ${layer.name}`);
    const even = wanted.headBudgets ? [] : ["--head-budgets even"];
    const context = wanted.context ? [`--context ${wanted.context}`] : [];
    const heads = sum(Object.values(wanted.whole || {}).map((own) => own.length));
    const whole = heads ? [`--retrieval-heads ${heads}`] : [];
    const full = wanted.budget * sum(tables.layers.map((layer) => layer.heads * layer.cost[layer.tokens][0]));
    const options = [`--size ${full}`, ...even, ...context, ...whole, ...kept];
    return [`dofla compress ${tables.model}`, ...options, "--out compressed"].join(" ");
  }
  const words = ["dofla allocate", tables.profile, `--budget ${wanted.budget}`, `--strategy ${wanted.strategy}`];
  if (wanted.strategy.startsWith("dof")) words.push(`--lambda ${tables.lambdas[wanted.lambda]}`);
  if (wanted.strategy === "measured") words.push(`--curves ${tables.curves[wanted.curves || 0].file}`);
  return [...words, "--out plan.json"].join(" ");
}
