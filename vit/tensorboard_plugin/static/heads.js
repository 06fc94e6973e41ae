// Layers x heads: a small map of every head for the token in question, and the heads' statistics.

import { UNIFORM } from "./colours.js";
import { make, write } from "./dom.js";
import { digits, range, sortedHeads } from "./maths.js";
import { MARK, Raster, resize } from "./raster.js";
import { FUSED, STATISTICS } from "./state.js";
import { uniformDistance } from "./statistics.js";

const TITLE = 16; // CSS pixels for the names of the columns
const LINE = 12; // of text below a map
const ROOMY = { label: 54, gap: 6 }; // for "layer 11", and between maps
const NARROW = { label: 26, gap: 3 }; // for "L11"
const NARROW_WIDTH = 640;
const LARGEST = 136; // side of a small map
const STRIP_SIDE = 6; // of a prefix token, at least
const STRIP_GAP = 2; // between the prefix tokens and the patches
const FUSED_GAP = 12; // before mean, max and rollout

export class HeadsView {
  #cells = [];

  /**
   * @param {{choose: function(number, (number|string)): void, point: function(?object): void}}
   *   actions - Called with a layer and head that is chosen, and with what is under the pointer.
   */
  constructor({ choose, point }) {
    this.maps = new Raster(make("canvas", { "data-maps": "" }));
    this.over = make("canvas", {});
    this.stack = make(
      "div",
      {
        class: "stack",
        tabindex: "0",
        role: "application",
        "aria-label": "Maps of all layers and heads. Arrow keys choose the one shown large.",
        pointermove: (event) => point(this.#under(event)),
        pointerleave: () => point(null),
        click: (event) => {
          const found = this.#under(event);
          if (found) choose(found.layer, found.head);
        },
        keydown: (event) => this.#move(event, choose),
      },
      this.maps.canvas,
      this.over,
    );
    this.notes = [make("p", { class: "note" }), make("p", { class: "note" })];
    this.element = make("div", { class: "view heads" }, this.stack, ...this.notes);
  }

  /** Arrange the maps: one row for each layer, or all heads sorted by a statistic. */
  layout(record, state, width, height) {
    this.record = record;
    const { layers, heads, rows, columns, prefix } = record;
    const strip = prefix.length; // the prefix tokens are in a row above the patches
    const statistic = state.statistics[state.statistic];
    const inOrder = state.order === "layer" || !statistic;
    const wide = Math.max(columns, prefix.length);
    const perRow = heads + FUSED.length;
    const text = inOrder ? LINE : 2 * LINE;
    this.narrow = width < NARROW_WIDTH;
    const { label, gap } = this.narrow ? NARROW : ROOMY;
    const across = Math.floor(((width - label - FUSED_GAP) / perRow - gap) / wide);
    const above = strip ? STRIP_SIDE + STRIP_GAP : 0;
    const down = Math.floor(((height - TITLE) / layers - text - gap - above) / rows);
    const largest = Math.floor(LARGEST / Math.max(wide, rows));
    this.zoom = Math.max(1, Math.min(across, Math.max(down, 2), Math.max(largest, 2)));
    this.cellWidth = wide * this.zoom;
    this.stripZoom = Math.max(
      this.zoom,
      Math.min(STRIP_SIDE, Math.floor((wide * this.zoom) / strip)),
    );
    this.strip = strip && this.stripZoom + STRIP_GAP;
    this.cellHeight = this.strip + rows * this.zoom;
    const placed = inOrder
      ? range(layers).flatMap((layer) => [...range(heads), ...FUSED].map((head) => [layer, head]))
      : sortedHeads(statistic, state.order === "highest");
    this.columns = perRow;
    this.#cells = placed.map(([layer, head], index) => ({
      layer,
      head,
      left:
        label +
        (index % perRow) * (this.cellWidth + gap) +
        (inOrder && index % perRow >= heads ? FUSED_GAP : 0),
      top: TITLE + Math.floor(index / perRow) * (this.cellHeight + text + gap),
    }));
    const last = this.#cells[this.#cells.length - 1];
    const size = [
      label + FUSED_GAP + perRow * (this.cellWidth + gap),
      last.top + this.cellHeight + text + gap,
    ];
    this.stack.style.width = `${size[0]}px`;
    this.stack.style.height = `${size[1]}px`;
    this.maps.resize(...size);
    this.context = resize(this.over, ...size);
    this.#drawLabels(state, inOrder, statistic);
    this.#describe(state, inOrder);
  }

  #describe({ statistic, statistics }, inOrder) {
    const means = Object.keys(STATISTICS)
      .filter((name) => statistics[name] !== null)
      .map((name) => {
        const all = statistics[name].flat();
        const mean = all.reduce((sum, value) => sum + value) / all.length;
        return `${name} ${digits(mean)}${name === "distance" ? " px" : ""}`;
      });
    const { images } = statistics;
    const what = images > 1 ? `mean ${statistic} over ${images} images` : statistic;
    const uniform = statistic === "distance" ? uniformDistance(this.record) : null;
    const reference = uniform === null ? "" : ` Uniform attention: ${digits(uniform)} px.`;
    const below =
      statistics[statistic] === null
        ? `This model's patches have no ${statistic}.`
        : `Below each map: ${inOrder ? "" : "layer/head, "}${what}.${reference}`;
    write(this.notes[0], below);
    write(this.notes[1], `Mean over all heads: ${means.join(", ")}.`);
  }

  /** Paint every map. `attention` is what `Weights.of` returns. */
  paint(record, attention, token) {
    this.record = record;
    const prefix = record.prefix.length;
    for (const { layer, head, left, top } of this.#cells) {
      const values = FUSED.includes(head) ? attention[head][layer] : attention.heads[layer][head];
      if (prefix)
        this.maps.paint(
          UNIFORM.pixelsOf(values.subarray(0, prefix)),
          prefix,
          left,
          top,
          this.stripZoom,
        );
      this.maps.paint(
        UNIFORM.pixelsOf(values.subarray(prefix)),
        record.columns,
        left,
        top + this.strip,
        this.zoom,
      );
    }
    this.maps.flush();
    if (token >= prefix && this.zoom >= 4) this.#markToken(token - prefix);
  }

  /** Return where a map is drawn, in CSS pixels: left and top of its first patch, and zoom. */
  place(layer, head) {
    const cell = this.#cells.find((one) => one.layer === layer && one.head === head);
    return { left: cell.left, top: cell.top + this.strip, zoom: this.zoom };
  }

  #markToken(patch) {
    const { context } = this.maps;
    context.strokeStyle = MARK;
    context.lineWidth = 1;
    const row = Math.floor(patch / this.record.columns);
    const column = patch % this.record.columns;
    for (const { left, top } of this.#cells) {
      context.strokeRect(
        left + column * this.zoom + 0.5,
        top + this.strip + row * this.zoom + 0.5,
        this.zoom - 1,
        this.zoom - 1,
      );
    }
  }

  #drawLabels(state, inOrder, statistic) {
    const { context, record } = this;
    const style = getComputedStyle(this.element);
    const quiet = style.getPropertyValue("--quiet");
    const accent = style.getPropertyValue("--accent");
    context.font = `10px ${style.fontFamily}`;
    for (const { layer, head, left, top } of this.#cells) {
      const middle = left + this.cellWidth / 2;
      const bottom = top + this.cellHeight;
      context.fillStyle = quiet;
      context.textAlign = "center";
      const lines = [];
      if (!inOrder && statistic)
        lines.push(this.cellWidth < 80 ? `${layer}/${head}` : `layer ${layer} head ${head}`);
      if (statistic && !FUSED.includes(head)) lines.push(digits(statistic[layer][head]));
      lines.forEach((line, number) =>
        context.fillText(line, middle, bottom + (number + 1) * LINE - 2),
      );
      if (inOrder && layer === 0) context.fillText(this.#columnName(head), middle, TITLE - 5);
      if (inOrder && head === 0) {
        context.textAlign = "left";
        context.fillText(
          `${this.narrow ? "L" : "layer "}${layer}`,
          2,
          top + this.cellHeight / 2 + 4,
        );
      }
      if (layer === (state.layer ?? record.layers - 1) && head === state.head) {
        context.strokeStyle = accent;
        context.lineWidth = 2;
        context.strokeRect(left - 2, top - 2, this.cellWidth + 4, this.cellHeight + 4);
      }
    }
  }

  #columnName(head) {
    if (FUSED.includes(head)) return head;
    return this.cellWidth < 44 ? String(head) : `head ${head}`;
  }

  /** Return the map and the token under the pointer, or null. */
  #under(event) {
    const { offsetX: x, offsetY: y } = event;
    const { record, zoom } = this;
    const cell = this.#cells.find(
      ({ left, top }) =>
        x >= left && y >= top && x < left + this.cellWidth && y < top + this.cellHeight,
    );
    if (!cell) return null;
    const prefix = record.prefix.length;
    const column = Math.floor((x - cell.left) / zoom);
    const row = Math.floor((y - cell.top - this.strip) / zoom);
    const special = Math.floor((x - cell.left) / this.stripZoom);
    let token = null;
    if (row >= 0 && column < record.columns) token = prefix + row * record.columns + column;
    else if (row < 0 && special < prefix) token = special;
    return { layer: cell.layer, head: cell.head, token };
  }

  #move(event, choose) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[
      event.key
    ];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.step(by, choose);
  }

  /** Choose another map, `by` places further. */
  step(by, choose) {
    const at = this.#cells.findIndex(
      ({ layer, head }) => layer === this.chosen.layer && head === this.chosen.head,
    );
    const next = this.#cells[Math.max(at, 0) + by];
    if (next) choose(next.layer, next.head);
  }

  /** The map shown large. */
  chosen = { layer: 0, head: 0 };
}
