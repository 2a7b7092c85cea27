// SPDX-License-Identifier: Apache-2.0
// Work for the next frame: requested many times, done once. In a hidden tab nothing is done at all.

const queue = new Set();
let asked = false;

export function soon(work) {
  queue.add(work);
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const works = [...queue];
    queue.clear();
    for (const one of works) one();
  });
}

// In browsers without idle callbacks, a short delay must do.
const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 200));
const rest = new Set();
let resting = false;

/** Work for idle time, one piece at a time: what is out of sight must not delay what is visible. */
export function atRest(work) {
  rest.add(work);
  if (resting) return;
  resting = true;
  idle(function next() {
    const [one] = rest;
    rest.delete(one);
    one?.();
    resting = rest.size > 0;
    if (resting) idle(next);
  });
}

export function forget(...works) {
  for (const one of works) {
    queue.delete(one);
    rest.delete(one);
  }
}
