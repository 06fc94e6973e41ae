// The colour bar: the scale that all heat maps share, and the value under the pointer on it.

import { barPixels, SCALE } from "./colours.js";
import { make, write } from "./dom.js";
import { digits, range } from "./maths.js";

export class ColourBar {
  constructor() {
    const gradient = make("canvas", { width: 256, height: 1 });
    const pixels = new ImageData(256, 1);
    new Uint32Array(pixels.data.buffer).set(barPixels());
    gradient.getContext("2d").putImageData(pixels, 0, 0);
    this.marker = make("i", { class: "marker" });
    this.beyond = make("span", { class: "beyond" });
    this.element = make(
      "div",
      { class: "scale", "aria-hidden": "true" },
      this.marker,
      gradient,
      ...range(SCALE + 1).map((tick) =>
        make("span", { class: "tick", style: `left: ${(100 * tick) / SCALE}%` }, String(tick)),
      ),
      make("span", { class: "unit" }, "× uniform"),
      this.beyond,
    );
  }

  /** Mark a value, or none, and say if the largest is beyond the end of the scale. */
  paint({ marked, largest }, visible) {
    this.element.style.visibility = visible ? "" : "hidden";
    this.marker.style.visibility = marked === null ? "hidden" : "inherit";
    if (marked !== null) this.marker.style.left = `${(100 * Math.min(marked, SCALE)) / SCALE}%`;
    write(this.beyond, largest > SCALE ? `▸ up to ${digits(largest)}` : "");
  }
}
