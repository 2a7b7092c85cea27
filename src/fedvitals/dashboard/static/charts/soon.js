// SPDX-License-Identifier: Apache-2.0
// Work for the next picture of the screen: asked for many times, done once. In a hidden tab nothing is done at all.

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

// Where a browser has no idle time to tell of, a moment later must do.
const idle = window.requestIdleCallback ?? ((work) => setTimeout(work, 200));
const rest = new Set();
let resting = false;

/** Work for when nothing else is to do, one at a time: what is out of sight must not delay what is in it. */
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
