// News of the runs. Owns: one event stream while the page is seen; that what changed before it began, or in a
// break, is asked for. Never: reads a run.

const AGAIN_MS = 3000;

// told(ids): these runs have changed; null: any may have. connected(yes)
export function live(told, connected) {
  let source = null;

  function open() {
    if (source || document.hidden) return;
    source = new EventSource("/api/events");
    source.addEventListener("open", () => {
      connected(true);
      told(null);
    });
    source.addEventListener("change", (event) => told(new Set(JSON.parse(event.data).runs)));
    source.addEventListener("error", () => {
      connected(false);
      if (source?.readyState === EventSource.CLOSED) { // refused: the browser does not try again by itself
        close();
        setTimeout(open, AGAIN_MS);
      }
    });
  }

  function close() {
    source?.close();
    source = null;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close(); // a browser has six connections for all its windows
    else open();
  });
  open();
}
