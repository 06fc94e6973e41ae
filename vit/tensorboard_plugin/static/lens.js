// Layer-by-layer predictions (logit lens): the class as which every layer's tokens would be read.

import { classColour, classColours, classOverlay, classPixel } from "./colours.js";
import { button, make, write } from "./dom.js";
import { MEAN, percent, range } from "./maths.js";
import { Raster, pointing } from "./raster.js";

const SIDE = 56; // of a layer's map

/** Return the colours of the classes of a record's lens. */
export function lensColours(record) {
  const counts = new Map();
  for (const layer of record.details.lens.classes) {
    for (const [best] of layer) counts.set(best, (counts.get(best) ?? 0) + 1);
  }
  return classColours(counts);
}

/** Return a function from a token to its colour over the picture at a layer. */
export function lensOverlay(record, colours, layer) {
  return (token) => classOverlay(colours, ...lensOf(record, layer, token)[0]);
}

/** Return [class, probability] of a token at a layer, best first; MEAN is what the classifier reads. */
export function lensOf(record, layer, token) {
  const { classes, probabilities } = record.details.lens;
  const at = token === MEAN ? 0 : 1 + token;
  return classes[layer][at].map((index, rank) => [index, probabilities[layer][at][rank]]);
}

export class LensView {
  #rows = [];

  constructor(actions) {
    this.actions = actions;
    this.tokenTitle = make("span");
    const titles = ["", "patches", "what the classifier reads"].map((text) =>
      make("span", {}, text),
    );
    this.titles = make("div", "lens-row titles", ...titles, this.tokenTitle);
    this.list = make("div");
    this.legend = make("div", "legend");
    this.note = make("p", "note");
    const parts = [this.titles, this.list, this.legend, this.note];
    this.element = make("div", "view lens", ...parts);
  }

  layout(record, state) {
    const { lens } = record.details;
    this.titles.hidden = this.legend.hidden = lens === null;
    write(
      this.note,
      lens === null ? "No layer-by-layer predictions were recorded for this image." : "",
    );
    if (this.record !== record) this.#draw(record); // else a row may keep the focus
    this.#rows.forEach(({ label }, layer) =>
      label.setAttribute("aria-pressed", String(layer === state.layer)),
    );
  }

  #draw(record) {
    this.record = record;
    this.#rows = [];
    if (record.details.lens !== null) {
      this.colours = lensColours(record);
      this.#rows = range(record.layers).map((layer) => this.#row(record, layer));
      const named = [...this.colours.keys()].sort((a, b) => a - b);
      this.legend.replaceChildren(
        ...named.map((index) =>
          make("span", {}, this.#swatch(index), make("span", {}, record.className(index))),
        ),
      );
    }
    this.list.replaceChildren(...this.#rows.map((row) => row.element));
  }

  #swatch(index) {
    return make("i", {
      class: "swatch",
      style: `background: rgb(${classColour(this.colours, index).join()})`,
    });
  }

  #row(record, layer) {
    const zoom = Math.max(1, Math.floor(SIDE / Math.max(record.rows, record.columns)));
    const size = { patchWidth: zoom, patchHeight: zoom };
    const map = new Raster(make("canvas", pointing(record, size, this.actions.point)));
    map.resize(record.columns * zoom, record.rows * zoom);
    const first = record.prefix.length;
    const colours = Uint32Array.from(range(record.rows * record.columns), (patch) =>
      classPixel(this.colours, ...lensOf(record, layer, first + patch)[0]),
    );
    const box = [0, 0, record.columns * zoom, record.rows * zoom];
    map.paint([{ colours, box }], record.columns);
    const read = lensOf(record, layer, MEAN);
    const [pooled, own] = range(2).map(() => read.map(() => bar()));
    read.forEach(([index, probability], rank) =>
      fill(pooled[rank], record.className(index), probability),
    );
    const label = button(`layer ${layer}`, () => this.actions.choose(layer));
    const bars = [pooled, own].map((some) => make("div", {}, ...some.map((one) => one.element)));
    const picture = make("div", "lens-map", map.canvas);
    const element = make("div", "lens-row", label, picture, ...bars);
    return { element, label, own };
  }

  /** Write how a token is read in each layer. */
  paint(record, token, name) {
    write(this.tokenTitle, token === MEAN ? "point at a patch" : name);
    this.#rows.forEach(({ own }, layer) => {
      const guesses = token === MEAN ? [] : lensOf(record, layer, token);
      own.forEach((one, rank) => {
        const [index, probability] = guesses[rank] ?? [null, 0];
        fill(one, index === null ? "" : record.className(index), probability);
      });
    });
  }
}

/** Make a line with a bar, a name and a percentage. */
export function bar() {
  const [length, name] = ["i", "span"].map((tag) => make(tag));
  const number = make("span", "number");
  return { element: make("div", "bar", length, name, number), length, name, number };
}

/** Fill in a line; an empty name clears it. */
export function fill({ element, length, name, number }, text, probability) {
  element.title = text;
  length.style.transform = `scaleX(${probability})`;
  write(name, text);
  write(number, text === "" ? "" : percent(probability));
}
