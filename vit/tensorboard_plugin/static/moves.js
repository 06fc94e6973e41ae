// Where the keys lead: the token, head or layer next to another one.

import { MEAN, range, tokenName, tokenOf } from "./maths.js";
import { FUSED } from "./state.js";

/** Return the name of the patch next to a token; of one in the middle, if it is no patch. */
export function nextPatch(record, name, down, right) {
  const { rows, columns } = record;
  const prefix = record.prefix.length;
  const token = name ? tokenOf(name, record) : null;
  let [row, column] = [Math.floor((rows - 1) / 2), Math.floor((columns - 1) / 2)];
  if (token !== null && token >= prefix) {
    row = clamp(Math.floor((token - prefix) / columns) + down, rows);
    column = clamp(((token - prefix) % columns) + right, columns);
  }
  return tokenName(prefix + row * columns + column, record);
}

/** Return the name of the next token that is no patch; after the last comes the mean of patches. */
export function nextSpecial(record, name) {
  const names = [MEAN, ...range(record.prefix.length)].map((token) => tokenName(token, record));
  return names[(names.indexOf(name) + 1) % names.length];
}

export function nextHead(record, head, by) {
  const heads = [...range(record.heads), ...FUSED];
  return heads[clamp(heads.indexOf(head) + by, heads.length)];
}

/** Return the layer `by` places further; null is the last. */
export function nextLayer(record, layer, by) {
  return clamp((layer ?? record.layers - 1) + by, record.layers);
}

function clamp(index, count) {
  return Math.min(Math.max(index, 0), count - 1);
}
