// The colour bar: the scale of the heat map that is shown large, and a value marked on it.

import { make, write } from "./dom.js";

export class ColourBar {
  constructor() {
    this.gradient = make("canvas", { width: 256, height: 1 });
    this.marker = make("i", "marker");
    this.ticks = make("div");
    this.unit = make("span");
    this.beyond = make("span", "beyond");
    this.element = make(
      "div",
      { class: "scale", "aria-hidden": "true" },
      this.marker,
      this.gradient,
      this.ticks,
      make("p", "unit", this.unit, " ", this.beyond),
    );
  }

  #draw(scale) {
    this.scale = scale;
    const pixels = new ImageData(256, 1);
    new Uint32Array(pixels.data.buffer).set(scale.palette.pixels);
    this.gradient.getContext("2d").putImageData(pixels, 0, 0);
    this.ticks.replaceChildren(
      ...scale
        .ticks()
        .map(([value, text]) =>
          make("span", { class: "tick", style: `left: ${100 * scale.placeOf(value)}%` }, text),
        ),
    );
  }

  /** Show a scale, mark a value on it, or none, and say if values are beyond its ends. */
  paint({ scale, marked, ends }, visible, shared) {
    if (scale.key !== this.scale?.key) this.#draw(scale);
    write(this.unit, scale.describe() + (shared ? " on both sides" : ""));
    this.element.style.visibility = visible ? "" : "hidden";
    this.marker.style.visibility = marked === null ? "hidden" : "inherit";
    if (marked !== null) this.marker.style.left = `${100 * scale.placeOf(marked)}%`;
    write(this.beyond, scale.beyond(ends));
  }
}
