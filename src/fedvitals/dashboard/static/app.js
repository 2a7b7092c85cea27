// SPDX-License-Identifier: Apache-2.0
// The shell: finds the page for an address, loads it, keeps it up to date, and shows errors.

import { onToken } from "./access.js";
import { api, of } from "./api.js";
import { fill } from "./dom.js";
import { keyboard } from "./keys.js";
import { listen } from "./live.js";
import { fromPart, go, onNavigate, params } from "./params.js";
import { footer } from "./parts/footer.js";
import { header } from "./parts/header.js";
import { broken, nothing, skeleton } from "./parts/states.js";
import { addressOf, pathHere } from "./root.js";

const PAUSE = 300; // ms between two updates of a run that changes
const STATE_EVERY = 10_000; // ms
const VIEWS = {
  runs: () => import("./views/runs.js"),
  compare: () => import("./views/compare.js"),
  overview: () => import("./views/overview.js"),
  clients: () => import("./views/clients.js"),
  client: () => import("./views/client.js"),
  map: () => import("./views/map.js"),
  layers: () => import("./views/layers.js"),
  adapters: () => import("./views/adapters.js"),
  rounds: () => import("./views/rounds.js"),
  round: () => import("./views/round.js"),
  topology: () => import("./views/topology.js"),
  replay: () => import("./views/replay.js"),
  findings: () => import("./views/findings.js"),
  finding: () => import("./views/finding.js"),
};
// With another name after it, a list becomes one of its entries.
const ENTRY = { clients: ["client", "node"], rounds: ["round", "round"], findings: ["finding", "key"] };

const main = document.getElementById("main");
const head = header(document.getElementById("header"));
const foot = footer(document.getElementById("footer"));
let page = null; // what is shown: {name, run, path, address, view, ctx, …}

function route() {
  const parts = pathHere().split("/").filter(Boolean).map(decodeURIComponent);
  if (parts.length === 0 || (parts.length === 1 && parts[0] === "runs")) return { view: "runs", run: null, path: {} };
  if (parts[0] === "compare") return { view: "compare", run: null, path: {} };
  if (parts[0] !== "runs") return { view: "", run: null, path: {} };
  const [, run, view = "overview", name] = parts.map(fromPart);
  if (name !== undefined && ENTRY[view]) return { view: ENTRY[view][0], run, path: { [ENTRY[view][1]]: name } };
  return { view, run, path: {} };
}

async function show() {
  let found;
  try {
    found = route();
  } catch {
    found = { view: "", run: null, path: {} }; // an address that is not valid text
  }
  page?.stop.abort();
  page?.view?.destroy?.();
  const mine = { name: found.view, run: found.run, path: found.path, address: location.pathname, stop: new AbortController(), view: null, shown: false };
  page = mine;
  delete document.documentElement.dataset.ready;
  head.show(mine, null);
  fill(main, skeleton());
  if (!VIEWS[mine.name]) {
    fill(main, nothing("There is no such page.", "The address leads nowhere here.", { href: addressOf("/"), text: "All runs" }));
    return;
  }
  try {
    const [module, status] = await Promise.all([
      VIEWS[mine.name](),
      mine.run === null ? null : api.get(of(mine.run), {}, mine.stop.signal),
      api.checkAccess(),
    ]);
    if (page !== mine) return;
    mine.module = module;
    mine.status = status;
    if (status && status.id !== mine.run) mine.run = status.id; // replaces a name, or the beginning of an id
    document.title = [module.title, status?.name, "fedvitals"].filter(Boolean).join(" · ");
    build(mine);
    await refresh(mine, "first");
  } catch (error) {
    fail(mine, error);
  }
}

function build(mine) {
  const root = document.createElement("div");
  root.className = `view view-${mine.name}`;
  root.tabIndex = -1;
  mine.root = root;
  mine.ctx = { run: mine.run, path: mine.path, params, api, status: mine.status, signal: mine.stop.signal, refresh: () => refresh(mine) };
  mine.view = mine.module.view(root, mine.ctx);
}

async function refresh(mine, kind = "again") {
  if (page !== mine || !mine.view?.load) return;
  if (mine.busy) {
    mine.again = true;
    return;
  }
  mine.busy = true;
  try {
    const status = mine.run === null ? Promise.resolve(null) : api.get(of(mine.run), {}, mine.stop.signal);
    const [data, now] = await Promise.all([mine.view.load(mine.stop.signal), status]);
    if (page !== mine) return;
    mine.ctx.status = mine.status = now;
    if (!mine.shown) fill(main, mine.root);
    mine.view.show(data);
    head.show(mine, now);
    foot.show(now);
    head.trouble(null);
    if (!mine.shown) {
      mine.shown = true;
      document.documentElement.dataset.ready = mine.name;
      if (kind !== "first" || document.activeElement === document.body) main.focus({ preventScroll: true });
    }
  } catch (error) {
    fail(mine, error);
  } finally {
    mine.busy = false;
    if (mine.again && page === mine) {
      mine.again = false;
      setTimeout(() => refresh(mine), PAUSE);
    }
  }
}

function fail(mine, error) {
  if (error.name === "AbortError" || page !== mine) return;
  if (error.code === "token_needed") {
    location.assign(addressOf(`/login#back=${encodeURIComponent(location.pathname + location.search)}`));
    return;
  }
  if (error.status === undefined) console.error(error); // a bug of ours, not the server's
  // The previous content stays: old numbers with a warning are better than none.
  if (mine.shown) head.trouble(error);
  else if (error.code === "store_unreadable" && mine.run === null) fill(main, nothing.store(error, () => show()));
  else fill(main, broken(error, () => show()));
}

onNavigate((kind) => {
  if (kind === "params" && page?.shown && page.address === location.pathname) refresh(page);
  else if (kind === "page" && page?.shown && page.address === location.pathname) {
    page.view.restore?.();
    refresh(page);
  } else {
    scrollTo(0, 0);
    show();
  }
});

/** Controls that change something appear and disappear with the token, which changes when the server is restarted. */
async function checkAccess() {
  try {
    if (await api.checkAccess()) show();
  } catch {
    // unreachable: asked again when it is back
  }
}
onToken(checkAccess);

let due = null;
listen((kind, data) => {
  head.connection(kind, data);
  if (kind === "back") checkAccess();
  if (kind === "trouble" && page?.shown) head.trouble({ message: data.message, hint: "What is shown is from before. The page goes on by itself." });
  const mine = page;
  if (!mine || kind === "lost" || kind === "trouble") return;
  const concerned = kind !== "change" || mine.run === null || mine.run in data.runs || mine.ctx?.runs?.some((run) => run in data.runs);
  if (!concerned || due) return;
  due = setTimeout(() => {
    due = null;
    if (!page?.shown && kind !== "change") show();
    else if (page?.shown) refresh(page);
  }, mine.last && Date.now() - mine.last < PAUSE ? PAUSE : 0);
  mine.last = Date.now();
});

// A run dies without a change in the store: while it may be alive, its state is requested again.
setInterval(() => page?.shown && page.status?.state !== "finished" && refresh(page), STATE_EVERY);

keyboard(() => page, go);
show();
