// Choosing a stretch of an axis: by drawing over a chart, or by keys.
// Owns: the selection while it is drawn. Never: knows what the chart shows.

const LEAST_PX = 8; // a shorter move is a click
const KEYS = { "+": 0.5, "=": 0.5, "-": 2, "_": 2 };

// at(pixels from the plot's left edge) is a place on the axis; chosen([from, to]), chosen(null): all of it
export function zoomable(plot, { at, chosen, by }) {
  let from = null;
  const box = document.createElement("div");
  box.className = "selection";
  const left = (event) => event.clientX - plot.getBoundingClientRect().left;

  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return; // a finger scrolls the page
    from = left(event);
  });
  plot.addEventListener("pointermove", (event) => {
    if (from === null) return;
    if (!box.isConnected && Math.abs(left(event) - from) >= LEAST_PX) {
      plot.setPointerCapture(event.pointerId);
      plot.append(box);
    }
    box.style.left = `${Math.min(from, left(event))}px`;
    box.style.width = `${Math.abs(left(event) - from)}px`;
  });
  plot.addEventListener("pointerup", (event) => {
    if (box.isConnected) chosen([at(Math.min(from, left(event))), at(Math.max(from, left(event)))]);
    end();
  });
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("dblclick", () => chosen(null));
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return; // the browser's own zoom
    if (event.key in KEYS) by(KEYS[event.key]);
    else if (event.key === "0" || event.key === "Escape") chosen(null);
    else return;
    event.preventDefault();
  });

  function end() {
    from = null;
    box.remove();
  }
}
