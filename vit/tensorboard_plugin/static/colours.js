// Colours of maps, and of classes in the logit lens.

import { range } from "./maths.js";
// Made by the server from vit/colours.py, so that pictures and page have the same colours.
import { INFERNO, RED_BLUE } from "./palettes.js";

// Paul Tol's colour-blind-safe "muted" scheme; instead of cyan, which outlines patches, blue of his
// "bright" scheme, and orange of his "vibrant" one.
const CLASS_COLOURS = [
  "#4477aa",
  "#cc6677",
  "#117733",
  "#ddcc77",
  "#332288",
  "#aa4499",
  "#44aa99",
  "#ee7733",
  "#882255",
  "#999933",
];
const OTHER_CLASS = "#9e9e9e";

/** 256 colours, six hexadecimal digits each; a diverging palette is pale in the middle. */
class Palette {
  constructor(colours, diverging) {
    const steps = range(256).map((step) =>
      [0, 2, 4].map((at) => parseInt(colours.slice(6 * step + at, 6 * step + at + 2), 16)),
    );
    this.pixels = Uint32Array.from(steps, (colour) => pack(...colour)); // as those of an ImageData
    this.css = steps.map((colour) => `rgb(${colour.join(", ")})`);
    this.overlays = steps.map((colour, step) => {
      const strength = diverging ? Math.abs((2 * step) / 255 - 1) : step / 255;
      return diverging ? overPale(colour, 0.75 * strength) : css(colour, 0.1 + 0.65 * strength);
    });
  }
}

// Opacities are those of `overlay` in vit/explain/canvas.py: the farther from 0, the more opaque.

function css(colour, opacity) {
  return `rgba(${colour.join(", ")}, ${opacity})`;
}

/** Return a colour as one over a veil of white, because both ends of a diverging palette are dark. */
function overPale(colour, opacity) {
  const veiled = 1 - 0.5 * (1 - opacity);
  const mixed = colour.map((part) => (127.5 * (1 - opacity) + part * opacity) / veiled);
  return css(mixed.map(Math.round), veiled);
}

/** Return a pixel of an ImageData (little-endian, as every browser is). */
export function pack(red, green, blue, alpha = 255) {
  return ((alpha << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

export const SEQUENTIAL = new Palette(INFERNO, false);
export const DIVERGING = new Palette(RED_BLUE, true);

/** Choose colours of the ten most frequent classes, the same for the same class where possible. */
export function classColours(counts) {
  const frequent = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a) || a - b);
  const colours = new Map();
  const free = new Set(CLASS_COLOURS);
  for (const index of frequent.slice(0, CLASS_COLOURS.length)) {
    const own = CLASS_COLOURS[index % CLASS_COLOURS.length];
    const colour = free.has(own) ? own : [...free][0];
    free.delete(colour);
    colours.set(index, colour);
  }
  return colours;
}

/** Return the colour of a class as [red, green, blue]. */
export function classColour(colours, index) {
  const text = colours.get(index) ?? OTHER_CLASS;
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

/** Return a class's pixel, the more opaque the more probable it is. */
export function classPixel(colours, index, probability) {
  return pack(
    ...classColour(colours, index),
    Math.round(255 * (0.15 + 0.85 * Math.min(1, probability))),
  );
}

/** Return a class's colour as CSS, the more opaque the more probable it is. */
export function classOverlay(colours, index, probability) {
  return css(classColour(colours, index), 0.1 + 0.65 * Math.min(1, probability));
}
