// SPDX-License-Identifier: Apache-2.0
// Light or dark: as the system says, until a person says otherwise. Charts hear of it by the event «themechange».

const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem("fedvitals-theme");
  } catch {
    return null; // a browser that keeps nothing
  }
}

export function theme() {
  return document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light");
}

function tell() {
  dispatchEvent(new Event("themechange"));
}

export function changeTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem("fedvitals-theme", next);
  } catch {
    // it lasts as long as the page
  }
  tell();
}

const chosen = stored();
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
system.addEventListener("change", tell);
