// Places on an axis, and the round numbers that are written there.

function niceTicks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const size = [1, 2, 5, 10].find((n) => (high - low) / (n * step) <= count) * step;
  const ticks = [];
  for (let n = Math.ceil(low / size - 1e-9); n * size <= high + size * 1e-9; n += 1) ticks.push(n * size);
  return ticks;
}

function logTicks(low, high, count) {
  const inside = (values) => values.filter((x) => x >= low * 0.999 && x <= high * 1.001);
  const powers = [],
    decades = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) {
    decades.push(10 ** p);
    powers.push(...[1, 2, 5].map((n) => n * 10 ** p));
  }
  const ticks = inside(powers).length <= count ? inside(powers) : inside(decades);
  return ticks.length > 1 ? ticks : niceTicks(low, high, count);
}

function binaryTicks(low, high, count) {
  const first = Math.ceil(Math.log2(low) - 1e-9),
    last = Math.floor(Math.log2(high) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first + 1) / count));
  const ticks = [];
  for (let p = first; p <= last; p += every) ticks.push(2 ** p);
  return ticks;
}

const TICKS = { log: logTicks, binary: binaryTicks, linear: niceTicks };

function scale(kind, low, high, from, to) {
  const on = kind === "linear" ? (x) => x : Math.log;
  const a = on(low),
    b = on(high);
  return (x) => from + ((on(x) - a) / (b - a || 1)) * (to - from);
}
