// SPDX-License-Identifier: Apache-2.0
// One back-button step per gesture: dragging a slider causes many changes, but is one action of the user.

const STILL = 800; // ms without a change after which the next one is a new gesture

/** Returns a function to call for each change, which returns true at the beginning of a gesture. */
export function gesture() {
  let last = -Infinity;
  return () => {
    const now = performance.now();
    const begins = now - last > STILL;
    last = now;
    return begins;
  };
}

/** The same for a slider: as long as it is held, it is one gesture, however slow. */
export function held(input) {
  const begins = gesture();
  let [down, moved] = [false, false];
  input.addEventListener("pointerdown", () => ([down, moved] = [true, false]));
  input.addEventListener("change", () => (down = false));
  return () => {
    const first = begins() && !(down && moved);
    moved = true;
    return first;
  };
}
