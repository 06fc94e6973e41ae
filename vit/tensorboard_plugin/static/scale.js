// Scales: which colour a value has. Whatever is shown side by side shares one.

import { DIVERGING, SEQUENTIAL } from "./colours.js";
import { digits, range } from "./maths.js";
import { CONTRASTS } from "./state.js";

const FIXED = 3; // end of a fixed scale, in its unit
const NARROWEST = 0.02; // range, as a fraction of its end: weights are stored in 255 steps
// A fixed scale shows a range below the first, in its unit, in almost one colour. The automatic one in
// its place is at least as wide as the second, so that uniform attention looks uniform.
const [EVEN, EVENEST] = [1.5, 0.5];

const UNIFORM = { short: "× uniform", long: "uniform attention" };
const UNITS = {
  weights: UNIFORM,
  large: UNIFORM, // the head that is shown large
  maps: UNIFORM,
  signedMaps: { short: "× mean", long: "mean of absolute values" },
  similarity: { short: "cosine", long: "cosine", end: 1 },
};

class Scale {
  /** Make a scale for a kind of value, with 0 in the middle if it is signed. */
  constructor(kind, signed, contrast, low, high) {
    Object.assign(this, { kind, contrast, signed, low, high });
    this.key = [kind, contrast, signed, low, high].join(); // the same for the same colours
    this.unit = UNITS[kind];
    this.palette = signed ? DIVERGING : SEQUENTIAL;
  }

  /** Return where a value is on the scale, 0 to 1; at an end if it is beyond. */
  placeOf(beyond) {
    const { low, high } = this;
    return (Math.min(high, Math.max(low, beyond)) - low) / (high - low);
  }

  #stepOf(value) {
    return Math.min(255, Math.floor(256 * this.placeOf(value)));
  }

  /** Return the pixels of values. */
  pixelsOf(values) {
    const pixels = new Uint32Array(values.length);
    for (let index = 0; index < values.length; index++)
      pixels[index] = this.palette.pixels[this.#stepOf(values[index])];
    return pixels;
  }

  /** Return a value's colour over a picture, as CSS. */
  overlay(value) {
    return this.palette.overlays[this.#stepOf(value)];
  }

  /** Return a value's colour, as CSS. */
  colour(value) {
    return this.palette.css[this.#stepOf(value)];
  }

  /** Return values to mark on the colour bar, [value, text] each, from left to right. */
  ticks() {
    const { low, high } = this;
    const parts = this.signed || this.kind === "similarity" ? 2 : 3;
    const decimals = Math.max(0, Math.ceil(Math.log10(30 / (high - low))));
    const ticks = range(parts + 1).map((part) => {
      const value = low + (part * (high - low)) / parts;
      return [value, String(+value.toFixed(decimals)).replace("-", "−")];
    });
    if (this.kind !== "signedMaps") return ticks;
    const [left, middle, right] = ticks;
    return [left, [low / 2, "← against"], middle, [high / 2, "for →"], right];
  }

  /** Say what the numbers on the colour bar are. */
  describe() {
    return `${this.unit.short}, ${CONTRASTS[this.contrast]} scale`;
  }

  /** Say that values are beyond the ends of the scale, or nothing. */
  beyond({ smallest, largest }) {
    if (smallest < this.low) return `${digits(smallest)} to ${digits(largest)}`;
    return largest > this.high ? `▸ up to ${digits(largest)}` : "";
  }

  /** Write a value with its unit. */
  write(value) {
    return `${digits(value)} ${this.unit.short}`;
  }
}

/** Return the contrast that values are shown with, and the ends of their scale. */
function endsFor(contrast, kind, signed, { smallest, largest }) {
  const isEven = kind === "large" && !signed && largest - smallest < EVEN;
  if (contrast === "fixed" || (contrast === "even" && !isEven)) {
    const fixed = UNITS[kind].end ?? FIXED;
    return ["fixed", signed ? -fixed : 0, fixed];
  }
  const farthest = signed ? Math.max(largest, -smallest) : largest;
  const end = farthest > 1e-9 ? farthest : 1; // 1 if all are 0
  if (signed) return ["auto", -end, end];
  const narrowest = contrast === "even" ? EVENEST : NARROWEST * end;
  const spare = Math.max(0, narrowest - (end - smallest)) / 2;
  return ["auto", smallest - spare, end + spare];
}

/** Return a scale for each kind of value; `shown` has {kind, signed, smallest, largest} of all. */
export function scalesOf(contrast, shown) {
  const scaleOf = (kind) => {
    const own = shown.filter((one) => one.kind === kind);
    const signed = kind === "signedMaps" || own.some((one) => one.signed);
    const smallest = Math.min(...own.map((one) => one.smallest));
    const largest = Math.max(...own.map((one) => one.largest));
    const ends = endsFor(own.length ? contrast : "fixed", kind, signed, { smallest, largest });
    return new Scale(kind, signed, ...ends);
  };
  return Object.fromEntries(Object.keys(UNITS).map((kind) => [kind, scaleOf(kind)]));
}
