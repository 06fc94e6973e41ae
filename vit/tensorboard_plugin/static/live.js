// Models that run in a worker. It does one job at a time, and is ended when a job fails, takes too
// long or is cancelled: the state of the runtime is unknown then. Nothing is loaded before the
// first model.

import { assetOf, fetchAsset, isFile } from "./assets.js";

const LIMIT = 60; // seconds for one job

const waiting = new Map(); // the last request of each slot: {model, job, resolve, reject}
let running = null; // a model
let worker = null;
let count = 0; // of models
let runtime = null; // a promise of what a worker starts with

/** A model in the worker. */
export class LiveModel {
  #id = ++count;
  #source;

  /** Use `create`: this does not load the model. */
  constructor(source) {
    this.#source = source;
  }

  /** Load {graph, weights, dtype, spec}; errors are one sentence. */
  static async create(source) {
    const model = new LiveModel(source);
    await enqueue(model, (ask) => ask("load", { id: model.#id, ...source }));
    return model;
  }

  /**
   * Classify RGBA pixels of spec.image_size. Of the requests in a slot that wait, only the last is
   * answered.
   *
   * @param {{mute?: number[][], hide?: number[], slot?: *}} options - Heads, [layer, head] each;
   *   patches that are taken out of every layer's attention; by default each model has a slot.
   * @returns {Promise<object>} `logits`, `probabilities`, `weights` (L, H, N, N), `lens` with
   *   `classes` and `probabilities` (L, 1 + N, k) or null, `milliseconds` and `device`.
   * @throws {Error} One sentence; an AbortError if the request was replaced or cancelled.
   */
  async classify(pixels, { mute = [], hide = [], slot = this } = {}) {
    const { spec } = this.#source;
    const inputs = { images: normalize(pixels, spec), ...gatesAndKeep(mute, hide, spec) };
    const request = { id: this.#id, ...inputs };
    const job = async (ask) => {
      const answer = await ask("run", request);
      if (answer !== null) return answer;
      await ask("load", { id: this.#id, ...this.#source });
      return ask("run", request);
    };
    return enqueue(this, job, slot);
  }

  /** Reject what waits or runs for this model. */
  cancel() {
    for (const [slot, { model, reject }] of waiting) {
      if (model !== this) continue;
      waiting.delete(slot);
      reject(aborted());
    }
    if (running === this) worker.end(aborted());
  }
}

/** Let a job wait for the worker, in place of the one that waits in the same slot. */
function enqueue(model, job, slot = model) {
  waiting.get(slot)?.reject(aborted());
  return new Promise((resolve, reject) => {
    waiting.set(slot, { model, job, resolve, reject });
    work();
  });
}

async function work() {
  if (running || waiting.size === 0) return;
  const [[slot, { model, job, resolve, reject }]] = waiting;
  waiting.delete(slot);
  running = model;
  worker ??= startWorker();
  const late = new Error(`The model was stopped after ${LIMIT} seconds.`);
  const timer = setTimeout(() => worker.end(late), 1000 * LIMIT);
  try {
    resolve(await worker.perform(job));
  } catch (error) {
    worker.end(error);
    worker = null;
    reject(error);
  }
  clearTimeout(timer);
  running = null;
  work();
}

/** Start a worker; `end` ends it, and what it performs with an error. */
function startWorker() {
  const thread = new Worker(assetOf("live_worker.js"), { type: "module" });
  const ask = (action, message) =>
    new Promise((resolve, reject) => {
      thread.onmessage = ({ data: { answer, error } }) =>
        error === undefined ? resolve(answer) : reject(new Error(error));
      thread.postMessage({ action, ...message });
    });
  const started = fetchRuntime().then((files) => ask("start", files));
  let fail = null;
  // Not Promise.race with a promise of the end, which would keep all answers until then.
  const perform = (job) =>
    new Promise((resolve, reject) => {
      fail = reject;
      started.then(() => job(ask)).then(resolve, reject);
    });
  const end = (error) => {
    thread.terminate();
    fail(error);
  };
  thread.onerror = () => end(new Error("The browser cannot run the live model's worker."));
  return { perform, end };
}

function fetchRuntime() {
  runtime ??= (async () => {
    const gpu = await canUseGpu();
    const response = await fetchAsset(
      `onnxruntime/ort-wasm-simd-threaded${gpu ? ".jspi" : ""}.wasm.gz`,
    );
    if (!response.ok) throw new Error(`HTTP status ${response.status}`);
    const stream = response.body.pipeThrough(new DecompressionStream("gzip"));
    const module = assetOf(`onnxruntime/ort.${gpu ? "jspi" : "wasm"}.bundle.min.mjs`);
    return { module, wasm: await new Response(stream).arrayBuffer(), gpu };
  })().catch((error) => {
    runtime = null; // so that the next model tries again
    throw new Error(`ONNX Runtime cannot be loaded: ${error.message}.`);
  });
  return runtime;
}

/** Tell whether the browser can use a GPU; a page that holds all files has none for it. */
async function canUseGpu() {
  if (isFile() || !navigator.gpu || !WebAssembly.Suspending) return false;
  return Boolean(await navigator.gpu.requestAdapter().catch(() => null));
}

export function aborted() {
  return new DOMException("The request was replaced or cancelled.", "AbortError");
}

/** Return pixels as the model takes them: (C, H, W), with the roundings of vit/data/pixels.py. */
function normalize(pixels, { image_size: [height, width], channels, mean, std }) {
  const { fround } = Math;
  const size = height * width;
  if (pixels.length !== 4 * size)
    throw new Error(`The image has ${pixels.length / 4} pixels, but the model takes ${size}.`);
  return Float32Array.from({ length: channels * size }, (_, index) => {
    const channel = Math.floor(index / size);
    const scale = fround(1 / fround(255 * fround(std[channel])));
    const shift = fround(fround(mean[channel]) / fround(std[channel]));
    return fround(pixels[4 * (index % size) + channel] * scale) - shift;
  });
}

/** Return the inputs that mute heads and hide patches: zeros among ones. */
function gatesAndKeep(mute, hide, { layers, heads, grid: [rows, columns] }) {
  const gates = new Float32Array(layers * heads).fill(1);
  const keep = new Float32Array(rows * columns).fill(1);
  const known = (index, size) => Number.isInteger(index) && index >= 0 && index < size;
  for (const [layer, head] of mute) {
    if (!known(layer, layers) || !known(head, heads))
      throw new Error(`The model has no head ${head} in layer ${layer}.`);
    gates[layer * heads + head] = 0;
  }
  for (const patch of hide) {
    if (!known(patch, keep.length)) throw new Error(`The model has no patch ${patch}.`);
    keep[patch] = 0;
  }
  return { gates, keep };
}
