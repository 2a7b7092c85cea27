// SPDX-License-Identifier: Apache-2.0
// Pointer and keys on a plot. Moves are handled once per frame; the wheel is left to the page.

import { soon } from "./soon.js";
import { hideTip } from "./tip.js";

const DRAG = 4; // pixels from which a press is a drag
const DOUBLE_MS = 230; // delay of a click if a second one would mean something else

/** Calls the chart's move(x, y), leave(), click(x, y, event), double(), drag(from, to, done), key(event). */
export function attachPointer(frame) {
  const { chart, dom, signal } = frame;
  const { plot } = dom;
  const press = { from: null, to: null, dragging: false };
  let last = null;
  let waiting = 0;

  const spot = (event) => {
    const at = plot.getBoundingClientRect();
    return { x: event.clientX - at.left, y: event.clientY - at.top };
  };
  const moved = () => {
    if (!last || !frame.box) return;
    frame.pointer = spot(last);
    if (press.dragging) {
      press.to = frame.pointer;
      chart.drag?.(press.from, press.to, false);
    }
    chart.move?.(frame.pointer.x, frame.pointer.y, last);
    frame.rehover();
  };
  const gone = () => {
    last = null;
    frame.pointer = null;
    chart.leave?.();
    hideTip(frame);
    frame.rehover();
  };
  const on = (name, listener) => plot.addEventListener(name, listener, { signal });

  on("pointermove", (event) => {
    last = event;
    if (press.from && !press.dragging && chart.drag) {
      const now = spot(event);
      if (Math.abs(now.x - press.from.x) > DRAG) {
        press.dragging = true;
        plot.setPointerCapture(event.pointerId);
      }
    }
    soon(moved);
  });
  on("pointerleave", () => !press.dragging && gone());
  on("pointerdown", (event) => {
    if (event.button === 0 && frame.box) press.from = spot(event);
  });
  on("pointerup", (event) => {
    if (press.dragging) {
      chart.drag(press.from, spot(event), true);
      press.ended = event.timeStamp;
    }
    Object.assign(press, { from: null, to: null, dragging: false });
  });
  on("pointercancel", () => {
    if (press.dragging) chart.drag(null, null, true);
    Object.assign(press, { from: null, to: null, dragging: false });
    gone();
  });
  on("click", (event) => {
    if (!frame.box || (press.ended && event.timeStamp - press.ended < 60)) return;
    if (event.target.closest?.("a[href]") || event.detail > 1) return;
    const at = spot(event);
    const work = () => chart.click?.(at.x, at.y, event);
    // A single click must only wait if a double click has something to undo.
    if (chart.undoable?.()) waiting = setTimeout(work, DOUBLE_MS);
    else work();
  });
  on("dblclick", () => {
    clearTimeout(waiting);
    chart.double?.();
  });
  on("focus", () => {
    frame.focused = plot.matches(":focus-visible");
    frame.rehover();
  });
  on("blur", () => {
    frame.focused = false;
    if (!frame.pointer) chart.leave?.();
    frame.rehover();
  });
  on("keydown", (event) => {
    if (event.target !== plot || event.metaKey || event.ctrlKey || event.altKey || !frame.box) return;
    frame.focused = true;
    if (!chart.key?.(event)) return;
    event.preventDefault();
    event.stopPropagation();
    frame.rehover();
  });
  signal.addEventListener("abort", () => clearTimeout(waiting));
}
