// SPDX-License-Identifier: Apache-2.0
// The name of a vital sign, the same in every list and over every picture.

/** A sign's name for users; its id if it has none. */
export function signWords(known, name) {
  return known?.title || name;
}

function option(one) {
  return [one.name, signWords(one, one.name)];
}

/** For a chooser: vital signs, then the rest. */
export function signGroups(signs) {
  return [
    ["vital signs", signs.filter((one) => one.vital).map(option)],
    ["everything else", signs.filter((one) => !one.vital).map(option)],
  ].filter(([, options]) => options.length);
}
