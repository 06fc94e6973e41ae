// Scales: which colour a value has. Whatever is shown side by side shares one.

import { DIVERGING, SEQUENTIAL } from "./colours.js";
import { digits, range } from "./maths.js";
import { CONTRASTS } from "./state.js";

const FIXED = 3; // end of a fixed scale, in its unit
const NARROWEST = 0.02; // range, as a fraction of its end: weights are stored in 255 steps
const APART = 0.23; // least distance of ticks, as a fraction of the colour bar: room for a number
const CHARACTER = 0.04; // width of a character, likewise

const UNIFORM = { short: "× uniform", long: "uniform attention" };
const UNITS = {
  weights: UNIFORM,
  rollout: UNIFORM,
  maps: UNIFORM,
  signedMaps: { short: "× mean", long: "mean of absolute values" },
  similarity: { short: "cosine", long: "cosine", end: 1 },
};

class Scale {
  /** Make a scale for a kind of value, with 0 in the middle if it is signed. */
  constructor(kind, contrast, signed, low, high) {
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

  /** Return values to mark on the colour bar, [value, text] each: the ends, and round ones. */
  ticks() {
    const { low, high, contrast, signed } = this;
    const decimals = Math.max(0, Math.ceil(Math.log10(30 / (high - low))));
    const write = (value) =>
      contrast === "fixed" ? String(+value.toPrecision(3)) : value.toFixed(decimals);
    const text = (value) => write(value).replace("-", "−");
    const ticks = [low, high, signed ? 0 : 1].map((value) => [value, text(value)]);
    if (this.kind === "signedMaps") ticks.push([low / 2, "← against"], [high / 2, "for →"]);
    ticks.push(...roundOnes(low, high).map((value) => [value, text(value)]));
    const apart = ([one, text], [other, beside]) =>
      Math.abs(this.placeOf(one) - this.placeOf(other)) >=
      Math.max(APART, (CHARACTER * (text.length + beside.length)) / 2);
    const kept = [];
    for (const tick of ticks) if (kept.every((other) => apart(tick, other))) kept.push(tick);
    return kept.sort(([one], [other]) => one - other);
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

/** Return round values from `low` to `high`. */
function roundOnes(low, high) {
  const third = (high - low) / 3;
  const power = 10 ** Math.floor(Math.log10(third));
  const step = power * [5, 2, 1].find((factor) => factor * power <= third);
  return range(Math.ceil((high - low) / step)).map((at) => (Math.ceil(low / step) + at) * step);
}

/** Return the ends of a scale for values from `smallest` to `largest`. */
function endsFor(contrast, signed, { smallest, largest }, fixed = FIXED) {
  if (contrast === "fixed") return [signed ? -fixed : 0, fixed];
  const farthest = signed ? Math.max(largest, -smallest) : largest;
  const end = farthest > 1e-9 ? farthest : 1; // 1 if all are 0
  if (signed) return [-end, end];
  const spare = Math.max(0, NARROWEST * end - (end - smallest)) / 2;
  return [smallest - spare, end + spare];
}

/** Return a scale for each kind of value; `shown` has {kind, signed, smallest, largest} of all. */
export function scalesOf(contrast, shown) {
  const scaleOf = (kind) => {
    const own = shown.filter((one) => one.kind === kind);
    const signed = kind === "signedMaps" || own.some((one) => one.signed);
    const smallest = Math.min(...own.map((one) => one.smallest));
    const largest = Math.max(...own.map((one) => one.largest));
    const used = own.length ? contrast : "fixed";
    return new Scale(
      kind,
      used,
      signed,
      ...endsFor(used, signed, { smallest, largest }, UNITS[kind].end),
    );
  };
  return Object.fromEntries(Object.keys(UNITS).map((kind) => [kind, scaleOf(kind)]));
}
