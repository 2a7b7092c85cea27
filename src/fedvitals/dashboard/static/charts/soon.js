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

export function forget(...works) {
  for (const one of works) queue.delete(one);
}
