// Asking again and again, but never twice at once.
// Owns: one request under way, one more to come, a pause between. Never: knows what is asked.

export function latest(work, pauseMs = 400) {
  let [running, wanted, closed] = [false, false, false];

  async function run() {
    if (closed) return;
    if (running) return void (wanted = true);
    running = true;
    wanted = false;
    try {
      await work();
    } finally {
      setTimeout(() => {
        running = false;
        if (wanted) run();
      }, pauseMs);
    }
  }

  return { run, close: () => (closed = true) };
}
