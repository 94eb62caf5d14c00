// Axes. Owns: where round figures lie on them, and how many. Never: draws.

// Round figures from low to high, about as many as asked for.
export function ticks(low, high, count) {
  const step = roundStep((high - low) / Math.max(1, count));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

export function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  const factor = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999);
  return factor * power;
}

// The stretch that an axis shows: some air around the values; all of 0 to 1 for shares that use much of it.
export function extent(values, { share = false } = {}) {
  const known = values.filter((value) => Number.isFinite(value));
  if (known.length === 0) return [0, 1];
  let [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  if (share && low >= 0 && high <= 1) return [0, Math.max(0.1, high > 0.5 ? 1 : high * 1.15)];
  if (low === high) {
    const air = Math.abs(low) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - air) : low - air, high + air];
  }
  const air = (high - low) * 0.06;
  if (low >= 0 && low < (high - low) * 0.5) low = 0;
  else low -= air;
  high += air;
  return [low, high];
}

export function linear([from, to], [start, end]) {
  const slope = (end - start) / (to - from || 1);
  return (value) => start + (value - from) * slope;
}

// A tick's figure, where ticks lie `step` apart, with as many decimals as tell them apart.
export function tickLabel(value, step) {
  if (Math.abs(value) < step * 1e-6) return "0";
  if (Math.abs(value) >= 1e5 || step < 1e-4) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  let decimals = 0;
  while (decimals < 6 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-6) decimals += 1;
  return value.toFixed(decimals);
}
