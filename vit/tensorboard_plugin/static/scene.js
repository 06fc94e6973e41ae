// What the large picture, the chips and the lines below it show in each view.

import { heatColour, heatOverlay } from "./colours.js";
import { chosenMap } from "./kinds.js";
import { lensColours, lensOf, lensOverlay } from "./lens.js";
import { MEAN, digits, indexOfLargest, percent, tokenName } from "./maths.js";
import { FUSED } from "./state.js";

/**
 * Return what is shown.
 *
 * @returns {{values: ?ArrayLike<number>, colourOf: ?function(number): string, swatch: function(number): string,
 *   number: function(number): string, lines: string[], marked: ?number, largest: number}}
 *   Values of the heat map; a patch's colour over the picture, a token's colour and value on its
 *   chip; lines of text; the value to mark at the colour bar, and the largest.
 */
export function show(record, scene) {
  return { heads: showHead, maps: showMap, lens: showLens }[scene.state.view](record, scene);
}

/** Return a map of `Weights.of`, (N,). */
export function valuesOf(attention, layer, head) {
  return FUSED.includes(head) ? attention[head][layer] : attention.heads[layer][head];
}

/** Return a token's name within a sentence. */
export function describe(token, record) {
  const name = tokenName(token, record);
  return token >= record.prefix.length ? `patch (${name})` : name;
}

function nameHead(layer, head) {
  return FUSED.includes(head)
    ? `layer ${layer}, ${{ mean: "mean over heads", max: "max over heads", rollout: "rollout up to here" }[head]}`
    : `layer ${layer}, head ${head}`;
}

function showHead(record, { state, token, pointer, probe, attention, values }) {
  if (!values) return nothing(["No attention weights of this image."]);
  const prefix = record.prefix.length;
  const of = probe ?? { layer: state.layer, head: state.head, token: pointer !== token ? pointer : null };
  const looked = valuesOf(attention, of.layer, of.head);
  const best = indexOfLargest(looked);
  const at = of.token ?? best;
  const own = token === MEAN || of.token !== null ? "" : `, itself at ${digits(looked[token])} ×`;
  const verb = state.direction === "to" ? "attends to" : "receives attention from";
  const { entropy, distance, sink } = record.details.statistics;
  const statistics = FUSED.includes(of.head) ? "" : [
    `entropy ${digits(entropy[of.layer][of.head])}`,
    distance ? `distance ${digits(distance[of.layer][of.head])} px` : "",
    `sink ${digits(sink[of.layer][of.head])}`,
  ].filter(Boolean).join(" · ");
  const found = at === MEAN ? "" : `${of.token === null ? "strongest: " : ""}${describe(at, record)} at ${digits(looked[at])} × uniform${own}`;
  return {
    values,
    colourOf: (patch) => heatOverlay(values[prefix + patch]),
    swatch: (one) => (one === MEAN ? "none" : heatColour(values[one])),
    number: (one) => (one === MEAN ? "" : `${digits(values[one])} ×`),
    lines: [`${nameHead(of.layer, of.head)}: ${describe(token, record)} ${verb}`, found, statistics],
    marked: at === MEAN ? null : looked[at],
    largest: values[indexOfLargest(values)],
  };
}

function showMap(record, { state, pointer, token }) {
  const map = chosenMap(record, state);
  if (!map) return nothing(["No maps of this image."]);
  const prefix = record.prefix.length;
  const at = [pointer, token].find((one) => one !== null && one >= prefix) ?? null;
  const value = at === null ? null : map.values[at - prefix];
  return {
    ...nothing([]),
    values: map.values,
    colourOf: (patch) => heatOverlay(map.values[patch]),
    lines: [
      `${map.title}, ${map.target === null ? "class-agnostic" : `for ${record.className(map.target)}`}`,
      at === null ? "" : `${describe(at, record)} at ${digits(value)} × uniform`,
    ],
    marked: value,
    largest: map.values[indexOfLargest(map.values)],
  };
}

function showLens(record, { state, pointer, token }) {
  if (!record.details.lens) return nothing(["No layer-by-layer predictions of this image."]);
  const colourOf = lensOverlay(record, lensColours(record), state.layer);
  const at = pointer ?? token;
  const read = lensOf(record, state.layer, at)
    .map(([index, probability]) => `${record.className(index)} ${percent(probability)}`).join(", ");
  return {
    ...nothing([]),
    colourOf: (patch) => colourOf(record.prefix.length + patch),
    swatch: (one) => (one === MEAN ? "none" : colourOf(one)),
    lines: [`after layer ${state.layer}, ${at === MEAN ? "what the head reads" : describe(at, record)} reads as`, read],
  };
}

function nothing(lines) {
  return { values: null, colourOf: null, swatch: () => "none", number: () => "", lines, marked: null, largest: 0 };
}
