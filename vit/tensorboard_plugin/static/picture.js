// The large picture: patch grid, heat map, and the patches that are pointed at.

import { make } from "./dom.js";
import {
  CHANGED,
  MARK,
  crossOut,
  drawOverlay,
  fitPicture,
  outline,
  patchAt,
  patchBox,
  resize,
} from "./raster.js";

export class Picture {
  /**
   * Call `point` with the patch under the pointer, or null; `press` with each patch of a stroke, and
   * whether the stroke began before it; `release` with the last one.
   */
  constructor({ point, press, release }) {
    this.canvas = make("canvas", {
      class: "picture",
      tabindex: "0",
      role: "application",
      "aria-label": "Picture with its patches. Arrow keys move the patch, Escape releases it.",
      pointermove: (event) => {
        point(this.patchAt(event));
        if (this.stroke === null) return;
        // Pages without HTTPS have none.
        for (const one of event.getCoalescedEvents?.() ?? [event])
          this.#draw(this.patchAt(one), press);
      },
      pointerleave: () => point(null),
      pointerdown: (event) => {
        if (event.button !== 0) return;
        this.canvas.setPointerCapture(event.pointerId); // so that a stroke can end outside
        this.#press(this.patchAt(event), press, false);
      },
      pointerup: (event) => {
        if (this.stroke !== null) release(this.patchAt(event));
        this.stroke = null;
      },
      pointercancel: () => (this.stroke = null),
    });
  }

  stroke = null; // the patch that the pressed pointer reached last

  /** Press the patches on the way from the last one, which a fast pointer skips. */
  #draw(patch, press) {
    if (patch === null) return;
    const { columns } = this.record;
    const from = [Math.floor(this.stroke / columns), this.stroke % columns];
    const by = [Math.floor(patch / columns) - from[0], (patch % columns) - from[1]];
    const count = Math.max(...by.map(Math.abs));
    for (let at = 1; at <= count; at++) {
      const [row, column] = from.map((start, axis) => Math.round(start + (by[axis] * at) / count));
      this.#press(row * columns + column, press, true);
    }
  }

  #press(patch, press, along) {
    if (patch === null || patch === this.stroke) return;
    this.stroke = patch;
    press(patch, along);
  }

  layout(record, boxWidth, boxHeight) {
    this.record = record;
    this.size = fitPicture(record, boxWidth, boxHeight);
    this.context = resize(this.canvas, this.size.width, this.size.height);
  }

  /** Return the patch under the pointer, or null. */
  patchAt(event) {
    return this.size ? patchAt(this.record, this.size, event) : null;
  }

  /** Paint colours, if any, and outline the patches that are pointed at or changed. */
  paint(record, { colourOf, base }, { patch, pinned, pointer, changed }) {
    this.record = record;
    const { context, size } = this;
    drawOverlay(context, record, size, colourOf, base);
    this.#drawGrid();
    for (const [one, fill] of changed)
      this.#markChanged(patchBox(record, size, one), fill === "out");
    if (pointer !== null && pointer !== patch)
      outline(context, patchBox(record, size, pointer), "#fff", 1);
    if (patch !== null) outline(context, patchBox(record, size, patch), MARK, pinned ? 3 : 2);
  }

  /** Mark a patch that is changed; one that is out of attention keeps its pixels and is crossed. */
  #markChanged([left, top, width, height], isOut) {
    const { context } = this;
    context.strokeStyle = CHANGED;
    context.lineWidth = 1.5;
    context.beginPath();
    context.rect(left + 1.5, top + 1.5, width - 2, height - 2);
    context.stroke();
    if (isOut) crossOut(context, [left + 2, top + 2, width - 3, height - 3], 1.5);
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
