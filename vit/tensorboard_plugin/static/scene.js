// What the large picture, the chips and the lines below it show in each view.

import { aboutClass, chosenMap, mapsOf, scaleOf } from "./kinds.js";
import { lensColours, lensOf, lensOverlay } from "./lens.js";
import { MEAN, digits, endsOf, indexOfLargest, percent, range, tokenName } from "./maths.js";
import { describePlace, placeOf } from "./offsets.js";
import { FUSED } from "./state.js";

/**
 * Return what is shown: `values` of the heat map; `colourOf` a patch over the picture; `swatch` and
 * `number` of a token on its chip; `lines` of text; the `scale`, a value to be `marked` on it, and
 * the `ends` of all values.
 */
export function show(record, scene) {
  const heads = scene.state.direction === "offset" && scene.values ? showOffsets : showHead;
  const views = { heads, maps: showMap, lens: showLens, features: showFeatures };
  return views[scene.state.view](record, scene);
}

/** Return what has to be on a scale, see `scalesOf`. */
export function onScale(record, { state, attention, similar, values }) {
  const cosines = similar.flat().filter(Boolean);
  if (state.view === "features")
    return cosines.map((found) => ({ kind: "similarity", ...endsOf(found) }));
  if (state.view === "maps")
    return mapsOf(record, state.target).map((map) => ({
      kind: map.signed ? "signedMaps" : "maps",
      ...endsOf(map.values),
    }));
  if (!attention) return [];
  // Rollout is on the scale of the heads from which it follows: its residual connections would
  // dwarf them.
  const { signed, removed } = record.weights;
  const isThere = (_, token) => token >= record.prefix.length && !removed.has(token);
  const ofHeads = attention.heads.flat().map((head) => ({ kind: "weights", ...endsOf(head) }));
  const large = state.direction === "offset" ? values : values.filter(isThere);
  const ends = endsOf(large.length ? large : [0]); // all patches may be removed
  return [...ofHeads, { kind: "large", ...ends }].map((one) => ({ ...one, signed }));
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

const FUSED_NAMES = {
  mean: "mean over heads",
  max: "max over heads",
  rollout: "rollout up to here",
};

function nameHead(layer, head) {
  return `layer ${layer}, ${FUSED_NAMES[head] ?? `head ${head}`}`;
}

function describeStatistics(statistics, layer, head) {
  if (head in FUSED_NAMES) return "";
  return Object.entries(statistics)
    .filter(([, values]) => values !== null)
    .map(([name, values]) => [name, digits(values[layer][head])])
    .map(([name, value]) => `${name} ${value}${name === "distance" ? " px" : ""}`)
    .join(" · ");
}

/** Say what the token gives to another one, or to which it gives most; "from" the other way. */
function describeValue(record, values, token, other, direction) {
  const [verb, link] = direction === "to" ? ["attends", "to"] : ["receives", "from"];
  const most = other === null ? " most" : "";
  const own = other === null && token !== MEAN ? `, itself ${digits(values[token])} ×` : "";
  const best = other ?? indexOfLargest(values);
  const sentence = `${describe(token, record)} ${verb}${most} ${link} ${describe(best, record)}`;
  return `${sentence}: ${digits(values[best])} × uniform${own}`;
}

function scaleOfLarge({ contrast }, scales) {
  return contrast === "even" ? scales.large : scales.weights;
}

function showHead(record, { state, token, pointer, probe, attention, values, scales }) {
  const scale = scaleOfLarge(state, scales);
  if (!values) return nothing(["No attention weights of this image"], scale);
  const prefix = record.prefix.length;
  const { layer, head } = probe ?? state; // the small map under the pointer, or that shown large
  const looked = valuesOf(attention, layer, head);
  const pointed = probe ? probe.token : pointer;
  const other = pointed === token || pointed === MEAN ? null : pointed;
  return {
    values,
    colourOf: (patch) => scale.overlay(values[prefix + patch]),
    swatch: (one) => (one === MEAN ? "none" : scale.colour(values[one])),
    number: (one) => (one === MEAN ? "" : `${digits(values[one])} ×`),
    lines: [
      nameHead(layer, head),
      describeValue(record, looked, token, other, state.direction),
      describeStatistics(state.statistics, layer, head),
    ],
    scale,
    marked: looked[other ?? indexOfLargest(looked)],
    ends: endsOf(values),
  };
}

/** Say which images attention by offset is a mean of. */
export function describeImages({ averaged }) {
  return averaged.length === 1 ? "this image" : `${averaged.length} images`;
}

/** Show attention by offset, as if the patch in question were the query. */
function showOffsets(record, { state, token, pointer, probe, attention, values, scales }) {
  const scale = scaleOfLarge(state, scales);
  const prefix = record.prefix.length;
  const placeFrom = (patch) => placeOf(token - prefix, patch, record);
  const { layer, head } = probe ?? state;
  const looked = valuesOf(attention, layer, head);
  const pointed = pointer !== null && pointer >= prefix && pointer !== token;
  const place = probe?.token ?? (pointed ? placeFrom(pointer - prefix) : indexOfLargest(looked));
  const strongest = probe || pointed ? "" : "strongest: ";
  const shown = range(record.rows * record.columns).map((patch) => values[placeFrom(patch)]);
  return {
    ...nothing([], scale),
    values: shown,
    colourOf: (patch) => scale.overlay(shown[patch]),
    lines: [
      `${nameHead(layer, head)}: attention by offset, ${describeImages(state)}`,
      `${strongest}${describePlace(place, record)} at ${digits(looked[place])} × uniform`,
      describeStatistics(state.statistics, layer, head),
    ],
    marked: looked[place],
    ends: endsOf(shown),
  };
}

function showMap(record, { state, pointer, token, scales }) {
  const map = chosenMap(record, state);
  if (!map) return nothing(["No maps of this image"], scales.maps);
  const prefix = record.prefix.length;
  const at = [pointer, token].find((one) => one !== null && one >= prefix) ?? null;
  const value = at === null ? null : map.values[at - prefix];
  const scale = scaleOf(map, scales);
  return {
    ...nothing([], scale),
    values: map.values,
    colourOf: (patch) => scale.overlay(map.values[patch]),
    lines: [
      `${map.title} (${aboutClass(record, map)})`,
      at === null ? "" : `${describe(at, record)} at ${scale.write(value)}`,
      map.signed ? "red speaks for the class, blue against it" : "",
    ],
    marked: value,
    ends: endsOf(map.values),
  };
}

function showLens(record, { state, pointer, token, scales }) {
  const { lens } = record.details;
  if (!lens) return nothing(["No layer-by-layer predictions of this image"], scales.maps);
  const colourOf = lensOverlay(record, lensColours(record), state.layer);
  const at = pointer ?? token;
  const readName = at === MEAN ? "what the classifier reads" : describe(at, record);
  const read = lensOf(record, state.layer, at)
    .map(([index, probability]) => `${record.className(index)} ${percent(probability)}`)
    .join(", ");
  return {
    ...nothing([], scales.maps),
    colourOf: (patch) => colourOf(record.prefix.length + patch),
    swatch: (one) => (one === MEAN ? "none" : colourOf(one)),
    lines: [`after layer ${state.layer}, ${readName} is read as`, read],
  };
}

function showFeatures(record, { state, token, pointer, similar, scales }) {
  const scale = scales.similarity;
  const { layer, feature, compared } = state;
  if (!compared.length) return nothing(["No features of this image"], scale);
  const [{ features }] = compared;
  const prefix = record.prefix.length;
  const at = [pointer, token].find((one) => one !== null && one >= prefix) ?? null;
  if (feature === "components") {
    const found = at === null ? [] : features.components(layer, at - prefix).map(digits);
    const lines = [`layer ${layer}: components 1, 2, 3 are red, green, blue`];
    if (at !== null)
      lines.push(`${describe(at, record)} at ${found.join(", ")} standard deviations`);
    const colourOf = (patch) => `rgb(${features.colours(layer)[patch]})`;
    return { ...nothing(lines, scale), colourOf };
  }
  const values = similar[0]?.[layer];
  if (!values) return nothing([`${describe(token, record)}: only patches have features`], scale);
  const others = values.map((value, patch) => (prefix + patch === token ? -Infinity : value));
  const patch = at === null || at === token ? indexOfLargest(others) : at - prefix;
  const value = `${describe(prefix + patch, record)} at ${digits(values[patch])}`;
  return {
    ...nothing([`layer ${layer}: cosine with ${describe(token, record)}`, value], scale),
    values,
    colourOf: (one) => scale.colour(values[one]),
    marked: values[patch],
    ends: endsOf(values),
  };
}

function nothing(lines, scale) {
  return {
    values: null,
    colourOf: null,
    swatch: () => "none",
    number: () => "",
    lines,
    scale,
    marked: null,
    ends: { smallest: 0, largest: 0 },
  };
}
