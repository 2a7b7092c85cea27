// SPDX-License-Identifier: Apache-2.0
// The footer of every page of a run: what was lost, what measuring cost, what may be seen.

import { access, READ_ONLY } from "../access.js";
import { api } from "../api.js";
import { fill, h, words } from "../dom.js";
import { number, percent } from "../format.js";
import { addressOf } from "../root.js";

export function footer(node) {
  const store = h("span", { class: "store" });
  const facts = h("span", {});
  const keys = h("span", { class: "muted" }, "keys ", h("kbd", { text: "?" }));
  const enter = h("button", {
    class: "link-button", type: "button", text: "enter the token",
    on: { click: () => location.assign(addressOf(`/login#back=${encodeURIComponent(location.pathname + location.search)}`)) },
  });
  const readOnly = h("span", { class: "read-only", hidden: true }, words(READ_ONLY), ", or ", enter, ".");
  fill(node, facts, readOnly, store, keys);
  let asked = false;
  function ask() {
    if (asked) return;
    asked = true;
    api.get(addressOf("/api/store")).then((found) => (store.textContent = `${found.store} · fedvitals ${found.fedvitals}`),
      () => (asked = false)); // only a footer: errors are shown above
  }

  return {
    show(status) {
      ask();
      readOnly.hidden = access.changes;
      if (!status) return fill(facts);
      const cost = status.cost_percent === null ? "time of the monitor not measured" : `monitor ${percent(status.cost_percent / 100)} of the rounds' time`;
      fill(facts, h("span", { class: status.lost ? "sev-warning" : null, text: `records lost ${number(status.lost)}` }),
        status.thinned ? h("span", { class: "sev-warning", text: ` · layer statistics of ${number(status.thinned)} client-rounds left out` }) : "",
        " · ", `${cost}${status.probes ? ` (probes: ${status.probes})` : ""}`, " · ", `privacy level ${status.privacy}`);
    },
  };
}
