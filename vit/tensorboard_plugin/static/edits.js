// What is changed in the model and in the image: as text in the address, in words, and as pixels.
//
// Muted heads are written "LAYER.HEAD,...", changed patches "PATCH:FILL,...". A fill is one of
// FILLS, the number of the patch whose pixels are there now, or both: "blur12".

import { range, tokenName } from "./maths.js";

const FILLS = {
  mean: "hidden by the mean colour",
  blur: "blurred",
  other: "taken from another image",
  out: "taken out of every layer's attention",
};
const MOVED = { blur: "blurred", other: "of another image" }; // fills that differ from patch to patch

const FILL = `(?:${Object.keys(FILLS).join("|")}|(?:${Object.keys(MOVED).join("|")})?\\d{1,6})`;
const HEADS = /^\d{1,6}\.\d{1,6}(,\d{1,6}\.\d{1,6})*$/;
const PATCHES = new RegExp(`^\\d{1,6}:${FILL}(,\\d{1,6}:${FILL})*$`);

export const readHeads = (text) => (HEADS.test(text) ? text : undefined);
export const readPatches = (text) => (PATCHES.test(text) ? text : undefined);

const listOf = (text) => text.split(",").filter(Boolean);

/** Read changed patches: from a patch to its fill. */
const readFills = (text) =>
  new Map(
    listOf(text).map((pair) => {
      const [patch, fill] = pair.split(":");
      return [Number(patch), fill];
    }),
  );

/** Return the muted heads that a record has, [layer, head] each. */
export function mutedHeads(text, { layers, heads }) {
  return [...new Set(listOf(text))]
    .map((one) => one.split(".").map(Number))
    .filter(([layer, head]) => layer < layers && head < heads);
}

/** Mute some heads, or sound them again if all of them are muted. */
export function toggleHeads(text, heads) {
  const muted = new Set(listOf(text));
  const names = heads.map((head) => head.join("."));
  const again = names.every((name) => muted.has(name));
  names.forEach((name) => (again ? muted.delete(name) : muted.add(name)));
  return [...muted].join();
}

/** Mute the others and sound a head; or, where that is so, sound them all. */
export function onlyHead(text, head, others) {
  const sounding = listOf(text).filter((name) => name !== head.join("."));
  return toggleHeads(sounding.join(), others);
}

/** Return the changed patches that a record has: from a patch to its fill. */
export function changedPatches(text, { rows, columns }) {
  const isThere = (patch) => patch < rows * columns;
  const isWhole = ([patch, fill]) => isThere(patch) && isThere(sourceOf(patch, fill).from);
  return new Map([...readFills(text)].filter(isWhole));
}

/** Return the word of a fill, empty for pixels as they are, and the patch that its pixels are from. */
function sourceOf(patch, fill) {
  const [, word, from] = /^([a-z]*)(\d*)$/.exec(fill);
  return { word, from: from === "" ? patch : Number(from) };
}

/** Change some patches: [patch, fill] each, where null is the patch as it was. */
export function fillPatches(text, fills) {
  const all = readFills(text);
  for (const [patch, fill] of fills) {
    const { word, from } = sourceOf(patch, fill ?? String(patch));
    if (word === "" && from === patch) all.delete(patch);
    else all.set(patch, from === patch ? word : fill);
  }
  return [...all].map((pair) => pair.join(":")).join();
}

/**
 * Return the fills that move the pixels of a patch to another one, or swap the two. Pixels arrive
 * in attention; a patch that is left without is hidden, or still out of attention.
 */
export function moved(text, from, to, swap) {
  const now = readFills(text);
  const pixelsAt = (patch) => {
    const fill = now.get(patch) ?? "out";
    if (fill === "out") return String(patch); // the patch keeps its pixels
    return fill in MOVED ? fill + patch : fill;
  };
  const left = now.get(from) === "out" ? "out" : "mean";
  return [
    [to, pixelsAt(from)],
    [from, swap ? pixelsAt(to) : left],
  ];
}

/** Return an image with changed patches; those that are taken out of attention keep their pixels. */
export function changedPixels(image, changed, { grid, mean }, other) {
  const [height, width] = [image.height / grid[0], image.width / grid[1]];
  const result = new ImageData(image.data.slice(), image.width, image.height);
  const placeOf = (patch) => [(patch % grid[1]) * width, Math.floor(patch / grid[1]) * height];
  const colour = range(3).map((channel) => Math.round(255 * mean[channel % mean.length]));
  const flat = new Uint8ClampedArray(image.data.length).map((_, at) => colour[at % 4] ?? 255);
  const sources = {
    mean: () => flat,
    blur: () => blurred(image, Math.max(width, height) / 2),
    other: () => other?.data ?? flat,
  };
  const ready = {};
  for (const [patch, fill] of changed) {
    if (fill === "out") continue;
    const { word, from: origin } = sourceOf(patch, fill);
    const source = word ? (ready[word] ??= sources[word]()) : image.data;
    const [left, top] = placeOf(patch);
    const [fromLeft, fromTop] = placeOf(origin);
    for (let row = 0; row < height; row++) {
      const from = 4 * ((fromTop + row) * image.width + fromLeft);
      result.data.set(
        source.subarray(from, from + 4 * width),
        4 * ((top + row) * image.width + left),
      );
    }
  }
  return result;
}

/** Return the pixels of an image blurred by a Gaussian. */
function blurred(image, sigma) {
  const [sharp, soft] = range(2).map(() => new OffscreenCanvas(image.width, image.height));
  sharp.getContext("2d").putImageData(image, 0, 0);
  const context = soft.getContext("2d");
  if (context.filter === undefined) throw new Error("This browser cannot blur patches.");
  context.filter = `blur(${sigma}px)`;
  context.drawImage(sharp, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  return data.map((value, at) => (at % 4 === 3 ? 255 : value)); // the edge is transparent
}

/** Say what is changed, as one sentence; nothing if nothing is. */
export function describeEdits(record, { mute, patches }) {
  const parts = [
    ...describeHeads(mutedHeads(mute, record), record),
    ...describePatches(patches, record),
  ];
  return parts.length ? `Changed: ${parts.join("; ")}.` : "";
}

function describeHeads(muted, record) {
  return range(record.layers).flatMap((layer) => {
    const heads = muted.filter(([one]) => one === layer).map(([, head]) => head);
    if (heads.length === 0) return [];
    if (heads.length === record.heads) return [`layer ${layer} without its attention`];
    const names = heads.sort((a, b) => a - b).join(", ");
    return [`layer ${layer} without head${heads.length > 1 ? "s" : ""} ${names}`];
  });
}

function describePatches(patches, record) {
  const changed = [...changedPatches(patches, record)];
  const nameOf = (patch) => `(${tokenName(record.prefix.length + patch, record)})`;
  const filled = Object.entries(FILLS).flatMap(([fill, text]) => {
    const found = changed.filter(([, one]) => one === fill).map(([patch]) => patch);
    if (found.length === 0) return [];
    const which =
      found.length > 4
        ? `${found.length} patches`
        : `patch${found.length > 1 ? "es" : ""} ${found.map(nameOf).join(", ")}`;
    return [`${which} ${text}`];
  });
  const taken = changed
    .filter(([, fill]) => !(fill in FILLS))
    .map(([patch, fill]) => {
      const { word, from } = sourceOf(patch, fill);
      return `patch ${nameOf(patch)} shows ${nameOf(from)}${word && ` ${MOVED[word]}`}`;
    });
  return [...filled, ...taken];
}
