// Layers x heads: a small map of every head for the token in question, and the heads' statistics.

import { make, write } from "./dom.js";
import { digits, middleOf, range, sortedHeads } from "./maths.js";
import { gridOfOffsets } from "./offsets.js";
import { MARK, Raster, crossOut, resize } from "./raster.js";
import { describeImages, valuesOf } from "./scene.js";
import { FUSED, STATISTICS } from "./state.js";

const LINE = 12; // CSS pixels of a line of text below a map
const EDGE = 4; // around a map, for its frame
const [LABEL, GAP] = [30, 4]; // width of "L11", and between maps
const SMALLEST = 34; // width of a map; if the heads do not fit, a layer has several lines
const AT_ONCE = 4; // maps below each other that are visible without scrolling, at least
const STRIP_SIDE = 6; // of a prefix token, at least
const STRIP_GAP = 2; // between the prefix tokens and the patches
const FUSED_GAP = 12; // before mean, max and rollout
const MISSING = {
  importance: "Importance was not measured at this step: training measures it at the last one.",
  change: "After a change, only entropy is computed again.",
  distance: "This model's patches have no distance.",
};

export class HeadsView {
  #cells = [];

  /**
   * `choose` gets the layer and head of a clicked map, `mute` those of a Shift-click, `point` what
   * is under the pointer.
   */
  constructor({ choose, mute, point }) {
    this.maps = new Raster(make("canvas"));
    this.over = make("canvas");
    this.anchor = make("i", "anchor");
    this.stack = make(
      "div",
      {
        class: "stack",
        tabindex: "0",
        role: "application",
        "aria-label": "Maps of all layers and heads. Arrow keys choose one.",
        pointermove: (event) => point(this.#under(event)),
        pointerleave: () => point(null),
        click: (event) => {
          const found = this.#under(event);
          if (!found) return undefined;
          const { layer, head } = found;
          const isMuted = event.shiftKey && !FUSED.includes(head);
          return isMuted ? mute(layer, head) : choose(layer, head);
        },
        keydown: (event) => this.#move(event, choose),
      },
      this.maps.canvas,
      this.over,
      this.anchor,
    );
    this.notes = range(4).map(() => make("p", "note"));
    const notes = this.notes.flatMap((note) => [note, " "]);
    this.element = make("div", "view heads", ...notes, this.stack);
  }

  /** Arrange the maps: those of each layer below each other, or all sorted by a statistic. */
  layout(record, state, width, height) {
    this.byOffset = state.direction === "offset";
    this.record = this.byOffset ? gridOfOffsets(record) : record;
    const { layers, heads, columns } = this.record;
    const prefix = this.record.prefix.length;
    const statistic = state.statistics[state.statistic];
    const inOrder = state.order === "layer" || !statistic;
    const perLayer = heads + FUSED.length;
    this.all = inOrder
      ? range(layers).flatMap((layer) => [...range(heads), ...FUSED].map((head) => [layer, head]))
      : sortedHeads(statistic, state.order === "highest");
    const isLarge = ([layer, head]) => layer === state.layer && head === state.head;
    this.large = this.all.findIndex(isLarge); // -1: none
    const free = width - LABEL - FUSED_GAP;
    const fitting = Math.floor(free / (Math.max(SMALLEST, columns, prefix) + GAP));
    const lines = Math.ceil(perLayer / Math.max(1, fitting)); // of a layer
    const perRow = Math.ceil(perLayer / lines);
    const text = 2 * LINE + EDGE;
    this.#fit(Math.floor(free / perRow) - GAP, height / AT_ONCE - text);
    this.down = inOrder ? perLayer : perRow;
    const [across, along] = [this.cellWidth + GAP, this.cellHeight + text + GAP];
    this.#cells = this.all.map(([layer, head], index) => {
      const at = inOrder ? index % perLayer : index;
      const row = inOrder ? Math.floor(index / perLayer) : 0;
      const line = Math.floor(at / perRow) + row * lines;
      const apart = inOrder && lines === 1 && at >= heads ? FUSED_GAP : 0;
      const left = LABEL + (at % perRow) * across + apart;
      const top = EDGE + line * along;
      const strip = [left, top, Math.round(prefix * this.stripZoom), this.strip - STRIP_GAP];
      const patches = [left, top + this.strip, this.patchesWidth, this.cellHeight - this.strip];
      return { layer, head, left, top, strip, patches };
    });
    const size = [LABEL + FUSED_GAP + perRow * across, this.#cells.at(-1).top + along];
    this.stack.style.width = `${size[0]}px`;
    this.stack.style.height = `${size[1]}px`;
    this.maps.resize(...size);
    this.#drawLabels(resize(this.over, ...size), state, inOrder, statistic);
    this.#describe(state, inOrder);
  }

  /** Set the size of the maps: the largest that fits. */
  #fit(width, height) {
    const { rows, columns, prefix } = this.record;
    const wide = Math.max(columns, prefix.length); // the prefix tokens are a row of their own
    const strips = prefix.length ? 1 : 0;
    const zoom = Math.min(width / wide, height / (rows + strips));
    this.cellWidth = Math.max(wide, Math.floor(wide * zoom));
    this.zoom = this.cellWidth / wide; // CSS pixels to a patch
    this.stripZoom = Math.max(this.zoom, Math.min(STRIP_SIDE, this.cellWidth / prefix.length));
    this.strip = strips * (Math.round(this.stripZoom) + STRIP_GAP);
    this.patchesWidth = Math.round(columns * this.zoom);
    this.cellHeight = this.strip + Math.round(rows * this.zoom);
  }

  #describe(state, inOrder) {
    const { statistic, statistics } = state;
    const means = Object.keys(STATISTICS)
      .filter((name) => statistics[name] !== null)
      .map((name) => {
        const all = statistics[name].flat();
        const mean = all.reduce((sum, value) => sum + value) / all.length;
        return `${name} ${digits(mean)}${name === "distance" ? " px" : ""}`;
      });
    const what = statistic === "importance" ? "importance, from held-out images" : statistic;
    const below =
      statistics[statistic] === null
        ? MISSING[statistic === "importance" || !this.record.change ? statistic : "change"]
        : `Below each map: ${inOrder ? "" : "layer/head, "}${what}.`;
    const rows = inOrder ? "Each row is a layer, each map a head" : "Each map is a head";
    const images = describeImages(state);
    const mean = `Each map: attention by offset from the query (centre), mean of ${images}.`;
    write(this.notes[0], this.byOffset ? mean : `${rows}; bright means more attention.`);
    write(this.notes[1], "Click a map to lay it over the picture; with Shift, to mute it.");
    write(this.notes[2], below);
    write(this.notes[3], means.length ? `Mean over all heads: ${means.join(", ")}.` : "");
  }

  /** Paint every map. `attention` is what `Weights.of` or `byOffset` returns. */
  paint(attention, token, scales) {
    const { record } = this;
    const prefix = record.prefix.length;
    const maps = this.#cells.map((cell) => ({
      ...cell,
      colours: scales.weights.pixelsOf(valuesOf(attention, cell.layer, cell.head)),
    }));
    const part = (box, ...tokens) =>
      maps.map((map) => ({ box: map[box], colours: map.colours.subarray(...tokens) }));
    if (prefix) this.maps.paint(part("strip", 0, prefix), prefix);
    this.maps.paint(part("patches", prefix), record.columns);
    const marked = this.byOffset ? middleOf(record) : token;
    if (marked >= prefix && this.zoom >= 4) this.#markToken(marked - prefix);
  }

  /** Return where a map is drawn, in CSS pixels: left and top of its first patch, and zoom. */
  place(layer, head) {
    const cell = this.#cells.find((one) => one.layer === layer && one.head === head);
    return { left: cell.left, top: cell.top + this.strip, zoom: this.zoom };
  }

  #markToken(patch) {
    const { zoom, maps } = this;
    const at = [patch % this.record.columns, Math.floor(patch / this.record.columns)];
    const [x, y, side] = [...at, 1].map((count) => Math.round(count * zoom));
    maps.context.strokeStyle = MARK;
    maps.context.lineWidth = 1;
    for (const { left, top } of this.#cells)
      maps.context.strokeRect(left + x + 0.5, top + this.strip + y + 0.5, side - 1, side - 1);
  }

  #drawLabels(context, state, inOrder, statistic) {
    const style = getComputedStyle(this.element);
    context.font = `10px ${style.fontFamily}`;
    context.fillStyle = style.getPropertyValue("--quiet");
    context.textAlign = "center";
    for (const { layer, head, left, top } of this.#cells) {
      const middle = left + this.cellWidth / 2;
      const bottom = top + this.cellHeight;
      const name = this.#nameOf(context, inOrder, layer, head);
      const value = statistic && !FUSED.includes(head) ? digits(statistic[layer][head]) : "";
      context.fillText(name, middle, bottom + LINE + 1);
      context.fillText(value, middle, bottom + 2 * LINE + 1);
      if (inOrder && head === 0) {
        context.textAlign = "left";
        context.fillText(`L${layer}`, 2, top + this.cellHeight / 2 + 4);
        context.textAlign = "center";
      }
      if (!FUSED.includes(head) && !this.record.weights.heard[layer].includes(head))
        crossOut(context, [left, top, this.cellWidth, this.cellHeight], 2);
      if (layer === state.layer && head === state.head) {
        context.strokeStyle = style.getPropertyValue("--accent");
        context.lineWidth = 2;
        context.strokeRect(left - 2, top - 2, this.cellWidth + 4, this.cellHeight + 4);
        this.anchor.style.inset = `${top}px auto auto ${left}px`;
        this.anchor.style.height = `${this.cellHeight + 3 * LINE}px`;
      }
    }
  }

  /** Return a map's name; a short one if the long ones do not fit. */
  #nameOf(context, inOrder, layer, head) {
    const long = FUSED.includes(head) ? head : `head ${head}`;
    const { layers, heads } = this.record;
    const longest = `${inOrder ? "" : `layer ${layers - 1} `}head ${heads - 1}`;
    if (context.measureText(longest).width > this.cellWidth)
      return inOrder ? String(head) : `${layer}/${head}`;
    return inOrder ? long : `layer ${layer} ${long}`;
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
    const row = Math.min(Math.floor((y - cell.top - this.strip) / zoom), record.rows - 1);
    const special = Math.floor((x - cell.left) / this.stripZoom);
    let token = null;
    if (row >= 0 && column < record.columns) token = prefix + row * record.columns + column;
    else if (row < 0 && special < prefix) token = special;
    return { layer: cell.layer, head: cell.head, token };
  }

  /** Choose the map that an arrow key leads to. */
  async #move(event, choose) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.down, ArrowDown: this.down }[
      event.key
    ];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.all[Math.max(this.large, 0) + by];
    if (!next) return;
    await choose(...next);
    this.anchor.scrollIntoView({ block: "nearest" });
  }
}
