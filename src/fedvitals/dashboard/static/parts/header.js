// SPDX-License-Identifier: Apache-2.0
// The header: the current page, the other pages of the run, and whether it is alive.

import { fill, h } from "../dom.js";
import { bytes, number, seconds } from "../format.js";
import { runLink } from "../params.js";
import { place } from "../place.js";
import { addressOf } from "../root.js";
import { compareLink } from "./chosen.js";
import { shareButton } from "./share.js";
import { changeTheme } from "../theme.js";

const PAGES = [
  ["overview", "overview"], ["clients", "clients"], ["map", "map"], ["layers", "layers"], ["adapters", "adapters"],
  ["rounds", "rounds"], ["topology", "topology"], ["findings", "findings"], ["replay", "replay"],
];
const ADAPTERS = "adapter.effective_rank"; // without it, a run has no such page
const PARENT = { client: "clients", round: "rounds", finding: "findings" };
const STATES = { running: "● live", silent: "○ silent", died: "✕ died", finished: "■ finished" };

export function header(node) {
  const crumbs = h("div", { class: "crumbs" });
  const pages = h("nav", { class: "pages", "aria-label": "Pages of the run" });
  const facts = h("div", { class: "facts" });
  const connection = h("span", { class: "connection", role: "status" });
  const banner = h("div", { class: "banner", role: "alert", hidden: true });
  const theme = h("button", { class: "icon-button", "aria-label": "Light or dark", title: "Light or dark (t)", text: "◐", on: { click: changeTheme } });
  const right = h("div", { class: "right" }, connection, facts, shareButton(() => about), theme);
  fill(node, h("div", { class: "top" }, crumbs, pages, right), banner);
  let lost = null; // since when the server has not answered
  let shown = { links: "", status: null };
  let about = []; // runs that the page is about

  /** The links, recreated only when they differ: focus and scroll position stay. */
  function linksTo(links) {
    const now = JSON.stringify(links);
    if (now === shown.links) return;
    shown.links = now;
    fill(pages, links.map(([href, text, current]) => h("a", { href, text, "aria-current": current ? "page" : null })));
    const here = pages.querySelector("[aria-current]");
    if (!here || pages.scrollWidth <= pages.clientWidth) return;
    const [row, one] = [pages.getBoundingClientRect(), here.getBoundingClientRect()];
    pages.scrollLeft += one.left - row.left - (row.width - one.width) / 2;
  }

  function factsOf(status) {
    if (!status) return fill(facts);
    const rounds = status.last_round === null && status.state === "running" ? "waiting for round 0" : roundCount(status);
    const silent = lost && status.state !== "finished"; // its current state cannot be known here
    fill(facts,
      silent ? h("span", { class: "run-state unknown", text: `○ last seen ${lost.toLocaleTimeString([], { hour12: false })}` })
        : h("span", { class: `run-state ${status.state}`, text: STATES[status.state] ?? status.state }),
      h("span", { text: rounds }),
      timeLeft(status),
      status.round_seconds !== null && h("span", { text: `last round ${seconds(status.round_seconds)}` }),
      status.bytes !== null && h("span", { title: `bytes of the training on the wire so far${status.telemetry_bytes ? `; telemetry took ${bytes(status.telemetry_bytes)} more` : ""}`, text: `${bytes(status.bytes)} sent` }),
      h("span", { class: status.lost ? "sev-warning" : "muted", title: "records that the monitor could not keep", text: `lost ${number(status.lost)}` }));
  }

  return {
    show(page, status) {
      const at = page.name;
      const name = status?.name ?? page.run;
      fill(crumbs, h("a", { class: "brand", href: addressOf("/"), text: "fedvitals" }),
        page.run !== null && [h("span", { class: "muted", "aria-hidden": "true", text: "▸" }), h("a", { class: "run-name", href: runLink(page.run), text: name, title: page.run })]);
      const now = PARENT[at] ?? at;
      about = page.run !== null ? [page.run] : page.ctx?.runs ?? [];
      Object.assign(place, { run: page.run === null ? "" : name, page: now });
      const found = status?.findings ?? 0;
      linksTo(page.run === null ? [[addressOf("/"), "runs", now === "runs"], [addressOf("/compare"), "compare", now === "compare"]] : [
        ...PAGES.filter(([key]) => key !== "adapters" || now === key || status?.metrics.some((one) => one.name === ADAPTERS)).map(([key, text]) => [key === "overview" ? runLink(page.run) : runLink(page.run, key), key === "findings" && found ? `${text} (${found})` : text, key === now]),
        [compareLink([page.run]), "compare", false],
      ]);
      shown.status = status;
      factsOf(status);
    },

    /** Whether the server still sends updates. */
    connection(kind, data) {
      if (kind === "lost") {
        connection.className = "connection lost";
        connection.textContent = "connection lost, trying again";
        lost = data.since;
        factsOf(shown.status);
      } else if (kind === "back") {
        lost = null;
        factsOf(shown.status);
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

/** «12/40 rounds»: as many as the terminal and the list of runs count. */
function roundCount({ rounds, rounds_planned: planned }) {
  return planned !== null && planned >= rounds ? `${number(rounds)}/${number(planned)} rounds` : `${number(rounds)} round${rounds === 1 ? "" : "s"}`;
}

/** For a run that trains: the expected remaining time, at the mean pace so far. */
function timeLeft({ state, rounds, rounds_planned: planned, seconds: passed }) {
  if (state !== "running" || !rounds || !passed) return null;
  const pace = passed / rounds;
  const left = planned > rounds ? `about ${seconds((planned - rounds) * pace)} left` : "";
  return h("span", { class: "time-left", text: [`${seconds(pace)} a round`, left].filter(Boolean).join(", ") });
}
