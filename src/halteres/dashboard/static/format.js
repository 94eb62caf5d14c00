// Figures and times in words. Owns: how they are written; the server's clock. Never: touches the page.

let ahead = 0; // seconds that the server's clock is before ours: its times are told by its own

export function setClock(now) {
  ahead = now - Date.now() / 1000;
}

export function serverNow() {
  return Date.now() / 1000 + ahead;
}

export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(digits - 1).replace("e+", "e");
  if (size >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(digits)));
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)}\u00a0%`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${figure(seconds, 2)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${figure(seconds / 3600, 2)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function ago(time) {
  const seconds = serverNow() - time;
  return seconds < 5 ? "just now" : `${duration(seconds)} ago`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}

export function moment(time) {
  return new Date(time * 1000).toLocaleString();
}

// [low, high] minutes
export function between(range) {
  if (!range) return "–";
  const [low, high] = range.map((minutes) => duration(minutes * 60));
  return low === high ? low : `${low} to ${high}`;
}
