// Axes. Owns: what a curve may be drawn over; where round figures lie on an axis, and how many. Never: draws.

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const UNITS = [[3600, "h"], [60, "min"], [1, "s"]]; // seconds in each

// What is read off (`words`), and round places between two ends with their labels (`marks`).
export const AXES = {
  step: {
    label: "steps", whole: true, words: (step) => `step ${step}`,
    marks: (low, high, count) => ticks(low, high, count).filter(Number.isInteger).map((step) => [step, String(step)]),
  },
  time: {
    label: "time of the steps", words: (seconds) => inUnit(seconds, seconds),
    marks(low, high, count) {
      const [size] = unitOf(high);
      return ticks(low / size, high / size, count).map((at) => [at * size, inUnit(at * size, high)]);
    },
  },
  tokens: {
    label: "tokens trained on", words: (tokens) => `${compact.format(tokens)} tokens`,
    marks: (low, high, count) => ticks(low, high, count).map((at) => [at, compact.format(at)]),
  },
};

function unitOf(seconds) {
  return UNITS.find(([size]) => seconds >= 1.5 * size) ?? UNITS.at(-1);
}

function inUnit(seconds, largest) {
  const [size, name] = unitOf(largest);
  return `${Number((seconds / size).toPrecision(3))} ${name}`;
}

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

// The stretch that an axis shows: some air around the values; all of 0 to 1 for shares that use much of it;
// from `zero` on where less than all of it would mislead.
export function extent(values, { share = false, zero = false } = {}) {
  const known = values.filter((value) => Number.isFinite(value));
  if (known.length === 0) return [0, 1];
  let [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
  if (share && low >= 0 && high <= 1) return [0, Math.max(0.1, high > 0.5 ? 1 : high * 1.15)];
  if (zero) return [Math.min(0, low), high > 0 ? high * 1.08 : 1];
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
