// SPDX-License-Identifier: Apache-2.0
// Charts of items rather than rounds: the pointer finds the nearest, the keys go from one to the next in order.

const REACH = 18; // pixels

/** The index of the nearest spot within reach, or −1. spots: [{x, y, reach?}]. */
export function nearest(spots, x, y) {
  let [best, least] = [-1, Infinity];
  for (let at = 0; at < spots.length; at += 1) {
    const { x: px, y: py, reach = REACH } = spots[at];
    const away = Math.hypot(px - x, py - y);
    if (away < least && away <= reach) [best, least] = [at, away];
  }
  return best;
}

/**
 * Pointer and key hooks. `find(x, y)` → index; `count()`; `pick(index)`: a click or Enter; `told(index)` → text to
 * announce. `order(index, key)` → index, for charts where the arrows mean directions.
 */
export function picking(frameOf, { find, count, pick, told, order }) {
  const hooks = {
    chosen: -1,
    move(x, y) {
      hooks.chosen = find(x, y);
      frameOf().dom.plot.style.cursor = hooks.chosen >= 0 && pick ? "pointer" : "default";
    },
    leave: () => (hooks.chosen = -1),
    click(x, y) {
      const at = find(x, y);
      if (at >= 0) pick?.(at);
    },
    key(event) {
      const last = count() - 1;
      if (last < 0) return false;
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step !== undefined && order) hooks.chosen = order(hooks.chosen, event.key);
      else if (step !== undefined) hooks.chosen = hooks.chosen < 0 ? (step > 0 ? 0 : last) : (hooks.chosen + step + last + 1) % (last + 1);
      else if (event.key === "Home") hooks.chosen = 0;
      else if (event.key === "End") hooks.chosen = last;
      else if (event.key === "Escape" && hooks.chosen >= 0) hooks.chosen = -1;
      else if (event.key === "Enter" && hooks.chosen >= 0) pick?.(hooks.chosen);
      else return false;
      if (hooks.chosen >= 0) frameOf().say(told(hooks.chosen));
      return true;
    },
  };
  return hooks;
}
