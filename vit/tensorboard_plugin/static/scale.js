// Scales: which colour a value has. Whatever is shown side by side shares one.

import { DIVERGING, SEQUENTIAL } from "./colours.js";
import { digits, range } from "./maths.js";
import { CONTRASTS } from "./state.js";

const FIXED = 3; // end of a fixed scale, in its unit
const NARROWEST = 0.02; // range, as a fraction of its end: weights are stored in 255 steps
const FAINTEST = 0.001; // start of a logarithmic scale, as a fraction of its end, at least
const LINEAR = 0.01; // end of the linear part of a symmetric logarithmic scale, likewise
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
    const value = Math.min(high, Math.max(low, beyond));
    if (this.contrast !== "log") return (value - low) / (high - low);
    if (!this.signed) return Math.log(value / low) / Math.log(high / low);
    const size = Math.log1p(Math.abs(value) / (LINEAR * high)) / Math.log1p(1 / LINEAR);
    return 0.5 + 0.5 * Math.sign(value) * size;
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
    const decades = contrast === "log" && (signed || high >= 10 * low);
    const decimals = Math.max(0, Math.ceil(Math.log10(30 / (high - low))));
    const short = decades || contrast === "fixed";
    const write = (value) => (short ? String(+value.toPrecision(3)) : value.toFixed(decimals));
    const text = (value) => write(value).replace("-", "−");
    const ticks = [low, high, signed ? 0 : 1].map((value) => [value, text(value)]);
    if (contrast === "log" && !signed) ticks[0][1] = `≤ ${ticks[0][1]}`;
    if (this.kind === "signedMaps" && !decades)
      ticks.push([low / 2, "← against"], [high / 2, "for →"]);
    ticks.push(...roundOnes(low, high, signed, decades).map((value) => [value, text(value)]));
    const apart = ([one, text], [other, beside]) =>
      Math.abs(this.placeOf(one) - this.placeOf(other)) >=
      Math.max(APART, (CHARACTER * (text.length + beside.length)) / 2);
    const kept = [];
    for (const tick of ticks) if (kept.every((other) => apart(tick, other))) kept.push(tick);
    return kept.sort(([one], [other]) => one - other);
  }

  /** Say what the numbers on the colour bar are. */
  describe() {
    const symmetric = this.signed && this.contrast === "log" ? "symmetric " : "";
    return `${this.unit.short}, ${symmetric}${CONTRASTS[this.contrast]} scale`;
  }

  /** Say that values are beyond the ends of the scale, or nothing. */
  beyond({ smallest, largest }) {
    if (smallest < this.low && this.contrast !== "log")
      return `${digits(smallest)} to ${digits(largest)}`;
    return largest > this.high ? `▸ up to ${digits(largest)}` : "";
  }

  /** Write a value with its unit. */
  write(value) {
    return `${digits(value)} ${this.unit.short}`;
  }
}

/** Return round values from `low` to `high`, or powers of ten. */
function roundOnes(low, high, signed, decades) {
  if (decades) return signed ? [-high / 10, high / 10] : range(19).map((at) => 10 ** (at - 9));
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
  const start = contrast === "log" ? Math.max(smallest, FAINTEST * end) : smallest;
  const spare = Math.max(0, NARROWEST * end - (end - start)) / 2;
  return [start - spare, end + spare];
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
