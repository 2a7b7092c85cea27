// SPDX-License-Identifier: Apache-2.0
// Rounds: where did the time go? The verdict in words, the rounds by phase, who held them up, what would help.

import { of } from "../api.js";
import { Axis, bindAxis, stackChart } from "../charts/index.js";
import { fill, h } from "../dom.js";
import { number, percent, seconds } from "../format.js";
import { go, link, runLink } from "../params.js";
import { ask, closer, COLUMNS } from "../parts/band.js";
import { changePanels } from "../parts/changes.js";
import { memoryPanel, trafficPanel, machinePanel } from "../parts/costs.js";
import { rowTable } from "../parts/rows.js";
import { shareBar } from "../parts/shares.js";
import { stragglerTable } from "../parts/stragglers.js";

export const title = "Rounds";
const SLOWEST = 8; // rounds in the list

export function view(root, ctx) {
  const { run, params } = ctx;
  const axis = new Axis({ from: ctx.status.first_round ?? 0, to: ctx.status.last_round ?? 0 });
  const unbind = bindAxis(axis, params);
  const [headline, where] = [h("p", { class: "said" }), h("p", { class: "muted small" })];
  const clock = clockButtons(params);
  const stack = h("div", {});
  const bars = [shareBar(), shareBar(), shareBar()];
  const waits = h("p", { class: "muted small" });
  const slow = stragglerTable(run);
  const rounds = roundTable(run, params);
  const changes = changePanels();
  const [memory, traffic, machine] = [memoryPanel(run, axis), trafficPanel(run, axis), machinePanel()];
  root.append(
    h("div", { class: "head" }, h("h1", { text: "Rounds" }), h("span", { class: "muted", text: "where did the time go?" }), clock.node),
    headline, where, stack,
    h("div", { class: "split" },
      h("section", { class: "panel" }, h("h2", { text: "where the time of these rounds went" }), bars.map((one) => one.node), waits),
      h("section", { class: "panel" }, h("h2", { text: "slowest rounds" }), rounds.node)),
    h("section", { class: "panel" }, h("h2", { text: "stragglers: who determined rounds and cost time" }), slow.node),
    changes.node,
    h("section", { class: "panel" }, h("h2", { text: "memory" }), memory.node),
    h("section", { class: "panel" }, h("h2", { text: "traffic" }), traffic.node),
    machine.node);
  let underWay = {};
  const time = stackChart(stack, { title: "round time by phase", unit: "seconds", axis, height: 190, onRound: (round) => go(runLink(run, "rounds", round)) });

  /**
   * The slower parts: a page with its verdict now is better than a complete one later. Never two of the same at once.
   */
  function rest(asked, signal) {
    const key = JSON.stringify(asked);
    if (underWay.key === key) return underWay.promise;
    const promise = Promise.all([ctx.api.get(of(run, "profile", "changes"), asked, signal), ctx.api.get(of(run, "costs"), {}, signal)]);
    underWay = { key, promise };
    promise.catch(() => {}).finally(() => {
      if (underWay.promise === promise) underWay = {};
    });
    return promise;
  }

  function drawPhases(found) {
    const joined = Math.max(...found.rounds.map((_, i) => found.last[i] - found.first[i] + 1), 1);
    time.update({
      rounds: found.rounds, parts: found.parts, flags: [],
      note: [found.clock === "virtual" ? "on the lab’s virtual clock" : "", "along the critical path", joined > 1 ? `the slowest of every ${joined} rounds` : "",
        "a click opens the round"].filter(Boolean).join("; "),
    });
    rounds.show(slowestOf(found), { nothing: "No round was timed as a whole." });
  }

  function drawTime(found) {
    headline.textContent = found.headline;
    fill(where, windowWords(found), found.window.rounds < found.window.of && " Drag over the picture to choose others.");
    clock.show(found.clock, found.clocks);
    const parts = [["rounds, along their critical paths", found.path], ["clients, waiting included", found.clients], ["server", found.server]];
    bars.forEach((one, i) => {
      const [name, own] = parts[i];
      one.node.hidden = !own.length;
      one.show(name, seconds(own.reduce((sum, part) => sum + part.seconds, 0)), own);
    });
    fill(waits,
      found.waited && `${found.waited}. `,
      found.unaccounted > 0.02 && `Up to ${percent(found.unaccounted)} of a node’s round, in the median round, is in no part: unaccounted for.`);
    slow.show(found.stragglers);
  }

  return {
    async load(signal) {
      const asked = { clock: params.get("clock"), from: params.get("from"), to: params.get("to") };
      const later = rest(asked, signal);
      const [phases, profile] = await Promise.all([
        ask(ctx, "phases", { points: COLUMNS, ...closer(axis, COLUMNS) }, signal), ctx.api.get(of(run, "profile"), asked, signal),
      ]);
      return { phases, profile, later };
    },

    show({ phases, profile, later }) {
      if (ctx.status.first_round !== null) axis.extend(ctx.status.first_round, ctx.status.last_round);
      drawPhases(phases);
      drawTime(profile);
      later.then(([found, costs]) => {
        changes.show(found);
        memory.show(costs.memory);
        traffic.show(costs.traffic);
        machine.show(costs.machine);
        root.dataset.complete = "true";
      }).catch((error) => error.name !== "AbortError" && changes.fail(error));
    },

    destroy() {
      unbind();
      for (const one of [time, ...bars, memory, traffic]) one.destroy();
    },
  };
}

/** The rounds that the text is about. */
function windowWords({ window, clock, left_open: open }) {
  const some = window.rounds < window.of;
  const which = window.rounds === 1 ? `round ${window.last}` : `rounds ${window.first} to ${window.last}`;
  return [
    window.rounds ? `From ${which}${some ? `, ${number(window.rounds)} of ${number(window.of)}` : ""}, on the ${clock} clock.` : "No round yet.",
    window.narrowed ? "More were asked for than can be read in a moment: these are the newest of them." : "",
    open === null ? "" : `Round ${open} has no end yet and is left out.`,
  ].filter(Boolean).join(" ");
}

function clockButtons(params) {
  const node = h("span", { class: "row", role: "group", "aria-label": "Clock" });
  return {
    node,
    show(chosen, clocks) {
      fill(node, clocks.length > 1 && clocks.map((one) => h("button", {
        class: "button quiet", type: "button", text: `${one} clock`, "aria-pressed": String(one === chosen), on: { click: () => params.set({ clock: one }, { push: true }) },
      })));
    },
  };
}

/** The longest rounds, and the parts that took most of each. */
function slowestOf({ rounds, parts }) {
  const all = rounds.map((round, i) => {
    const own = parts.map((part) => ({ name: part.name, seconds: part.values[i] ?? 0 })).sort((a, b) => b.seconds - a.seconds);
    return { round, seconds: own.reduce((sum, part) => sum + part.seconds, 0), own };
  });
  return all.sort((a, b) => b.seconds - a.seconds).slice(0, SLOWEST);
}

function roundTable(run, params) {
  const words = ({ own, seconds: whole }) => own.filter((part) => part.seconds > 0.05 * whole).slice(0, 3).map((part) => `${part.name} ${percent(part.seconds / whole)}`);
  return rowTable([
    { name: "round", text: "round", cell: (row) => h("a", { href: link(runLink(run, "rounds", row.round), { clock: params.get("clock") }), text: row.round }) },
    { name: "seconds", text: "took", num: true, cell: (row) => seconds(row.seconds) },
    { name: "parts", text: "most of it", class: "words", cell: (row) => h("span", { class: "small muted", text: words(row).join(", ") }) },
  ], { key: (row) => row.round, caption: "The slowest rounds" });
}
