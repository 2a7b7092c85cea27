// SPDX-License-Identifier: Apache-2.0
// The page as a PNG, as seen: its elements and its style inside an SVG, which the browser itself draws.
// Nothing leaves the browser, and nothing has to be loaded.

import { s } from "./dom.js";

const SCALE = 2;
const LONGEST = 7000; // height of a page in pixels: a canvas has its limits
const LEFT_OUT = "script, noscript, dialog, #announcer, .skip, .chart-menu, .chart-tip, .sharing, .unseen";
const UNPRINTABLE = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g; // not allowed in XML

/** The page's elements, including what only the browser knows: pixels, choices, typed text. */
function copied() {
  const copy = document.body.cloneNode(true);
  const [from, to] = [document.body.querySelectorAll("*"), copy.querySelectorAll("*")];
  from.forEach((node, at) => {
    const twin = to[at];
    if (node instanceof HTMLCanvasElement && node.width && node.height) {
      const image = document.createElement("img");
      image.className = node.className;
      const { width, height } = node.getBoundingClientRect();
      image.style.cssText = `${node.style.cssText}; width: ${width}px; height: ${height}px;`;
      image.src = node.toDataURL();
      twin.replaceWith(image);
    } else if (node instanceof HTMLSelectElement) {
      [...twin.options].forEach((option, place) => option.toggleAttribute("selected", place === node.selectedIndex));
    } else if (node instanceof HTMLInputElement) {
      twin.setAttribute("value", node.value);
      twin.toggleAttribute("checked", node.checked);
    }
    if (node.scrollTop || node.scrollLeft) twin.firstElementChild?.style.setProperty("translate", `${-node.scrollLeft}px ${-node.scrollTop}px`);
  });
  for (const node of copy.querySelectorAll(LEFT_OUT)) node.remove();
  return copy;
}

/** The page's rules; the one for its root applies to a frame inside the picture. */
function styles() {
  return [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.cssText).join("\n").replaceAll("100vh", `${innerHeight}px`).replace(/^html \{/m, ".page-frame {");
}

/** A promise of the page as a PNG blob. */
export async function pagePicture() {
  const own = getComputedStyle(document.documentElement);
  const [width, height] = [document.documentElement.clientWidth, Math.min(LONGEST, document.body.scrollHeight)];
  const copy = copied();
  const frame = document.createElement("div");
  frame.className = "page-frame";
  frame.style.width = `${width}px`;
  const style = document.createElement("style");
  style.textContent = `${styles()}\n* { scrollbar-width: none; }`;
  frame.append(style, copy);
  const dark = own.colorScheme.includes("dark");
  const root = s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, "data-theme": dark ? "dark" : "light" },
    s("foreignObject", { width, height }, frame));
  const text = new XMLSerializer().serializeToString(root).replace(UNPRINTABLE, "");
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`; // from a blob, Chromium returns no pixels
  await image.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: width * SCALE, height: height * SCALE });
  const context = canvas.getContext("2d");
  context.scale(SCALE, SCALE);
  context.fillStyle = own.getPropertyValue("--paper");
  context.fillRect(0, 0, width, height);
  context.drawImage(image, 0, 0);
  return new Promise((resolve, reject) => canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("no picture"))), "image/png"));
}
