// Features: patches as colours of their principal components, and how alike they are.
//
// Shapes: L layers, P patches, D token width, K numbers of a patch. See vit/explain/features.py.

import { fetchFeatures, fetchRecord } from "./api.js";
import { pack } from "./colours.js";
import { button, make, shortName, write } from "./dom.js";
import { MEAN, meanOf, range, readCodes } from "./maths.js";
import { MARK, Raster, fitPicture, outline, patchBox, pointing } from "./raster.js";

const SPREAD = 2.5; // standard deviations at the ends of a colour
const [SMALLEST, LARGEST] = [32, 128]; // sides of a map
const [LABEL, GAP] = [60, 12]; // width of the names of layers, and between maps
const NOT_LOGGED =
  "No features of this image were logged. vit-eval RUN maps logs those of a finished run, add_attention with tokens=.";
const OWN =
  "No patches of the same images are shown, so each run has components of its own: do not compare colours.";
const CHANGED = "After a change, features are not computed again; Reset shows the logged ones.";

/** Read numbers, L times K times rows, from what the server sends: 8 bits, then scales. */
function readNumbers({ data }, layers, count, rows) {
  const [codes, scale] = readCodes(data, layers * count, rows, "features");
  const vector = (at) =>
    Array.from(codes.subarray(at * rows, (at + 1) * rows), (code) => code * scale[at]);
  return range(layers).map((layer) => range(count).map((one) => vector(layer * count + one)));
}

export const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
export const columnsOf = (rows) => rows[0].map((_, column) => rows.map((row) => row[column]));
const times = (vector, matrix) => columnsOf(matrix).map((column) => dot(vector, column));

/** Patches of an image at a step: the mean of a frame, plus numbers of its axes. */
export class Features {
  #products = new Map();
  #units = [];
  #colours = [];
  #mapped = null;

  /**
   * Numbers of patches, L times P times K; frames, L times K times D: the mean, then axes; and those
   * of the last step, to which colours refer unless there is a basis of another run.
   */
  constructor(numbers, frames, last, basis = null) {
    Object.assign(this, { numbers, frames, last, basis });
  }

  /** Return the same patches with colours of another run, see `basisOf`; null keeps their own. */
  in(basis) {
    if (basis === null) return this;
    if (this.#mapped?.basis !== basis)
      this.#mapped = new Features(this.numbers, this.frames, this.last, basis);
    return this.#mapped;
  }

  /** Return the products of the vectors of a frame with those of another one, K times K. */
  #productsWith(others, layer) {
    if (!this.#products.has(others)) this.#products.set(others, []);
    return (this.#products.get(others)[layer] ??= this.frames[layer].map((one) =>
      others[layer].map((other) => dot(one, other)),
    ));
  }

  /** Return the patches of a layer in their frame, then the mean of all, with length 1. */
  #unitsOf(layer) {
    const numbers = this.numbers[layer];
    const products = this.#productsWith(this.frames, layer);
    const patches = numbers.map(([, ...others]) => [1, ...others]);
    return [...patches, meanOf(patches)].map((vector, patch) => {
      const rest = numbers[patch]?.[0] ?? 0; // what is left out is orthogonal to all axes
      const length = Math.hypot(Math.sqrt(dot(times(vector, products), vector)), rest) || 1;
      return vector.map((value) => value / length);
    });
  }

  units = (layer) => (this.#units[layer] ??= this.#unitsOf(layer));

  /** Return the cosine of a patch, or of MEAN, with those of an image; null if sizes differ. */
  similarity(layer, patch, other) {
    if (other.frames[layer]?.[0].length !== this.frames[layer][0].length) return null;
    const along = times(this.units(layer).at(patch), this.#productsWith(other.frames, layer));
    const cosines = other.numbers[layer].map((_, one) => dot(along, other.units(layer)[one]));
    if (other === this && patch !== MEAN) cosines[patch] = 1;
    return cosines;
  }

  /**
   * Return three components of a patch on the axes of the last step, from this step's mean; or
   * those that the basis predicts.
   */
  components(layer, patch) {
    const [, ...found] = this.numbers[layer][patch];
    const map = this.basis?.[layer];
    if (map) return times([1, ...found].slice(0, map.length), map);
    if (this.frames === this.last) return found.slice(0, 3);
    const along = times([0, ...found], this.#productsWith(this.last, layer));
    const axes = this.last[layer].slice(1, 4);
    return axes.map((axis, at) => along[1 + at] / (dot(axis, axis) || 1));
  }

  /** Return the colours of the patches of a layer, [red, green, blue] each. */
  colours(layer) {
    const byte = (value) => Math.max(0, Math.min(255, 127.5 + (127.5 / SPREAD) * value));
    const colourOf = ([red = 0, green = 0, blue = 0]) =>
      [red, green, blue].map((value) => Math.round(byte(value)));
    return (this.#colours[layer] ??= this.numbers[layer].map((_, patch) =>
      colourOf(this.components(layer, patch)),
    ));
  }
}

/** Return which of an image's steps is shown, or undefined if it has no features of that step. */
export const shownOf = (image, { at }) =>
  image.features && image.steps.find(({ step }) => step === at.step);

/** Load the patches of an image at the step of a run that is shown: {record, features}, or null. */
export async function patchesOf(image, wanted) {
  const at = shownOf(image, wanted);
  if (!at) return null;
  const { run, images } = wanted;
  const { tag, frames } = image.features;
  const first = images.find(({ features }) => features?.frames === frames); // lends its times
  const record = await fetchRecord(run, { ...image, has_weights: false }, at);
  const { layers, rows, columns } = record;
  const found = await Promise.all([
    fetchFeatures(run, tag, at),
    fetchFeatures(run, frames, shownOf(first, wanted) ?? at),
    fetchFeatures(run, frames, first.steps.at(-1)),
  ]);
  const [own] = found;
  const count = Math.floor(own.data.byteLength / (layers * (rows * columns + 4))); // K
  const widthOf = ({ data }) => Math.floor(data.byteLength / (layers * count)) - 4; // D
  const frameOf = (one) => (one.frame ??= readNumbers(one, layers, count, widthOf(one)));
  const numbersOf = () => readNumbers(own, layers, count, rows * columns).map(columnsOf);
  const [frame, reference] = found.slice(1).map(frameOf);
  if (own.features?.last !== reference) own.features = new Features(numbersOf(), frame, reference);
  return { record, features: own.features };
}

/** Return the cosines of a token with the patches of images, (L, P) each; null where unknown. */
export function similaritiesOf(record, compared, token) {
  const patch = token === MEAN ? MEAN : token - record.prefix.length;
  if (token !== MEAN && patch < 0) return compared.map(() => null);
  return compared.map(({ features }) =>
    range(record.layers).map((layer) => compared[0].features.similarity(layer, patch, features)),
  );
}


/** Return what tells an image from the first one: its run, its step, or its name. */
function titleOf({ run, step, tag, details }, first) {
  if (run !== first.run) return run;
  return step !== first.step ? `step ${step}` : shortName(details.name || tag);
}

/** Layers below each other: components, and similarity with this image and others. */
export class FeaturesView {
  #columns = [];
  #labels = [];
  #key = []; // of what has been drawn

  constructor(actions) {
    this.actions = actions;
    this.note = make("p", "note");
    this.table = make("div", "features");
    this.element = make("div", "view", this.note, this.table);
  }

  /** Arrange a column for components, and one for each image of `state.compared`. */
  layout(record, { compared, layer, run, run2 }, width) {
    this.table.hidden = compared.length === 0;
    if (!compared.length) return write(this.note, record.change ? CHANGED : NOT_LOGGED);
    const others = compared.slice(1).map((one) => titleOf(one.record, record));
    const titles = ["components", "cosine", ...others];
    const side = Math.floor((width - LABEL) / titles.length) - GAP;
    const key = [side, ...titles, ...compared.map(({ features }) => features)];
    if (key.length !== this.#key.length || key.some((one, at) => one !== this.#key[at]))
      this.#draw(record.layers, compared, titles, Math.max(SMALLEST, Math.min(LARGEST, side)));
    this.#key = key; // else a button may keep the focus
    this.#labels.forEach((one, at) => one.setAttribute("aria-pressed", String(at === layer)));
    const text = `Red, green and blue are components 1, 2 and 3 of the last step, ±${SPREAD} standard deviations.`;
    const other = run2 !== run && compared.find(({ record: { run: name } }) => name === run2);
    if (!other) return write(this.note, text);
    const predicted = `Those of ${run2} are predicted by a linear map from its own components, fitted to patches of images that both runs show; what it cannot predict is grey.`;
    return write(this.note, `${text} ${other.features.basis ? predicted : OWN}`);
  }

  #draw(layers, compared, titles, side) {
    this.#columns = [compared[0], ...compared].map((one, index) =>
      this.#column(one, titles[index], index, side),
    );
    this.#labels = range(layers).map((layer) =>
      button(`layer ${layer}`, () => this.actions.choose({ layer })),
    );
    const rows = this.#labels.flatMap((label, layer) => [
      label,
      ...this.#columns.map(({ maps }) => maps[layer]?.canvas ?? make("span")),
    ]);
    this.table.style.gridTemplateColumns = `${LABEL}px repeat(${titles.length}, max-content)`;
    this.table.replaceChildren(make("span"), ...this.#columns.map(({ head }) => head), ...rows);
  }

  #column({ record, features }, title, index, side) {
    const feature = ["components", "similarity"][index]; // others are not shown large
    const size = fitPicture(record, side, side);
    const raster = (listeners = {}) => {
      const map = new Raster(make("canvas", listeners));
      map.resize(size.width, size.height);
      return map;
    };
    const listenersOf = (layer) =>
      feature && {
        ...pointing(record, size, this.actions.point),
        click: () => this.actions.choose({ layer, feature }),
      };
    const maps = features.numbers.map((_, layer) => raster(listenersOf(layer)));
    const picture = raster();
    const name = feature ? button(title, () => this.actions.choose({ feature })) : title;
    const head = make("div", { style: `width: ${side}px`, title }, name, picture.canvas);
    return { record, features, feature, size, head, picture, maps };
  }

  /** Paint all maps, and mark the patch in question, or none. */
  paint(similarities, patch, scale) {
    this.#columns.forEach(({ record, features, feature, size, picture, maps }, index) => {
      const box = [0, 0, size.width, size.height];
      const mark = ({ context }) =>
        feature && patch !== null && outline(context, patchBox(record, size, patch), MARK, 1);
      picture.context.imageSmoothingEnabled = size.width < record.colour.width;
      picture.context.drawImage(record.colour, ...box);
      mark(picture);
      maps.forEach((map, layer) => {
        const values = index > 0 && similarities[index - 1]?.[layer];
        const pixel = (colour) => (index > 0 ? 0 : pack(...colour));
        const colours = values
          ? scale.pixelsOf(values)
          : Uint32Array.from(features.colours(layer), pixel);
        map.context.clearRect(...box);
        map.paint([{ colours, box }], record.columns);
        mark(map);
      });
    });
  }
}
