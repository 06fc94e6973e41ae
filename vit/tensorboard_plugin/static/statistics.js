// Statistics of the heads: of one image, or the mean over all images of a run.

import { fetchDetails } from "./api.js";
import { range } from "./maths.js";
import { STATISTICS } from "./state.js";

/**
 * Return the statistics to show for a record.
 *
 * @param {object} record
 * @param {object[]} images - All images of the run, as listed by the server.
 * @param {("image"|"run")} over
 * @returns {Promise<{entropy: number[][], distance: ?number[][], sink: number[][],
 *   importance: ?number[][], images: number}>}
 *   Layers times heads, and the number of images. Those that have no record at this step, or that
 *   another model has seen, are left out.
 */
export async function statisticsOf(record, images, over) {
  if (over === "image") return { ...record.details.statistics, images: 1 };
  const there = images
    .map((image) => ({ image, at: image.steps.find((one) => one.step === record.step) }))
    .filter(({ at }) => at !== undefined);
  const all = await Promise.all(
    there.map(({ image, at }) =>
      image.tag === record.tag ? record.details : fetchDetails(record.run, image, at),
    ),
  );
  const alike = all.filter(
    ({ layers, heads }) => layers === record.layers && heads === record.heads,
  );
  const meanOfAll = (name) => meanOf(alike.map(({ statistics }) => statistics[name]));
  const means = Object.keys(STATISTICS).map((name) => [name, meanOfAll(name)]);
  return { ...Object.fromEntries(means), images: alike.length };
}

/**
 * Return entropy, distance and sink of every head, as `vit.explain.statistics` defines them.
 *
 * @param {Weights} weights
 * @param {object} record - For the grid, and the size of the patches.
 */
export function headStatistics(weights, { rows, columns, details }) {
  const { layers, heads, tokens, prefix, removed } = weights;
  const side = patchSide({ rows, columns, details });
  const patches = range(rows * columns).map((patch) => [
    Math.floor(patch / columns),
    patch % columns,
  ]);
  const between = (a, b) => side * Math.hypot(a[0] - b[0], a[1] - b[1]);
  const distances = patches.map((a) => Float64Array.from(patches, (b) => between(a, b)));
  const there = range(tokens).filter((token) => !removed.has(token));
  const count = Math.max(1, there.length);
  const row = new Float64Array(tokens);
  const ofHead = (layer, head) => {
    let [entropy, distance] = [0, 0];
    const received = new Float64Array(tokens);
    for (const query of there) {
      weights.readRow(layer, head, query, row);
      let [far, near] = [0, 0];
      for (let key = 0; key < tokens; key++) {
        if (row[key] > 0) entropy -= row[key] * Math.log(row[key]);
        received[key] += row[key] / count;
        if (query < prefix || key < prefix) continue;
        far += row[key] * distances[query - prefix][key - prefix];
        near += row[key];
      }
      if (near > 0) distance += far / near / weights.patches;
    }
    const most = Math.log(tokens) || 1;
    return { entropy: entropy / count / most, distance, sink: Math.max(...received) };
  };
  const all = range(layers).map((layer) => range(heads).map((head) => ofHead(layer, head)));
  const table = (name) => all.map((layer) => layer.map((one) => one[name]));
  return {
    entropy: table("entropy"),
    distance: side === null ? null : table("distance"),
    sink: table("sink"),
  };
}

/** Return the mean of statistics (L, H) over images, or null if an image has none. */
function meanOf(tables) {
  if (tables.includes(null)) return null;
  return tables[0].map((row, layer) =>
    row.map((_, head) => tables.reduce((sum, one) => sum + one[layer][head], 0) / tables.length),
  );
}

/** Return the side of a patch in pixels, or null if patches are not square. */
function patchSide({ rows, columns, details }) {
  const [height, width] = details.image_size;
  return height / rows === width / columns ? height / rows : null;
}

/**
 * Return the mean attention distance in pixels if every patch attends to all patches alike, or null
 * if patches are not square.
 */
export function uniformDistance({ rows, columns, details }) {
  const side = patchSide({ rows, columns, details });
  if (side === null) return null;
  let sum = 0;
  for (let down = 1 - rows; down < rows; down++) {
    for (let right = 1 - columns; right < columns; right++) {
      const pairs = (rows - Math.abs(down)) * (columns - Math.abs(right));
      sum += pairs * Math.hypot(down, right);
    }
  }
  return (side * sum) / (rows * columns) ** 2;
}
