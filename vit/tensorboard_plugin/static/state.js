// The state of the tab, and its form in the address.

import { readHeads, readPatches } from "./edits.js";

export const VIEWS = { heads: "Heads", maps: "Maps", lens: "Predictions", features: "Features" };
export const DIRECTIONS = {
  to: "where it attends",
  from: "who attends to it",
  offset: "attention by offset",
};
export const STATISTICS = {
  entropy: "entropy",
  distance: "distance",
  sink: "sink",
  importance: "importance",
};
export const ORDERS = { layer: "by layer", lowest: "lowest first", highest: "highest first" };
export const CONTRASTS = { even: "fixed unless even", fixed: "fixed", auto: "automatic" };
export const FUSED = ["mean", "max", "rollout"]; // instead of a head

const oneOf = (options) => (text) => (text in options ? text : undefined);
const anyText = (text) => text || undefined;
const count = (text) => (/^\d{1,15}$/.test(text) ? Number(text) : undefined);
const headOrFused = (text) => (FUSED.includes(text) ? text : count(text));

// Each parameter: its initial value and how to read it from text; undefined is not understood.
const PARAMETERS = {
  run: ["", anyText],
  image: ["", anyText],
  step: [null, count], // null: the newest
  run2: ["", anyText], // empty: nothing to compare with
  image2: ["", anyText], // empty: the same as in the first pane
  step2: [null, count],
  linked: ["yes", oneOf({ yes: 1, no: 1 })], // whether both panes' steps move together
  token: ["", anyText], // the pinned one, see `tokenName`; empty: none
  direction: ["to", oneOf(DIRECTIONS)],
  layer: [null, count], // null: the last
  head: ["rollout", headOrFused],
  view: ["heads", oneOf(VIEWS)],
  statistic: ["entropy", oneOf(STATISTICS)],
  order: ["layer", oneOf(ORDERS)],
  map: ["", anyText], // kind of map that is shown large; empty: the first
  target: [null, count], // class that the maps explain; null: the first
  feature: ["components", oneOf({ components: 1, similarity: 1 })], // what the large picture shows of features
  second: ["", anyText], // lends its patches and features; empty: the next in the list
  contrast: ["even", oneOf(CONTRASTS)],
  heat: ["yes", oneOf({ yes: 1, no: 1 })],
  mute: ["", readHeads],
  patches: ["", readPatches],
  tour: [null, count], // its step, from 1
  language: ["", anyText], // of the tour; empty: the browser's
};

/** Return the state that parameters in the address describe, with defaults for all others. */
export function parseState(parameters) {
  return Object.fromEntries(
    Object.entries(PARAMETERS).map(([name, [initial, read]]) => [
      name,
      (name in parameters ? read(parameters[name]) : undefined) ?? initial,
    ]),
  );
}

/** Return the parameters that describe a state: everything that is not at its default. */
export function stateParameters(state) {
  return Object.fromEntries(
    Object.entries(PARAMETERS)
      .filter(([name, [initial]]) => state[name] !== initial)
      .map(([name]) => [name, String(state[name])]),
  );
}
