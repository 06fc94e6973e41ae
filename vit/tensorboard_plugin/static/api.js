// Requests to the server side, and a cache of what it answered.

import { fetchAsset } from "./assets.js";
import { storedWeights } from "./maths.js";
import { canvasesOf } from "./raster.js";

const KEPT = 48; // records and features; 300 MB of a ViT-B/16 at 224 pixels

/** Ask the server, or the page if it is one file; an error is one line that says what to do. */
async function get(route, parameters, read) {
  const asked = `${route}?${new URLSearchParams(parameters)}`.replace(/\?$/, "");
  let response;
  try {
    response = await fetchAsset(asked);
  } catch {
    throw new Error("TensorBoard does not answer. Is it still running?");
  }
  if (response.ok) return response[read]();
  const answer = await response.json().catch(() => ({}));
  throw new Error(answer.error ?? `TensorBoard answered with HTTP status ${response.status}.`);
}

export const fetchRuns = async () => (await get("runs", {}, "json")).runs;
export const fetchImages = (run) => get("images", { run }, "json");

/** Load the description of a run's model: {spec, steps, note}; spec is null if there is none. */
export const fetchLive = (run) => get("live", { run }, "json");
export const fetchLiveGraph = (run) => get("live_graph", { run }, "arrayBuffer");
export const fetchLiveWeights = (run, step) => get("live_weights", { run, step }, "arrayBuffer");

/** A cache of promises that drops the least recently used. */
export class Cache {
  #promises = new Map(); // oldest first

  constructor(most) {
    this.most = most;
  }

  /** Return the promise of a key, and start to load what is not there; failures are not kept. */
  get(key, load) {
    const promise = this.#promises.get(key) ?? load();
    this.#promises.delete(key);
    this.#promises.set(key, promise);
    promise.catch(() => this.#promises.delete(key));
    const [oldest] = this.#promises.keys();
    if (this.#promises.size > this.most) this.#promises.delete(oldest);
    return promise;
  }

  values() {
    return [...this.#promises.values()];
  }
}

const records = new Cache(KEPT);

/** Load the features under a tag at a step, {data: ArrayBuffer}; see `fetchRecord`. */
export function fetchFeatures(run, tag, at) {
  return records.get(JSON.stringify([run, tag, at.step, at.wall_time]), async () => ({
    data: await get("features", { run, tag, step: at.step }, "arrayBuffer"),
  }));
}

/**
 * Load what is known about an image at a step.
 *
 * @param {string} run
 * @param {{tag: string, has_weights: boolean}} image - As listed by the server.
 * @param {{step: number, wall_time: number}} at - One of its steps; a step may be written again.
 */
export function fetchRecord(run, image, at) {
  const key = JSON.stringify([run, image.tag, at.step, at.wall_time, image.has_weights]);
  return records.get(key, () => load(run, image, at));
}

async function load(run, image, at) {
  const parameters = { run, tag: image.tag, step: at.step };
  const [details, stored] = await Promise.all([
    get("details", parameters, "json"),
    image.has_weights ? get("weights", parameters, "arrayBuffer").catch((error) => error) : null,
  ]);
  const [rows, columns] = details.grid;
  const { layers, heads, prefix } = details;
  const tokens = prefix.length + rows * columns;
  const read = readWeights(stored, { layers, heads, tokens, prefix: prefix.length });
  return {
    run,
    tag: image.tag,
    step: at.step,
    details,
    layers,
    heads,
    prefix,
    rows,
    columns,
    tokens,
    className: (index) => details.classes[index] ?? `class ${index}`,
    ...read,
    ...(await decodeImage(details.image)),
  };
}

/** Return the weights, or null and why they are missing: maps and predictions remain. */
function readWeights(stored, shape) {
  if (stored === null) {
    const missing = "The attention weights of this image were not stored: it has too many tokens.";
    return { weights: null, missing };
  }
  try {
    if (stored instanceof Error) throw stored;
    return { weights: storedWeights(stored, shape), missing: null };
  } catch (error) {
    const reason = error.message.replace(/\.$/, "");
    const missing = `The attention weights of this step cannot be read: ${reason}.`;
    return { weights: null, missing };
  }
}

/** Return an image in colour and in grey: canvases of its own size. */
async function decodeImage(address) {
  const image = new Image();
  image.src = address; // a PNG file within the address, as the server has checked
  await image.decode();
  const { naturalWidth: width, naturalHeight: height } = image;
  const drawing = new OffscreenCanvas(width, height).getContext("2d");
  drawing.drawImage(image, 0, 0);
  return canvasesOf(drawing.getImageData(0, 0, width, height));
}
