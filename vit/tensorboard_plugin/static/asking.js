// Asking the live model of a step what it says of a changed image, or without some of its heads.

import { Cache, fetchLive, fetchLiveGraph, fetchLiveWeights } from "./api.js";
import { changedPatches, changedPixels, mutedHeads } from "./edits.js";
import { LiveModel, aborted } from "./live.js";
import { Weights, bestOf, range, readRollout } from "./maths.js";
import { prepare } from "./photo.js";
import { canvasesOf } from "./raster.js";

const KEPT = 4; // models, and answers without changes
const TOP = 5; // classes
const ALONE = ["out", "mean", "blur"]; // fills that need no other image

const nameOf = ({ name, size, lastModified }) => [name, size, lastModified];
const shapeOf = ({ layers, heads, grid }, prefix) => String([layers, heads, grid, prefix]);

const lives = new Cache(KEPT);
const models = new Cache(KEPT);
const answers = new Cache(KEPT);
const photos = new Cache(KEPT); // as models take them
let loading = new AbortController(); // ends the waiting for models

/** Ask which steps of a run are live; `news` changes when the run has something new. */
export function liveOf(run, news) {
  return lives.get(JSON.stringify([run, news]), () => fetchLive(run));
}

/** Return the model of a step; it is loaded once. */
function modelAt(run, { spec, steps }, step) {
  const at = steps.find((one) => one.step === step);
  if (!at) throw new Error(`Step ${step} of ${run} is not live.`);
  const load = async () => {
    const [graph, weights] = await Promise.all([fetchLiveGraph(run), fetchLiveWeights(run, step)]);
    return LiveModel.create({ graph, weights, dtype: at.dtype, spec });
  };
  const key = JSON.stringify([run, step, at.wall_time]);
  return models.get(key, load);
}

/** End what the models are doing, and what waits for one. */
export function cancelAll() {
  loading.abort(aborted());
  loading = new AbortController();
  for (const one of models.values())
    one.then(
      (model) => model.cancel(),
      () => {},
    );
}

/** Wait for a promise, until everything is cancelled. */
function orCancelled(promise) {
  const { signal } = loading;
  let cancel;
  const cancelled = new Promise((_, reject) => {
    cancel = () => reject(signal.reason);
    signal.addEventListener("abort", cancel);
  });
  // A listener that stayed would keep the model, with its weights.
  return Promise.race([promise, cancelled]).finally(() =>
    signal.removeEventListener("abort", cancel),
  );
}

/** Return the pixels of a record's image, or of a photo, as the model of a step takes them. */
async function pixelsOf(record, spec, photo = null) {
  if (photo)
    return photos.get(JSON.stringify([...nameOf(photo), spec]), () => prepare(photo, spec));
  const { colour } = record;
  return colour.getContext("2d").getImageData(0, 0, colour.width, colour.height);
}

/**
 * Return a record of what the model says after a change; its `change` has the question, and what
 * was before and is now.
 *
 * @param {{live: object, mute: string, patches: string, photo: ?File, other: ?object}} question -
 *   `live` is that of `liveOf`, `other` the record that lends its patches.
 * @param {string} slot - Who asks; a newer question of the same one replaces a waiting one.
 */
export async function ask(record, question, slot) {
  const { live, mute, patches, photo, other } = question;
  const { spec } = live;
  const heads = mutedHeads(mute, record);
  const changed = changedPatches(patches, record);
  const isChanged = heads.length > 0 || changed.size > 0;
  if (!isChanged && !photo)
    throw new Error("Nothing is changed here, because this model has no such head or patch.");
  if (shapeOf(spec, spec.prefix) !== shapeOf(record.details, record.prefix.length))
    throw new Error("The stored model is not that of the image.");
  const model = await orCancelled(modelAt(record.run, live, record.step));
  const image = await pixelsOf(record, spec, photo);
  const name = photo ? nameOf(photo) : record.tag;
  const key = JSON.stringify([record.run, record.step, live.steps, name]);
  const before = await answers.get(key, () =>
    model.classify(image.data, { slot: `${slot} before` }),
  );
  const hide = [...changed].filter(([, fill]) => fill === "out").map(([patch]) => patch);
  const lender = other && (await pixelsOf(other, spec));
  const pixels = changedPixels(image, changed, spec, lender?.width === image.width ? lender : null);
  const after = isChanged ? await model.classify(pixels.data, { mute: heads, hide, slot }) : before;
  const change = { ...question, before, after, isChanged };
  return { ...recordOf(record, pixels, hide, heads, after, photo), change };
}

/** Return a record of an answer. */
function recordOf(record, pixels, hide, muted, after, photo) {
  const removed = new Set(hide.map((patch) => record.prefix.length + patch));
  const { layers, heads, tokens, prefix, details } = record;
  const shape = { layers, heads, tokens, prefix: prefix.length };
  const ones = new Float32Array(layers * heads * tokens).fill(1);
  const values = without(after.weights, removed, tokens);
  const weights = new Weights(values, ones, shape, removed, muted);
  return {
    ...record,
    ...canvasesOf(pixels),
    weights,
    missing: null,
    details: {
      ...details,
      ...(photo ? { image: `photo ${photo.name}`, name: photo.name, label: null } : {}),
      top: bestOf(after.logits, TOP).map((index) => [index, after.probabilities[index]]),
      lens: after.lens,
      maps: rolloutOf(record, weights),
      statistics: {
        ...details.statistics,
        entropy: entropiesOf(values, shape, removed.size),
        distance: null,
        sink: null,
      },
    },
  };
}

/** Return the entropy of each head's attention, L times (H,), as in vit/explain/statistics.py. */
function entropiesOf(weights, { layers, heads, tokens }, removed) {
  const left = Math.max(1, tokens - removed);
  const largest = Math.log(left) || 1;
  // Of the fractions of a row's sum, as rows of some attention do not sum to 1, or have negative weights.
  const entropyOfRow = (row) => {
    const sum = row.reduce((sum, weight) => sum + Math.max(0, weight), 0);
    return row.reduce((entropy, weight) => {
      return entropy - (weight > 0 ? (weight / sum) * Math.log(weight / sum) : 0);
    }, 0);
  };
  const entropyOf = (matrix) => {
    const rows = range(tokens).map((row) => (matrix * tokens + row) * tokens);
    const entropies = rows.map((at) => entropyOfRow(weights.subarray(at, at + tokens)));
    return entropies.reduce((sum, one) => sum + one, 0) / left / largest;
  };
  return range(layers).map((layer) => range(heads).map((head) => entropyOf(layer * heads + head)));
}

/** Return weights with the rows of removed tokens, which mean nothing, at 0. */
function without(weights, removed, tokens) {
  for (let row = 0; removed.size && row < weights.length / tokens; row++)
    if (removed.has(row % tokens)) weights.fill(0, row * tokens, (row + 1) * tokens);
  return weights;
}

/** Return attention rollout as a map; the other kinds need gradients. */
function rolloutOf(record, weights) {
  const { details } = record;
  const logged = details.maps.find((map) => map.kind === "rollout");
  if (details.readout === null || !logged) return [];
  const values = [...readRollout(record, weights)];
  return [{ ...logged, title: "attention rollout", values }]; // without options of the logged one
}

/**
 * Classify an image with a live model, for scripts.
 *
 * @param {?ArrayLike<number>} pixels - RGBA of the model's size; null is the image that is shown.
 * @param {object} options - `step`, by default the one that is shown; `mute`, heads as
 *   [layer, head]; `hide`, patches, and how: `fill` is one of ALONE.
 * @returns {Promise<object>} See `LiveModel.classify`.
 */
export async function classify(app, pixels = null, options = {}) {
  const { step = app.panes[0].chosenStep(), mute = [], hide = [], ...others } = options;
  const { fill = "out", ...unknown } = others;
  const [name] = Object.keys(unknown);
  if (name) throw new Error(`There is no option ${name}; those are step, mute, hide and fill.`);
  if (!ALONE.includes(fill)) throw new Error(`fill must be one of ${ALONE.join(", ")}.`);
  if (!mute.every(Array.isArray)) throw new Error("mute must be a list of [layer, head].");
  const { run } = app.state;
  const live = await liveOf(run, app.newsOf(run));
  const model = await modelAt(run, live, step);
  const [height, width] = live.spec.image_size;
  const image = pixels
    ? new ImageData(Uint8ClampedArray.from(pixels), width, height)
    : await pixelsOf(app.panes[0].logged, live.spec, app.photo);
  const changed = changedPixels(
    image,
    new Map(hide.map((patch) => [patch, fill])),
    live.spec,
    null,
  );
  return model.classify(changed.data, { mute, hide: fill === "out" ? hide : [] });
}
