// Kinds of map of the whole image, side by side.

import { button, make, write } from "./dom.js";
import { MARK, drawOverlay, fitPicture, outline, patchBox, pointing, resize } from "./raster.js";

const SIDE = 176; // of the largest picture
const AGAIN = "After a change, rollout is computed again; the other maps need gradients.";

/** Return the classes for which there are maps. */
export function targetsOf(record) {
  return [
    ...new Set(record.details.maps.map((map) => map.target).filter((target) => target !== null)),
  ];
}

/** Return the class that the maps explain: as asked for, or the predicted one, or the first. */
export function targetOf(record, target) {
  const targets = targetsOf(record);
  const predicted = record.details.top[0]?.[0];
  return [target, predicted].find((one) => targets.includes(one)) ?? targets[0];
}

/** Return the maps to show: those without a class, and those of one class. */
export function mapsOf(record, target) {
  const chosen = targetOf(record, target);
  return record.details.maps.filter((map) => map.target === null || map.target === chosen);
}

/** Return the map that is shown large, or null. */
export function chosenMap(record, state) {
  const maps = mapsOf(record, state.target);
  return maps.find((map) => map.kind === state.map) ?? maps[0] ?? null;
}

/** Say which class a map explains. */
export function aboutClass(record, map) {
  return map.target === null ? "class-agnostic" : `for ${record.className(map.target)}`;
}

/** Return the scale of a map among those of `scalesOf`. */
export function scaleOf(map, scales) {
  return map.signed ? scales.signedMaps : scales.maps;
}

export class MapsView {
  #cards = [];
  #drawn = [];

  constructor(actions) {
    this.actions = actions;
    this.list = make("div", "cards");
    this.note = make("p", "note");
    this.element = make("div", "view", this.list, this.note);
  }

  layout(record, state, width) {
    const maps = mapsOf(record, state.target);
    const side = Math.min(SIDE, Math.floor(width / 2) - 24);
    const drawn = [record, side, targetOf(record, state.target)];
    // Not drawn again without need, so that a card keeps the focus.
    if (drawn.some((one, at) => one !== this.#drawn[at])) this.#draw(record, maps, side);
    this.#drawn = drawn;
    const chosen = chosenMap(record, state);
    for (const { element, map } of this.#cards)
      element.setAttribute("aria-pressed", String(map === chosen));
    const partly = record.change ? AGAIN : "";
    write(this.note, maps.length ? partly : "No maps of the whole image were recorded.");
  }

  #draw(record, maps, side) {
    this.size = fitPicture(record, side, side);
    this.#cards = maps.map((map) => this.#card(record, map));
    this.list.replaceChildren(...this.#cards.map((card) => card.element));
  }

  #card(record, map) {
    const canvas = make("canvas", pointing(record, this.size, this.actions.point));
    const context = resize(canvas, this.size.width, this.size.height);
    const value = make("span", "value");
    const contents = [
      canvas,
      make("strong", {}, map.title),
      make("span", "quiet", aboutClass(record, map)),
      value,
    ];
    const element = button(contents, () => this.actions.choose(map.kind), { class: "card" });
    return { element, context, value, map };
  }

  /** Paint all maps, mark a patch in them, or none, and write its value. */
  paint(record, patch, scales) {
    for (const card of this.#cards) {
      const { context, value, map } = card;
      const scale = scaleOf(map, scales);
      if (card.key !== scale.key) {
        drawOverlay(context, record, this.size, (one) => scale.overlay(map.values[one]));
        card.plain = context.getImageData(0, 0, context.canvas.width, context.canvas.height);
        card.key = scale.key;
      }
      context.putImageData(card.plain, 0, 0);
      if (patch !== null) outline(context, patchBox(record, this.size, patch), MARK, 2);
      write(value, patch === null ? " " : `here ${scale.write(map.values[patch])}`);
    }
  }
}
