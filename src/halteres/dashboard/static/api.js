// Requests. Owns: the server's answers as objects, its errors as exceptions. Never: keeps one.

export class Refused extends Error {
  constructor(body, status) {
    super(body.error ?? `The server answered ${status}.`);
    this.body = body;
    this.status = status;
  }
}

let saved = null; // of a file, which has no server: path -> answer

// From here on nothing is asked for: these are the answers, whatever a query says.
export function answerFrom(answers) {
  saved = answers;
}

export function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return ask(given.length ? `${path}?${new URLSearchParams(given)}` : path);
}

export function post(path, body) {
  return ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
}

// The objects of an answer that comes line by line.
export async function* lines(path, body, signal) {
  const answer = await fetched(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });
  if (!answer.ok) throw new Refused(await answer.json(), answer.status);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const whole = (rest + part.value).split("\n");
    rest = whole.pop();
    yield* whole.map((line) => JSON.parse(line));
  }
}

export function runPath(id, what = "") {
  return `/api/runs/${encodeURIComponent(id)}${what && `/${what}`}`;
}

async function ask(path, options) {
  if (saved) return recorded(path.split("?")[0]);
  const answer = await fetched(path, { ...options, cache: "no-store" });
  if (answer.status === 401) location.reload(); // the sign-in page says what to do
  const body = await answer.json();
  if (!answer.ok || body.error !== undefined) throw new Refused(body, answer.status);
  return body;
}

async function fetched(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error; // its reader has left
    throw new Refused({ error: "The server does not answer. If it has ended: halteres ui" });
  }
}

function recorded(path) {
  const body = saved[path] ?? { error: "This file does not hold that." };
  if (body.error !== undefined) throw new Refused(body, 404);
  return body;
}
