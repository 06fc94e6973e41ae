// Attention as numbers; no drawing. Shapes: L layers, H heads, N tokens (prefix, then patches).
//
// All values are in units of uniform attention: a weight times N.

export const MEAN = -1; // instead of a token: the mean over all patches

/** Read weights as the server sends them: codes, a scale for each row, and a byte if they are int8. */
export function storedWeights(buffer, shape) {
  const { layers, heads, tokens } = shape;
  return new Weights(...readCodes(buffer, layers * heads * tokens, tokens, "weights"), shape);
}

/** Read rows of 8-bit numbers, and the scale of each row, from what the server sends. */
export function readCodes(buffer, rows, columns, what) {
  const size = rows * columns;
  const signed = buffer.byteLength === size + 4 * rows + 1;
  if (!(columns >= 1 && (signed || buffer.byteLength === size + 4 * rows)))
    throw new Error(`The ${what} have another size than the image's details say.`);
  const codes = new (signed ? Int8Array : Uint8Array)(buffer, 0, size);
  const floats = buffer.slice(size, size + 4 * rows); // a copy, because floats must be aligned
  return [codes, new Float32Array(floats)];
}

/** Attention weights: numbers, L*H*N*N, of any sign and sum, times a scale for each row, L*H*N. */
export class Weights {
  #means = [];
  #meanOfPatches = {};

  /** Tokens that are removed have rows and columns of 0; fusions leave out muted heads. */
  constructor(codes, scale, { layers, heads, tokens, prefix }, removed = new Set(), muted = []) {
    Object.assign(this, { codes, scale, layers, heads, tokens, prefix, removed });
    const isMuted = (layer, head) => muted.some((one) => one[0] === layer && one[1] === head);
    /** The heads of each layer that are not muted. */
    this.heard = range(layers).map((layer) => range(heads).filter((head) => !isMuted(layer, head)));
    this.signed = !(codes instanceof Uint8Array) && codes.some((code) => code < 0);
    this.patches = Math.max(1, tokens - prefix - removed.size);
  }

  /** Return what a token attends to in a head ("to"), or what attends to it ("from"), (N,). */
  ofHead(layer, head, token, direction) {
    if (token === MEAN) return this.#ofPatches(layer, head, direction);
    const n = this.tokens;
    const matrix = layer * this.heads + head;
    const codes = this.codes.subarray(matrix * n * n, (matrix + 1) * n * n);
    const scale = this.scale.subarray(matrix * n, (matrix + 1) * n);
    const values = new Float32Array(n);
    if (direction === "to") {
      const unit = scale[token] * n;
      for (let key = 0; key < n; key++) values[key] = codes[token * n + key] * unit;
    } else {
      for (let query = 0; query < n; query++)
        values[query] = codes[query * n + token] * scale[query] * n;
    }
    return values;
  }

  /** Return one token's attention in all heads and their fusions: arrays of L (times H) times N. */
  of(token, direction) {
    if (token === MEAN && direction in this.#meanOfPatches) return this.#meanOfPatches[direction];
    const heads = range(this.layers).map((layer) =>
      range(this.heads).map((head) => this.ofHead(layer, head, token, direction)),
    );
    const nothing = new Float32Array(this.tokens);
    const fused = (fuse) =>
      this.heard.map((some, layer) =>
        some.length ? fuse(some.map((head) => heads[layer][head])) : nothing,
      );
    const result = {
      heads,
      mean: fused(meanOf),
      max: fused(maxOf),
      rollout: this.rollouts(token, direction),
    };
    if (token === MEAN) this.#meanOfPatches[direction] = result;
    return result;
  }

  /**
   * Return attention rollout up to each layer, L times (N,): one row or column of the product of
   * 0.5 A + 0.5 I, where A is the mean over heads (arXiv 2005.00928).
   */
  rollouts(token, direction) {
    const start = new Float64Array(this.tokens);
    if (token === MEAN) start.fill(1 / this.patches, this.prefix);
    else start[token] = 1;
    this.removed.forEach((one) => (start[one] = 0));
    const inUnits = (vector) => Float32Array.from(vector, (value) => value * this.tokens);
    if (direction === "from") {
      // A column of M_l ... M_0 is M_l times the column up to the layer before.
      let column = start;
      return range(this.layers).map((layer) => {
        column = halfway(column, matrixTimes(this.meanMatrix(layer), column));
        return inUnits(column);
      });
    }
    return range(this.layers).map((last) => {
      let row = start;
      for (let layer = last; layer >= 0; layer--)
        row = halfway(row, timesMatrix(row, this.meanMatrix(layer)));
      return inUnits(row);
    });
  }

  /**
   * Return the mean over a layer's heads, (N * N,), with rows scaled to sum to 1; negative weights
   * count as zero. Without any head that is not muted, each token attends to itself.
   */
  meanMatrix(layer) {
    if (this.#means[layer]) return this.#means[layer];
    const n = this.tokens;
    const mean = new Float32Array(n * n);
    const heard = this.heard[layer];
    for (const head of heard) {
      const rows = (layer * this.heads + head) * n;
      for (let query = 0; query < n; query++) {
        const scale = this.scale[rows + query] / heard.length;
        const codes = (rows + query) * n;
        for (let key = 0; key < n; key++)
          mean[query * n + key] += Math.max(0, this.codes[codes + key]) * scale;
      }
    }
    for (let query = 0; query < n; query++) {
      const row = mean.subarray(query * n, (query + 1) * n);
      const sum = row.reduce((total, weight) => total + weight, 0);
      row.forEach((weight, key) => (row[key] = sum > 0 ? weight / sum : Number(key === query)));
    }
    return (this.#means[layer] = mean);
  }

  /** Free what is computed again when it is needed. */
  forget() {
    this.#means = [];
  }

  /** Return the mean over all patches of their attention in one head, (N,). */
  #ofPatches(layer, head, direction) {
    const n = this.tokens;
    const rows = (layer * this.heads + head) * n;
    const values = new Float64Array(n);
    const unit = n / this.patches;
    for (let query = 0; query < n; query++) {
      const scale = this.scale[rows + query] * unit;
      for (let key = 0; key < n; key++) {
        const value = this.codes[(rows + query) * n + key] * scale;
        if (direction === "to" && query >= this.prefix) values[key] += value;
        if (direction === "from" && key >= this.prefix) values[query] += value;
      }
    }
    return Float32Array.from(values);
  }
}

/** Return the token that the classifier reads: the first, or MEAN. */
export const readToken = ({ details, prefix }) =>
  details.readout === "class_token" && prefix.length ? 0 : MEAN;

/** Return rollout of what the classifier reads, for each patch. */
export const readRollout = (record, weights = record.weights) =>
  weights.rollouts(readToken(record), "to")[record.layers - 1].slice(record.prefix.length);

/** Return a token's name, the same in all runs: "ROW, COLUMN" of a patch, or of a prefix token. */
export function tokenName(token, { prefix, columns }) {
  if (token === MEAN) return "mean of patches";
  if (token < prefix.length) return prefix[token];
  const patch = token - prefix.length;
  return `${Math.floor(patch / columns)}, ${patch % columns}`;
}

/** Return the token of a name, or null if there is none. */
export function tokenOf(name, { prefix, rows, columns }) {
  if (name === "mean of patches") return MEAN;
  if (prefix.includes(name)) return prefix.indexOf(name);
  const found = /^(\d+), (\d+)$/.exec(name);
  if (!found) return null;
  const [row, column] = [Number(found[1]), Number(found[2])];
  return row < rows && column < columns ? prefix.length + row * columns + column : null;
}

/** Return the token of the patch in the middle. */
export function middleOf({ prefix, rows, columns }) {
  return prefix.length + Math.floor((rows - 1) / 2) * columns + Math.floor((columns - 1) / 2);
}

/** Return all heads, [layer, head] each, sorted by a statistic (L, H). */
export function sortedHeads(statistic, highestFirst) {
  const heads = statistic.flatMap((layer, number) =>
    layer.map((value, head) => [number, head, value]),
  );
  heads.sort((a, b) => (highestFirst ? b[2] - a[2] : a[2] - b[2]));
  return heads.map(([layer, head]) => [layer, head]);
}

/** Return the step closest to another one; the later of two equally close ones. */
export function nearest(steps, step) {
  return steps.reduce((best, one) => (Math.abs(one - step) <= Math.abs(best - step) ? one : best));
}

export function indexOfLargest(values) {
  let best = 0;
  for (let index = 1; index < values.length; index++)
    if (values[index] > values[best]) best = index;
  return best;
}

/** Return the indices of the largest values, the largest first. */
export function bestOf(values, count) {
  return range(values.length)
    .sort((a, b) => values[b] - values[a])
    .slice(0, count);
}

export function endsOf(values) {
  let [smallest, largest] = [Infinity, -Infinity];
  for (let index = 0; index < values.length; index++) {
    if (values[index] < smallest) smallest = values[index];
    if (values[index] > largest) largest = values[index];
  }
  return { smallest, largest };
}

export function range(count) {
  return Array.from({ length: count }, (_, index) => index);
}

/** Write a number with about three digits. */
export function digits(value) {
  const size = Math.abs(value);
  return value.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0).replace("-", "−");
}

export function percent(probability) {
  return `${(100 * probability).toFixed(probability < 0.1 || probability >= 0.995 ? 1 : 0)}%`;
}

export function meanOf(vectors) {
  return vectors[0].map(
    (_, index) => vectors.reduce((sum, one) => sum + one[index], 0) / vectors.length,
  );
}

function maxOf(vectors) {
  return vectors.reduce((most, one) => most.map((value, index) => Math.max(value, one[index])));
}

function halfway(a, b) {
  return a.map((value, index) => 0.5 * (value + b[index]));
}

function matrixTimes(matrix, vector) {
  const n = vector.length;
  return vector.map((_, row) => {
    let sum = 0;
    for (let column = 0; column < n; column++) sum += matrix[row * n + column] * vector[column];
    return sum;
  });
}

function timesMatrix(vector, matrix) {
  const n = vector.length;
  const product = new Float64Array(n);
  for (let row = 0; row < n; row++) {
    const factor = vector[row];
    if (factor === 0) continue;
    for (let column = 0; column < n; column++) product[column] += factor * matrix[row * n + column];
  }
  return product;
}
