// SPDX-License-Identifier: Apache-2.0
// A vital sign in the catalogue's words, the same in every list and over every picture.

const LONGEST = 64; // letters in a list

/** A sign in the catalogue's words; where those lean on the line above in the catalogue, its name. */
export function signWords(known, name) {
  if (!known?.meaning || known.meaning.startsWith("The same")) return name;
  return known.meaning.split(/[;:.](?:\s|$)/)[0].replace(/[*`]/g, ""); // the catalogue is written in Markdown
}

function option(one) {
  const words = signWords(one, one.name);
  const short = words.length > LONGEST ? `${words.slice(0, LONGEST - 1)}…` : words;
  return [one.name, words === one.name ? one.name : `${short} (${one.name})`];
}

/** For a chooser: vital signs, then the rest. */
export function signGroups(signs) {
  return [
    ["vital signs", signs.filter((one) => one.vital).map(option)],
    ["everything else", signs.filter((one) => !one.vital).map(option)],
  ].filter(([, options]) => options.length);
}
