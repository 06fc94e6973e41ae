// Runs models with ONNX Runtime, in a worker, so that the page never waits. It fetches nothing but
// the runtime's module: the page sends it the rest, one message at a time.
//
// Shapes: L layers, H heads, N tokens (prefix, then patches), P patches, C classes.

const KEPT = 4; // models
const LARGE = 5e6; // weights of a model from which it runs on a GPU, if there is one
const KEPT_BYTES = 2 ** 28; // of weights: three ViT-S/16
const LONGEST = 200; // characters of a reason, which may quote names in the graph

const models = new Map(); // by number, the one used last at the end
let runtime = null;
let hasGpu = false;

const ACTIONS = {
  /** Load the runtime from the address of its module and the bytes of its WebAssembly. */
  async start({ module, wasm, gpu }) {
    runtime = await import(module);
    hasGpu = gpu;
    runtime.env.logLevel = "fatal";
    Object.assign(runtime.env.wasm, { numThreads: 1, wasmBinary: wasm });
  },

  /** Load a model; those used least recently make room for it. */
  async load({ id, graph, weights, dtype, spec }) {
    const floats = widen(weights, dtype, spec.floats);
    if (!floats.every(Number.isFinite)) throw new Error("some of its weights are not numbers");
    let total = floats.byteLength;
    for (const { bytes } of models.values()) total += bytes;
    for (const [oldest, { session, bytes }] of models) {
      if (total <= KEPT_BYTES && models.size < KEPT) break;
      models.delete(oldest);
      await session.release();
      total -= bytes;
    }
    const device = hasGpu && spec.floats >= LARGE ? "WebGPU" : "WebAssembly";
    const session = await runtime.InferenceSession.create(new Uint8Array(graph), {
      executionProviders: device === "WebGPU" ? ["webgpu", "wasm"] : ["wasm"],
      externalData: [{ path: "weights.bin", data: new Uint8Array(floats.buffer) }],
      logSeverityLevel: 4, // fatal
    });
    models.set(id, { session, spec, device, bytes: floats.byteLength });
  },

  /** Classify an image; null where the model is not loaded, or not any more. */
  async run({ id, images, gates, keep }) {
    const model = models.get(id);
    if (!model) return null;
    models.delete(id);
    models.set(id, model);
    const { session, spec, device } = model;
    const { channels, image_size, layers, heads, prefix, classes } = spec;
    const tokens = prefix + keep.length;
    const start = performance.now();
    const found = await session.run({
      images: new runtime.Tensor("float32", images, [1, channels, ...image_size]),
      gates: new runtime.Tensor("float32", gates, [layers, heads]),
      keep: new runtime.Tensor("float32", keep, [1, keep.length]),
    });
    const milliseconds = performance.now() - start;
    const logits = read(found, "logits", [1, classes.length]);
    const weights = read(found, "weights", [1, layers, heads, tokens, tokens]);
    const lens = lensOf(found, [layers, 1 + tokens], classes.length);
    return { logits, probabilities: softmax(logits), weights, lens, milliseconds, device };
  },
};

self.onmessage = async ({ data: { action, ...message } }) => {
  try {
    self.postMessage({ answer: await ACTIONS[action](message) });
  } catch (error) {
    const [line] = String(error?.message ?? error).split("\n", 1);
    const reason = line.replace(/^.*ERROR_MESSAGE: /, "").replace(/\.$/, "");
    const what = action === "run" ? "The model failed" : "The model cannot be loaded";
    self.postMessage({ error: `${what}: ${reason.slice(0, LONGEST)}.` });
  }
};

/** Return weights as float32. */
function widen(weights, dtype, count) {
  const size = dtype === "float16" ? 2 : 4;
  if (weights.byteLength !== count * size)
    throw new Error(`its weights are ${weights.byteLength} bytes, not ${count * size}`);
  return new Float32Array(size === 4 ? weights : new Float16Array(weights));
}

/** Return an output of the graph, checked. */
function read(found, name, shape) {
  const { dims, data } = found[name] ?? {};
  if (String(dims) !== String(shape)) throw new Error(`${name} are (${dims}), not (${shape})`);
  if (!data.every(Number.isFinite)) throw new Error(`some ${name} are not numbers`);
  return data;
}

function softmax(logits) {
  const largest = Math.max(...logits);
  const powers = logits.map((logit) => Math.exp(logit - largest));
  const total = powers.reduce((a, b) => a + b);
  return powers.map((power) => power / total);
}

/** Return the logit lens, or null where there is none: the head cannot read each token alone. */
function lensOf(found, [layers, rows], count) {
  const [, stored, best] = found.lens_classes?.dims ?? [];
  if (stored !== rows) return null;
  const shape = [layers, rows, best];
  const classes = read(found, "lens_classes", shape);
  const probabilities = read(found, "lens_probabilities", shape);
  if (classes.some((index) => index < 0 || index >= count))
    throw new Error("lens_classes has other classes");
  return { classes: nested(classes, shape), probabilities: nested(probabilities, shape) };
}

/** Return flat values as nested arrays. */
function nested(values, [length, ...rest]) {
  if (rest.length === 0) return Array.from(values);
  const size = values.length / length;
  const part = (index) => values.subarray(index * size, (index + 1) * size);
  return Array.from({ length }, (_, index) => nested(part(index), rest));
}
