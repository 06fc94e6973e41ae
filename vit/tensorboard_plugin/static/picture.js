// The large picture: patch grid, heat map, and the patches that are pointed at.

import { make } from "./dom.js";
import { MARK, drawOverlay, fitPicture, outline, patchBox, resize } from "./raster.js";

export class Picture {
  /**
   * @param {{point: function(?number): void, pin: function(number): void}} actions
   *   Called with the patch under the pointer, or null, and with the patch that is clicked.
   */
  constructor({ point, pin }) {
    this.canvas = make("canvas", {
      class: "picture",
      tabindex: "0",
      role: "application",
      "aria-label": "Picture with its patches. Arrow keys move the patch, Escape releases it.",
      pointermove: (event) => point(this.patchAt(event)),
      pointerleave: () => point(null),
      pointerdown: (event) => {
        const patch = this.patchAt(event);
        if (event.button === 0 && patch !== null) pin(patch);
      },
    });
  }

  layout(record, boxWidth, boxHeight) {
    this.record = record;
    this.size = fitPicture(record, boxWidth, boxHeight);
    this.context = resize(this.canvas, this.size.width, this.size.height);
  }

  /** Return the patch under the pointer, or null. */
  patchAt(event) {
    if (!this.size) return null;
    const row = Math.floor(event.offsetY / this.size.patchHeight);
    const column = Math.floor(event.offsetX / this.size.patchWidth);
    const inside =
      row >= 0 && column >= 0 && row < this.record.rows && column < this.record.columns;
    return inside ? row * this.record.columns + column : null;
  }

  /**
   * @param {?function(number): string} colourOf - A patch's colour as CSS, or null.
   * @param {{patch: ?number, pinned: boolean, pointer: ?number}} marks - Patches to outline.
   */
  paint(record, colourOf, { patch, pinned, pointer }) {
    this.record = record;
    const { context, size } = this;
    drawOverlay(context, record, size, colourOf);
    this.#drawGrid();
    if (pointer !== null && pointer !== patch)
      outline(context, patchBox(record, size, pointer), "#fff", 1);
    if (patch !== null) outline(context, patchBox(record, size, patch), MARK, pinned ? 3 : 2);
  }

  #drawGrid() {
    const { context, size, record } = this;
    context.fillStyle = "rgba(160, 160, 160, 0.35)";
    for (let column = 1; column < record.columns; column++) {
      context.fillRect(column * size.patchWidth, 0, 1, size.height);
    }
    for (let row = 1; row < record.rows; row++)
      context.fillRect(0, row * size.patchHeight, size.width, 1);
  }
}
