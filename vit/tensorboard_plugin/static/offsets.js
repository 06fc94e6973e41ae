// Attention by offset: means over all pairs of patches with the same offset, key minus query.

import { fetchRecord } from "./api.js";
import { meanOf, range } from "./maths.js";
import { FUSED } from "./state.js";

// Beyond either, the image that is shown is not averaged with the others: loading takes too long.
const [IMAGES, WEIGHTS] = [24, 2 ** 22];

/** Load the records to average: of all images at a record's step, unless something is changed. */
export async function recordsToAverage(record, { run, images, at }, { view, direction }) {
  const shapeOf = ({ layers, heads, prefix, rows, columns }) =>
    String([layers, heads, prefix.length, rows, columns]);
  const { layers, heads, tokens } = record;
  const tooMany = images.length > IMAGES || images.length * layers * heads * tokens ** 2 > WEIGHTS;
  const isShown = view === "heads" && direction === "offset" && record.weights && !record.change;
  if (tooMany || !isShown) return [record];
  const load = (image) => {
    const own = image.steps.find(({ step }) => step === at.step);
    return own && fetchRecord(run, image, own).catch(() => null);
  };
  const all = await Promise.all(images.map(load));
  return all.filter((one) => one?.weights && shapeOf(one) === shapeOf(record));
}

/** Return the mean over records of `Weights.of` by offset: a number for each place of `placeOf`. */
export function byOffset(records) {
  const [{ layers, heads }] = records;
  const all = records.map((record) => (record.weights.byOffset ??= meansOf(record)));
  const maps = all[0].map((_, index) => meanOf(all.map((one) => one[index])));
  const ofHeads = range(layers).map(() => maps.splice(0, heads));
  const fused = FUSED.map((name) => [name, maps.splice(0, layers)]);
  return { heads: ofHeads, ...Object.fromEntries(fused) };
}

function meansOf({ weights, layers, heads, prefix: { length: prefix }, rows, columns }) {
  const pairs = new Float32Array((2 * rows - 1) * (2 * columns - 1));
  const sums = range(layers * (heads + FUSED.length)).map(() => new Float32Array(pairs.length));
  const patches = range(rows * columns).filter((patch) => !weights.removed.has(prefix + patch));
  for (const key of patches) {
    const found = weights.of(prefix + key, "from");
    const maps = [...found.heads.flat(), ...FUSED.flatMap((name) => found[name])];
    for (const query of patches) {
      const place = placeOf(query, key, { rows, columns });
      pairs[place]++;
      maps.forEach((values, index) => (sums[index][place] += values[prefix + query]));
    }
  }
  return sums.map((sum) => sum.map((value, place) => value / Math.max(1, pairs[place])));
}

/** Return a record with offsets in place of patches; the query is in the middle. */
export function gridOfOffsets(record) {
  return { ...record, prefix: [], rows: 2 * record.rows - 1, columns: 2 * record.columns - 1 };
}

/** Return the place of the offset between two patches among all offsets, row by row. */
export function placeOf(query, key, { rows, columns }) {
  const down = Math.floor(key / columns) - Math.floor(query / columns);
  const right = (key % columns) - (query % columns);
  return (down + rows - 1) * (2 * columns - 1) + right + columns - 1;
}

/** Return the offset at a place in words. */
export function describePlace(place, { rows, columns }) {
  const down = Math.floor(place / (2 * columns - 1)) - rows + 1;
  const right = (place % (2 * columns - 1)) - columns + 1;
  const vertical = down && `${Math.abs(down)} ${down < 0 ? "up" : "down"}`;
  const horizontal = right && `${Math.abs(right)} ${right < 0 ? "left" : "right"}`;
  return [vertical, horizontal].filter(Boolean).join(", ") || "itself";
}
