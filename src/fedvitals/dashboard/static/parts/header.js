// SPDX-License-Identifier: Apache-2.0
// The line on top: where one is, the other pages of the run, and whether it lives.

import { fill, h } from "../dom.js";
import { bytes, number, seconds } from "../format.js";
import { runLink } from "../params.js";
import { compareLink } from "./chosen.js";
import { changeTheme } from "../theme.js";

const PAGES = [
  ["overview", "overview"], ["clients", "clients"], ["map", "map"], ["layers", "layers"], ["rounds", "rounds"],
  ["topology", "topology"], ["findings", "findings"],
];
const PARENT = { client: "clients", round: "rounds", finding: "findings" };
const STATES = { running: "● live", silent: "○ silent", finished: "■ finished" };

export function header(node) {
  const crumbs = h("div", { class: "crumbs" });
  const pages = h("nav", { class: "pages", "aria-label": "Pages of the run" });
  const facts = h("div", { class: "facts" });
  const connection = h("span", { class: "connection", role: "status" });
  const banner = h("div", { class: "banner", role: "alert", hidden: true });
  const theme = h("button", { class: "icon-button", "aria-label": "Light or dark", title: "Light or dark (t)", text: "◐", on: { click: changeTheme } });
  fill(node, h("div", { class: "top" }, crumbs, pages, h("div", { class: "right" }, facts, connection, theme)), banner);

  return {
    show(page, status) {
      const at = page.name;
      const name = status?.name ?? page.run;
      fill(crumbs, h("a", { class: "brand", href: "/", text: "fedvitals" }),
        page.run !== null && [h("span", { class: "muted", "aria-hidden": "true", text: "▸" }), h("a", { class: "run-name", href: runLink(page.run), text: name, title: page.run })]);
      const now = PARENT[at] ?? at;
      if (page.run === null) {
        fill(pages, h("a", { href: "/", text: "runs", "aria-current": now === "runs" ? "page" : null }),
          h("a", { href: "/compare", text: "compare", "aria-current": now === "compare" ? "page" : null }));
      } else {
        const found = status?.findings ?? 0;
        fill(pages, PAGES.map(([key, text]) => h("a", {
          href: key === "overview" ? runLink(page.run) : runLink(page.run, key),
          text: key === "findings" && found ? `${text} (${found})` : text,
          "aria-current": key === now ? "page" : null,
        })), h("a", { href: compareLink([page.run]), text: "compare" }));
      }
      if (!status) return fill(facts);
      const rounds = status.last_round === null ? "no round yet" : `round ${status.last_round}${status.rounds_planned ? `/${status.first_round + status.rounds_planned - 1}` : ""}`;
      fill(facts,
        h("span", { class: `run-state ${status.state}`, text: STATES[status.state] ?? status.state }),
        h("span", { text: rounds }),
        status.round_seconds !== null && h("span", { title: "the newest round took", text: `${seconds(status.round_seconds)} a round` }),
        status.bytes !== null && h("span", { title: `bytes of the training on the wire so far${status.telemetry_bytes ? `; telemetry took ${bytes(status.telemetry_bytes)} more` : ""}`, text: `${bytes(status.bytes)} sent` }),
        h("span", { class: status.lost ? "sev-warning" : "muted", title: "records that the monitor could not keep", text: `lost ${number(status.lost)}` }));
    },

    /** Whether the server still tells us what is new. */
    connection(kind, data) {
      if (kind === "lost") {
        connection.className = "connection lost";
        connection.textContent = `connection lost at ${data.since.toLocaleTimeString()}; trying again`;
      } else if (kind === "back") {
        connection.className = "connection";
        connection.textContent = "";
      }
    },

    trouble(error) {
      banner.hidden = error === null;
      if (error) fill(banner, error.message, error.hint && ` ${error.hint}`);
    },
  };
}
