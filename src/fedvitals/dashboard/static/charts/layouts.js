// SPDX-License-Identifier: Apache-2.0
// The positions of a federation's nodes: star, clusters, tree or rings. One unit is the shorter half of the picture.

const TURN = 2 * Math.PI;
const HUBS = new Set(["server", "edge", "hub", "aggregator", "coordinator", "root"]);

const GOLDEN = Math.PI * (3 - Math.sqrt(5));
const CROWD = 70; // nodes from which a circle becomes a disc

export const isTree = (kind) => /tree|hier|edge/i.test(String(kind ?? ""));
export const isHub = (node) => HUBS.has(String(node.role ?? "").toLowerCase());

/** name → {x, y}, within ±wide and ±tall. Nodes with their own positions keep them. */
export function placed(kind, nodes, edges, [wide, tall] = [1, 1]) {
  const given = nodes.filter((node) => Number.isFinite(node.x ?? NaN) && Number.isFinite(node.y ?? NaN));
  if (given.length === nodes.length && nodes.length) return scaled(nodes);
  const word = String(kind ?? "star").toLowerCase();
  if (isTree(word)) return tree(nodes, edges, wide, tall);
  if (word.includes("ring")) return rings(nodes, wide, tall);
  if (word.includes("cluster") || word.includes("group")) return clusters(nodes, wide, tall);
  return star(nodes);
}

function scaled(nodes) {
  const [xs, ys] = [nodes.map((node) => node.x), nodes.map((node) => node.y)];
  const [left, low] = [Math.min(...xs), Math.min(...ys)];
  const span = Math.max(Math.max(...xs) - left, Math.max(...ys) - low) || 1;
  return new Map(nodes.map((node) => [node.name, { x: ((node.x - left) / span) * 2 - 1, y: ((node.y - low) / span) * 2 - 1 }]));
}

/** Around a centre: a circle, or for a crowd a sunflower pattern with a free middle. */
function around(nodes, found, { x = 0, y = 0, radius = 0.95, from = -TURN / 4 } = {}) {
  nodes.forEach((node, at) => {
    const crowd = nodes.length > CROWD;
    const angle = crowd ? at * GOLDEN : from + (TURN * at) / nodes.length;
    const reach = crowd ? radius * Math.sqrt(0.08 + (0.92 * (at + 0.5)) / nodes.length) : radius;
    found.set(node.name, { x: x + reach * Math.cos(angle), y: y + reach * Math.sin(angle) });
  });
}

function star(nodes) {
  const found = new Map();
  const hubs = nodes.filter(isHub);
  const away = hubs.length === 1 ? 0 : 0.2;
  hubs.forEach((node, at) => {
    const angle = (TURN * at) / hubs.length;
    found.set(node.name, { x: away * Math.cos(angle), y: away * Math.sin(angle) });
  });
  around(nodes.filter((node) => !isHub(node)), found);
  return found;
}

function grouped(nodes) {
  const groups = new Map();
  for (const node of nodes) {
    const key = node.group ?? "";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(node);
  }
  return groups;
}

const rootless = (node) => isHub(node) && (node.group === null || node.group === undefined || node.group === "");

/** The groups' centres on an ellipse around the middle, and the radius at which none touches another. */
function centres(count, wide, tall) {
  if (count === 1) return { spots: [{ x: 0, y: 0, angle: -TURN / 4 }], radius: 0.9 };
  const part = Math.sin(Math.PI / count);
  const radius = Math.min(0.42, ((0.86 * part) / (1.15 + part)) * Math.min(1.5, Math.max(wide, tall)));
  const spots = Array.from({ length: count }, (_, at) => {
    const angle = (wide > 1.5 ? Math.PI : -TURN / 4) + (TURN * at) / count;
    return { angle, x: (Math.min(wide, 2.2) - radius) * Math.cos(angle), y: (Math.min(tall, 2.2) - radius) * Math.sin(angle) };
  });
  return { spots, radius };
}

/** Each group around its own hub, the groups around the server. */
function clusters(nodes, wide, tall) {
  const found = new Map();
  const groups = [...grouped(nodes.filter((node) => !rootless(node))).values()];
  nodes.filter(rootless).forEach((node) => found.set(node.name, { x: 0, y: 0 }));
  const { spots, radius } = centres(groups.length, wide, tall);
  groups.forEach((members, at) => {
    const { x, y, angle } = spots[at];
    members.filter(isHub).forEach((node) => found.set(node.name, { x, y }));
    const clients = members.filter((node) => !isHub(node));
    // No node stands in the way to the server: the gap between two is turned towards it.
    const turn = clients.length % 2 ? 0 : Math.PI / Math.max(1, clients.length);
    around(clients, found, { x, y, radius, from: angle + turn });
  });
  return found;
}

/** One ring per group; the server, if there is one, in the middle. */
function rings(nodes, wide, tall) {
  const found = new Map();
  const groups = [...grouped(nodes.filter((node) => !rootless(node))).values()];
  nodes.filter(rootless).forEach((node) => found.set(node.name, { x: 0, y: 0 }));
  const { spots, radius } = centres(groups.length, wide, tall);
  groups.forEach((members, at) => {
    members.forEach((node, place) => {
      const angle = -TURN / 4 + (TURN * place) / members.length;
      found.set(node.name, { x: spots[at].x + radius * Math.cos(angle), y: spots[at].y + radius * Math.sin(angle) });
    });
  });
  return found;
}

/** Levels from the root down; children stand under their parent. */
function tree(nodes, edges, wide, tall) {
  const children = new Map(nodes.map((node) => [node.name, []]));
  const parent = new Map();
  const rank = new Map(nodes.map((node) => [node.name, isHub(node) ? (String(node.role).toLowerCase() === "server" ? 0 : 1) : 2]));
  for (const { from, to } of edges) {
    if (!rank.has(from) || !rank.has(to) || rank.get(from) === rank.get(to)) continue;
    const [up, down] = rank.get(from) < rank.get(to) ? [from, to] : [to, from];
    if (!parent.has(down)) {
      parent.set(down, up);
      children.get(up).push(down);
    }
  }
  const roots = nodes.map((node) => node.name).filter((name) => !parent.has(name)).sort((a, b) => rank.get(a) - rank.get(b));
  const found = new Map();
  const leaves = Math.max(1, roots.reduce((sum, name) => sum + width(name, children), 0));
  let next = 0;
  let deepest = 0;
  const stand = (name, depth) => {
    deepest = Math.max(deepest, depth);
    const below = children.get(name);
    const places = below.map((child) => stand(child, depth + 1));
    const x = places.length ? (places[0] + places.at(-1)) / 2 : (next++ + 0.5) / leaves;
    found.set(name, { x: (x * 2 - 1) * wide, y: depth });
    return x;
  };
  roots.forEach((name) => stand(name, rank.get(name) === 2 && roots.length > 1 ? 1 : 0));
  for (const place of found.values()) place.y = deepest ? ((place.y / deepest) * 2 - 1) * tall : 0;
  return found;
}

function width(name, children) {
  const below = children.get(name);
  return below.length ? below.reduce((sum, child) => sum + width(child, children), 0) : 1;
}
