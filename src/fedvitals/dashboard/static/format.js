// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them: three significant digits, a unit, a real minus sign, thin spaces in thousands.
// `exact` is the counterpart: every digit that was stored, for tooltips and copies.

export const NONE = "–";
const THIN = "\u202f"; // narrow and non-breaking: «12 345», «4.1 MB»
const MINUS = "\u2212";
const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];
const LEAST = 0.001; // per cent below which only the magnitude matters
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;

/** The text for a value that is no finite number; null if it is one. */
function unusual(value) {
  if (value === null || value === undefined) return NONE;
  if (typeof value === "bigint") return null;
  if (typeof value !== "number") return String(value);
  if (Number.isNaN(value)) return "NaN";
  if (value === Infinity) return "∞";
  if (value === -Infinity) return MINUS + "∞";
  return null;
}

function thousands(digits) {
  return digits.replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
}

function power(exponent) {
  return "10" + [...String(exponent)].map((one) => SUPERSCRIPT[one]).join("");
}

/** Three significant digits; integers under ten million in full, since they are counts. */
export function number(value, digits = 3) {
  const said = unusual(value);
  if (said !== null) return said;
  const size = Math.abs(Number(value));
  const sign = value < 0 ? MINUS : "";
  if (size === 0) return "0";
  if (Number.isInteger(size) && size < 1e7) return sign + thousands(String(size));
  if (size >= 1e6 || size < 1e-3) {
    const [mantissa, exponent] = size.toExponential(digits - 1).split("e");
    const short = String(Number(mantissa));
    return sign + (short === "1" ? "" : short + "×") + power(Number(exponent));
  }
  if (size >= 1000) return sign + thousands(String(Math.round(size)));
  return sign + String(Number(size.toPrecision(digits)));
}

/** Every digit, as it was stored. */
export function exact(value) {
  return unusual(value) ?? String(value).replace("-", MINUS);
}

/** Every digit in the displayed unit: «93.5933148 %» of a share. */
export function exactly(value, unit) {
  if (unit !== "share" || unusual(value) !== null) return exact(value);
  return `${exact(Number((100 * value).toPrecision(12)))}${THIN}%`;
}

function prefixed(size, unit) {
  let step = 0;
  // 999.9 would round to «1000 kB»: take the next prefix there.
  while (step < PREFIXES.length - 1 && Number(size.toPrecision(3)) >= 1000) {
    size /= 1000;
    step += 1;
  }
  return `${Number(size.toPrecision(3))}${THIN}${PREFIXES[step]}${unit}`;
}

export function bytes(value, unit = "B") {
  const said = unusual(value);
  return said ?? (value < 0 ? MINUS : "") + prefixed(Math.abs(value), unit);
}

export function seconds(value) {
  const said = unusual(value);
  if (said !== null) return said;
  const sign = value < 0 ? MINUS : "";
  const size = Math.abs(value);
  if (size === 0) return `0${THIN}s`;
  if (size < 0.9995e-6) return `${sign}${number(size * 1e9)}${THIN}ns`;
  if (size < 0.9995e-3) return `${sign}${number(size * 1e6)}${THIN}µs`;
  if (size < 0.9995) return `${sign}${number(size * 1e3)}${THIN}ms`;
  if (size < 59.95) return `${sign}${number(size)}${THIN}s`;
  const whole = Math.round(size);
  if (whole < HOUR) return sign + pair(whole, MINUTE, "min", 1, "s");
  if (whole < DAY) return sign + pair(Math.round(whole / MINUTE), MINUTE, "h", 1, "min");
  return sign + pair(Math.round(whole / HOUR), 24, "d", 1, "h");
}

function pair(count, big, bigName, small, smallName) {
  const rest = Math.floor((count % big) / small);
  const first = `${thousands(String(Math.floor(count / big)))}${THIN}${bigName}`;
  return rest ? `${first} ${rest}${THIN}${smallName}` : first;
}

/** A share between 0 and 1, as per cent. */
export function percent(value) {
  const said = unusual(value);
  if (said !== null) return said;
  const size = Math.abs(value * 100);
  if (size > 0 && size < LEAST) return `${value < 0 ? "> " + MINUS : "< "}${LEAST}${THIN}%`;
  return `${number(Number((value * 100).toPrecision(3)))}${THIN}%`;
}

/** «1st», «2nd», «11th». */
export function ordinal(count) {
  const teen = count % 100 >= 11 && count % 100 <= 13;
  return `${number(count)}${(!teen && { 1: "st", 2: "nd", 3: "rd" }[count % 10]) || "th"}`;
}

/** A probability in whole per cent, never «100 %», which no statistic can be; as `certainty` in certainty.py. */
export function sure(confidence) {
  const whole = confidence === null ? null : Math.round(confidence * 100) / 100;
  return whole !== null && whole >= 1 ? `> 99${THIN}%` : percent(whole);
}

/** Units of counts: «1 step», «2 steps». */
export const COUNTS = new Set(["steps", "samples", "values", "events", "clients", "rounds", "records"]);

/** A value below a title that already names its unit: «145» below «samples». */
export function underTitle(value, { unit, title }) {
  return COUNTS.has(unit) && title.includes(unit) ? number(value) : withUnit(value, unit);
}

/** A value with its unit from the catalogue. */
export function withUnit(value, unit) {
  if (unusual(value) !== null) return unusual(value);
  switch (unit) {
    case "s":
    case "seconds":
      return seconds(value);
    case "B":
    case "bytes":
      return bytes(value);
    case "bytes/s":
      return bytes(value, "B/s");
    case "percent":
    case "%":
      return percent(value / 100);
    case undefined:
    case null:
    case "":
    case "1":
    case "0/1":
    case "class":
      return number(value);
    case "share":
      return percent(value);
    default:
      return `${number(value)}${THIN}${value === 1 && COUNTS.has(unit) ? unit.slice(0, -1) : unit}`;
  }
}

/** Short form for a column or an axis below a title with the unit: only prefixed units are repeated. */
export function brief(value, unit) {
  return ["bytes", "B", "bytes/s", "seconds", "s", "share"].includes(unit) ? withUnit(value, unit) : number(value);
}

const two = (count) => String(count).padStart(2, "0");

/** A time (seconds since 1970) in the reader's own time zone: «2026-08-01 14:03». */
export function when(epoch) {
  if (unusual(epoch) !== null) return NONE;
  const at = new Date(epoch * 1000);
  if (Number.isNaN(at.getTime())) return NONE;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** How long ago, in one unit: «3 min ago». */
export function ago(epoch, now = Date.now() / 1000) {
  if (unusual(epoch) !== null) return NONE;
  const passed = now - epoch;
  if (passed < 1) return "now";
  if (passed < MINUTE) return `${Math.floor(passed)}${THIN}s ago`;
  if (passed < HOUR) return `${Math.floor(passed / MINUTE)}${THIN}min ago`;
  if (passed < DAY) return `${Math.floor(passed / HOUR)}${THIN}h ago`;
  if (passed < 30 * DAY) return `${Math.floor(passed / DAY)}${THIN}d ago`;
  return when(epoch).slice(0, 10);
}

/** The unit as a word beside a title: none if the number includes it. */
export function unitName(unit) {
  return { 1: "", "0/1": "", share: "", bytes: "", seconds: "" }[unit] ?? unit ?? "";
}
