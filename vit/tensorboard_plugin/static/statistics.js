// Statistics of the heads: of one image, or the mean over all images of a run.

import { fetchDetails } from "./api.js";

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
  const mean = (name) => meanOf(alike.map(({ statistics }) => statistics[name]));
  return {
    entropy: mean("entropy"),
    distance: mean("distance"),
    sink: mean("sink"),
    importance: mean("importance"), // the same in all of them
    images: alike.length,
  };
}

/** Return the mean of statistics (L, H) over images, or null if an image has none. */
function meanOf(tables) {
  if (tables.includes(null)) return null;
  return tables[0].map((row, layer) =>
    row.map((_, head) => tables.reduce((sum, one) => sum + one[layer][head], 0) / tables.length),
  );
}

/**
 * Return the mean attention distance in pixels if every patch attends to all patches alike, or null
 * if patches are not square.
 */
export function uniformDistance({ rows, columns, details }) {
  const [height, width] = details.image_size;
  const side = height / rows;
  if (side !== width / columns) return null;
  let sum = 0;
  for (let down = 1 - rows; down < rows; down++) {
    for (let right = 1 - columns; right < columns; right++) {
      const pairs = (rows - Math.abs(down)) * (columns - Math.abs(right));
      sum += pairs * Math.hypot(down, right);
    }
  }
  return (side * sum) / (rows * columns) ** 2;
}
