// SPDX-License-Identifier: Apache-2.0
// The chart kit. Every chart: const chart = kind(host, options); chart.update(data); chart.destroy().
// A row is identified by its name and a column by its round: onCell("c7", 12). In a matrix both are names.

export { Axis, bindAxis } from "./axis.js";
export { bars } from "./bars.js";
export { heatMap } from "./heatmap.js";
export { lineChart } from "./lines.js";
export { matrix } from "./matrix.js";
export { ridgelines } from "./ridgelines.js";
export { scatter } from "./scatter.js";
export { sparkline } from "./sparkline.js";
export { stackChart } from "./stack.js";
export { topologyPicture } from "./topology.js";
export { waterfall } from "./waterfall.js";
