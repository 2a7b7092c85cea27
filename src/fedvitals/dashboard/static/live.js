// SPDX-License-Identifier: Apache-2.0
// Messages from the server: which runs have changed. A lost connection is shown, and restored.

import { addressOf } from "./root.js";

const SILENCE = 25_000; // ms; the server sends something every ten seconds

/** listener(kind, data): «change» {runs}, «lost», «back», «trouble» {message}, «healed». */
export function listen(listener) {
  let source = null;
  let lost = false;
  let heard = Date.now();
  let wait = 500;
  let timer = null;

  function fell() {
    source?.close();
    source = null;
    if (!lost) listener("lost", { since: new Date(heard) });
    lost = true;
    clearTimeout(timer);
    timer = setTimeout(open, wait);
    wait = Math.min(wait * 1.6, 5000);
  }

  function open() {
    heard = Date.now();
    source = new EventSource(addressOf("/api/live"));
    source.addEventListener("hello", () => {
      heard = Date.now();
      wait = 500;
      if (lost) listener("back", {});
      lost = false;
    });
    source.addEventListener("alive", () => (heard = Date.now()));
    for (const kind of ["change", "trouble", "healed"]) {
      source.addEventListener(kind, (event) => {
        heard = Date.now();
        listener(kind, JSON.parse(event.data));
      });
    }
    source.addEventListener("error", fell);
  }

  // A browser allows six connections to one server: hidden pages must not hold them all.
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    source?.close();
    source = null;
    if (document.hidden) return;
    open();
    listener("back", {});
  });

  open();
  const check = setInterval(() => source && Date.now() - heard > SILENCE && fell(), 5000);
  addEventListener("pagehide", () => {
    clearInterval(check);
    source?.close();
  });
  addEventListener("pageshow", (event) => event.persisted && fell());
}
