// SPDX-License-Identifier: Apache-2.0
// Replay: what happened, step by step? A scrubber over the tape; at each round its state, who answered, and what if.

import { of } from "../api.js";
import { fill, h } from "../dom.js";
import { bytes, number } from "../format.js";
import { link, runLink } from "../params.js";
import { clientPanel, cohortPanel, ROWS } from "../parts/replay_cohort.js";
import { scrubber } from "../parts/replay_scrubber.js";
import { modelPanel, waysPanel } from "../parts/replay_state.js";
import { whatIfPanel } from "../parts/replay_whatif.js";
import { nothing } from "../parts/states.js";

export const title = "Replay";

export function view(root, ctx) {
  const { run, params } = ctx;
  const [none, body, steps] = [h("div", {}), h("div", { class: "stack replay" }), h("nav", { class: "row", "aria-label": "Other rounds" })];
  const [said, trouble, facts, parts] = [h("p", { class: "said", role: "status" }), h("p", { class: "sev-critical", role: "alert" }), h("p", { class: "small muted" }), h("div", { class: "stack" })];
  const choose = (node) => params.set({ node, page: null }, { push: true });
  const strip = scrubber((round, push) => params.set({ round, page: null }, { push }));
  const [model, ways, cohort] = [modelPanel(), waysPanel(run), cohortPanel(ctx, choose)];
  const client = clientPanel(ctx, choose);
  const whatIf = whatIfPanel(ctx, cohort);
  parts.append(h("div", { class: "split beside" }, cohort.node, whatIf.node), h("div", { class: "split" }, client.node, h("section", { class: "panel" }, h("h2", { text: "all clients" }), cohort.picture)), h("div", { class: "split" }, model.node, ways.node));
  body.append(
    h("div", { class: "head" }, h("h1", { text: "Replay" }), h("span", { class: "muted", text: "what happened, step by step?" }), steps),
    strip.node, h("div", {}, said, trouble), parts, facts);
  root.append(none, body);
  let index = null;

  const to = (round) => link(runLink(run, "replay"), { round, node: params.get("node"), drop: params.get("drop"), keep: params.get("keep"), rule: params.get("rule") });

  function drawHead(found) {
    const at = index.rounds.indexOf(found.round);
    document.title = `Replay, round ${found.round} · ${ctx.status?.name ?? ""} · fedvitals`;
    fill(steps,
      at > 0 ? h("a", { href: to(index.rounds[at - 1]), rel: "prev", text: `← round ${index.rounds[at - 1]}` }) : h("span", { class: "muted", text: "← the first" }),
      at + 1 < index.rounds.length ? h("a", { href: to(index.rounds[at + 1]), rel: "next", text: `round ${index.rounds[at + 1]} →` }) : h("span", { class: "muted", text: "the last →" }),
      h("a", { href: runLink(run, "rounds", found.round), text: "where its time went" }));
    said.textContent = `Round ${found.round} of ${index.rounds[0]} to ${index.rounds.at(-1)}. ${found.how}`;
    trouble.textContent = found.trouble ?? "";
    parts.hidden = found.trouble !== null;
    const whole = index.kinds.filter((kind) => kind === "whole").length;
    fill(facts, `The tape: ${bytes(index.bytes)}${index.budget ? ` of at most ${bytes(index.budget)}` : ""}, ${number(index.rounds.length)} rounds, ${number(whole)} whole states; recorded with ${index.machine || "unknown versions"}.`);
  }

  return {
    async load(signal) {
      const now = await ctx.api.get(of(run, "replay"), {}, signal);
      if (!now.there || !now.rounds.length) return { now, found: null };
      const wanted = params.number("round", now.rounds.at(-1));
      const round = now.rounds.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
      const asked = { node: params.get("node"), sort: params.get("sort"), limit: ROWS, offset: ROWS * Math.max(0, params.number("page", 0)) };
      return { now, found: await ctx.api.get(of(run, "replay", round), asked, signal) };
    },

    show({ now, found }) {
      index = now;
      body.hidden = found === null;
      fill(none, found === null && (now.there
        ? nothing("No round is on the tape yet.", "The first one comes when it has ended. This page notices by itself.")
        : nothing(now.code ? "This run has no tape." : "The tape cannot be read.", [now.code ? "" : now.why, now.how].filter(Boolean).join(" "), null, now.code || null)));
      if (found === null) return;
      strip.show(now, found.round);
      drawHead(found);
      if (found.trouble !== null) return;
      model.show(found);
      ways.show(found, choose);
      cohort.show(found);
      client.show(found);
      whatIf.show(found, ctx.signal);
    },

    destroy() {
      for (const one of [strip, cohort, client, whatIf]) one.destroy();
    },

    keys: {
      ArrowLeft: Object.assign(() => index?.rounds.length && strip.step(-1), { label: "one round back" }),
      ArrowRight: Object.assign(() => index?.rounds.length && strip.step(1), { label: "one round on" }),
      b: Object.assign(() => index?.rounds.length && strip.trouble(-1), { label: "the last round with trouble before this one" }),
      n: Object.assign(() => index?.rounds.length && strip.trouble(1), { label: "the next round with trouble" }),
    },
  };
}
