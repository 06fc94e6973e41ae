// One basis for two runs: the components of the first one, predicted from those of the second one.

import { Cache } from "./api.js";
import { columnsOf, dot, patchesOf, shownOf } from "./features.js";

const IMAGES = 8; // to which a basis is fitted, at most
const PATCHES = 8; // for each component that is used, at least; with fewer, noise could be predicted
const RIDGE = 1e-6; // for components that do not vary

const bases = new Cache(8);

/**
 * Return the linear map of each layer, (1 + K) times 3, that best predicts the components of the
 * first run's patches from those of the second one, in the steps and images that both show. Layers
 * that the first run lacks predict its last. Null if the runs share no patches.
 */
export function basisOf(first, second) {
  const imageOf = (run, pixels) =>
    run.images.find((one) => one.image === pixels && shownOf(one, run));
  const pairs = first.images
    .map(({ image }) => [first, second].map((run) => ({ run, image: imageOf(run, image) })))
    .filter((pair) => pair.every(({ image }) => image))
    .slice(0, IMAGES);
  const load = (pair) => Promise.all(pair.map(({ run, image }) => patchesOf(image, run)));
  const parts = pairs
    .flat()
    .map(({ run, image }) => [run.run, image.tag, shownOf(image, run), image.steps.at(-1)]);
  return bases.get(JSON.stringify(parts), async () => fit(await Promise.all(pairs.map(load))));
}

function fit(pairs) {
  const grids = pairs.map((pair) => pair.map(({ record }) => [record.rows, record.columns].join()));
  const shared = pairs.filter((_, at) => grids[at][0] === grids[at][1]);
  if (!shared.length) return null;
  return shared[0][1].features.numbers.map((_, layer) => {
    const patches = shared.flatMap(([{ features: to }, { features: from }]) =>
      from.numbers[layer].map(([, ...found], patch) => ({
        given: [1, ...found],
        wanted: to.components(Math.min(layer, to.numbers.length - 1), patch),
      })),
    );
    const used = 1 + Math.floor(patches.length / PATCHES);
    const given = columnsOf(patches.map((patch) => patch.given)).slice(0, used);
    const wanted = columnsOf(patches.map((patch) => patch.wanted));
    return solve(
      given.map((one, row) => {
        const products = [...given, ...wanted].map((other) => dot(one, other));
        products[row] += RIDGE * patches.length;
        return products;
      }),
    );
  });
}

/** Solve A X = B, where A is symmetric and positive definite, from rows of both side by side. */
function solve(rows) {
  rows.forEach((pivot, at) =>
    rows.forEach((row, other) => {
      const factor = row[at] / pivot[at];
      if (other !== at) pivot.forEach((value, column) => (row[column] -= factor * value));
    }),
  );
  return rows.map((row, at) => row.slice(rows.length).map((value) => value / row[at]));
}
