// SPDX-License-Identifier: Apache-2.0
// The server's answers. What has not changed is not sent again (ETag), and errors have a common format.

import { access, authorization } from "./access.js";
import { runPart } from "./params.js";
import { addressOf } from "./root.js";

const KEPT = 60; // cached answers
const AT_ONCE = 2; // the server has one interpreter: with more requests at once, the first answer comes as late as the last

export class ApiError extends Error {
  constructor(status, { code, message, hint }) {
    super(message);
    Object.assign(this, { status, code, hint });
  }
}

const kept = new Map(); // address → {tag, data}

let open = 0;
const waiting = [];

/** Run one request when its turn has come. */
async function inTurn(request) {
  if (open < AT_ONCE) open += 1;
  else await new Promise((begin) => waiting.push(begin));
  try {
    return await request();
  } finally {
    const next = waiting.shift();
    if (next) next();
    else open -= 1;
  }
}

function address(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

async function failure(response) {
  try {
    return new ApiError(response.status, (await response.json()).error);
  } catch {
    return new ApiError(response.status, { code: "failed", message: `The server answered with ${response.status}.` });
  }
}

async function reach(url, options) {
  try {
    return await fetch(url, { credentials: "same-origin", cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, {
      code: "unreachable",
      message: "The dashboard's server does not answer.",
      hint: "Is `fedvitals ui` still running? This page goes on by itself when it is back.",
    });
  }
}

async function answer(url, signal) {
  const old = kept.get(url);
  const response = await reach(url, { signal, headers: old ? { "If-None-Match": old.tag } : {} });
  if (response.status === 304 && old) {
    kept.delete(url);
    kept.set(url, old);
    return old.data;
  }
  if (!response.ok) throw await failure(response);
  const data = await response.json();
  const tag = response.headers.get("ETag");
  if (tag) kept.set(url, { tag, data });
  while (kept.size > KEPT) kept.delete(kept.keys().next().value);
  return data;
}

export const api = {
  get(path, params, signal) {
    return inTurn(() => answer(address(path, params), signal));
  },

  /** A file that the server writes; `pairs` of a name and a value are its parameters. */
  async file(path, pairs) {
    const response = await reach(`${path}?${new URLSearchParams(pairs)}`);
    if (!response.ok) throw await failure(response);
    return response.blob();
  },

  /** Ask whether this page may change the store. Returns whether that has changed. */
  async checkAccess() {
    const before = access.changes;
    const headers = authorization();
    if (!headers.Authorization) access.changes = false;
    else {
      const response = await reach(addressOf("/api/login"), { headers });
      access.changes = response.ok && (await response.json()).changes;
    }
    return access.changes !== before;
  },

  async send(method, path, body) {
    const headers = { "X-Fedvitals": "1", ...authorization() };
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await reach(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
    if (!response.ok) throw await failure(response);
    return response.status === 204 ? null : response.json();
  },
};

/** The address of a run's answers: `of(run, "clients", node)`, with every name escaped. */
export function of(run, ...parts) {
  return [addressOf("/api/runs"), runPart(run), ...parts.map((part) => encodeURIComponent(part))].join("/");
}

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** A Grid with its numbers as typed arrays, little endian like every machine with a browser. */
export function decodeGrid(grid) {
  if (grid.values instanceof Float32Array) return grid;
  return { ...grid, values: new Float32Array(bytesOf(grid.values).buffer), state: bytesOf(grid.state) };
}
