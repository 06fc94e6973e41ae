// The tour: states of the tab, and what the model that is shown does in each.

import { isFile } from "./assets.js";
import { button, make, write } from "./dom.js";
import { fillPatches } from "./edits.js";
import { readAddress } from "./host.js";
import { mapsOf } from "./kinds.js";
import { lensOf } from "./lens.js";
import { MEAN, digits, indexOfLargest, percent, range, tokenName } from "./maths.js";
import { parseState } from "./state.js";
import * as de from "./tour_de.js";
import * as en from "./tour_en.js";

const LANGUAGES = { en, de };
const HIDDEN = 0.25; // of the patches
const TITLE = "How this model looks at a picture, in seven steps";

/** The steps. Each returns a state, figures for the text, and what is missing, of a record. */
const STEPS = [
  showPatches,
  showLook,
  showHeads,
  showRollout,
  showLens,
  hidePatches,
  ({ details }) => [{}, { count: details.classes.length }],
];

function showPatches(record) {
  const { rows, columns } = record;
  return [{ heat: "no" }, { rows, columns, ...answerOf(record) }];
}

function showLook(record) {
  const [{ patch, layer, head, share, other }] = looksOf(record);
  const figures = { patch, layer, head, share: percent(share), other };
  return [{ token: patch, layer, head }, figures];
}

function showHeads(record) {
  const looks = looksOf(record);
  const [{ patch, layer, head, share }] = looks;
  const figures = { patch, most: percent(share), least: percent(looks.at(-1).share) };
  return [{ token: patch, layer, head, order: "lowest" }, figures];
}

function showRollout(record) {
  const values = rolloutOf(record);
  const best = indexOfLargest(values);
  const mean = values.reduce((sum, value) => sum + value) / values.length;
  return [{}, { patch: nameOf(best, record), value: digits(values[best] / mean) }];
}

function showLens(record, words) {
  if (!record.details.lens) return [{}, {}, words.noLens];
  const [[index, probability]] = lensOf(record, 0, MEAN);
  const early = { early: record.className(index), earlyProbability: percent(probability) };
  return [{ view: "lens" }, { ...early, last: record.layers - 1, ...answerOf(record) }];
}

function hidePatches(record, words) {
  const relevance = mapsOf(record, null).find((map) => map.kind === "lrp");
  const values = relevance?.values ?? rolloutOf(record);
  const order = range(values.length).sort((a, b) => values[b] - values[a]);
  const count = Math.ceil(HIDDEN * order.length);
  const fills = order.slice(0, count).map((patch) => [patch, "mean"]);
  const map = words.maps[relevance ? "lrp" : "rollout"];
  return [
    { patches, heat: "no" },
    { count: hidden.length, map },
  ];
}

const nameOf = (patch, record) => tokenName(record.prefix.length + patch, record);

function answerOf({ details, className }) {
  const [[index, probability]] = details.top;
  return { best: className(index), probability: percent(probability) };
}

/** Return rollout of what the classifier reads, for each patch. */
function rolloutOf({ details, weights, layers, prefix }) {
  const token = details.readout === "class_token" && prefix.length ? 0 : MEAN;
  return weights.rollouts(token, "to")[layers - 1].slice(prefix.length);
}

/** Return how the patch that rollout finds looks at one other patch, sharpest head first. */
function looksOf(record) {
  const { weights, prefix, tokens } = record;
  const from = indexOfLargest(rolloutOf(record));
  const { heads } = weights.of(prefix.length + from, "to");
  const look = (values, layer, head) => {
    const others = values.slice(prefix.length);
    others[from] = -Infinity;
    const other = indexOfLargest(others);
    const names = { patch: nameOf(from, record), other: nameOf(other, record) };
    return { ...names, layer, head, share: others[other] / tokens };
  };
  return heads
    .flatMap((maps, layer) => maps.map((values, head) => look(values, layer, head)))
    .sort((a, b) => b.share - a.share);
}

/** Return what a change did to the class that was predicted before. */
function changeOf({ change, details, className }) {
  if (!change) return {};
  const { before, after } = change;
  const best = indexOfLargest(before.logits);
  const [was, is] = [before, after].map(({ probabilities }) => percent(probabilities[best]));
  return { best: className(best), before: was, after: is, now: className(details.top[0][0]) };
}

/** The line of the toolbar. */
export class Tour {
  #shown = ""; // what the text is about: step, language and image
  #before = parseState({}); // the state in which the tour was started

  constructor(app) {
    this.app = app;
    this.open = button("Tour", () => this.go(1), { title: TITLE });
    this.title = make("strong");
    this.text = make("span");
    this.back = button("", () => this.go(app.state.tour - 1));
    this.next = button("", () => this.go((app.state.tour ?? 0) + 1));
    this.close = button("", () => this.go(null));
    this.other = button("", () => app.set({ language: this.#languages()[1] }));
    this.element = make(
      "section",
      { class: "line tour", hidden: true, "aria-label": "Tour" },
      make("p", { role: "status" }, this.title, " ", this.text),
      make("div", "group", this.back, this.next, this.close, this.other),
    );
    this.isOffered = isFile() && Object.keys(readAddress()).length === 0;
  }

  /** Go to a step, from 1; null ends the tour. */
  async go(tour) {
    const { state } = this.app;
    const { run, image, step, language } = state;
    this.isOffered = false;
    if (!state.tour) this.#before = { ...state };
    // Ended early, everything is as it was found; after the last step, as it was left.
    const isLeft = tour === null && state.tour !== STEPS.length;
    await this.app.set({ ...(isLeft && this.#before), run, image, step, language, tour });
    const next = this.next.disabled ? this.close : this.next;
    (tour === null ? this.open : next).focus();
  }

  /** Return the language of the tour, then the other ones. */
  #languages() {
    const wanted = [this.app.state.language, ...navigator.languages.map((one) => one.slice(0, 2))];
    const language = wanted.find((one) => one in LANGUAGES) ?? "en";
    return [language, ...Object.keys(LANGUAGES).filter((one) => one !== language)];
  }

  /** Bring the tab into the state of the step and say what it shows: again for another image. */
  async render() {
    const { app } = this;
    const { tour } = app.state;
    const [{ record }] = app.panes;
    const step = STEPS[tour - 1];
    this.open.hidden = !record?.weights || record.details.top.length === 0;
    this.element.hidden = this.open.hidden || !(step || this.isOffered);
    const languages = this.#languages();
    const about = record && [record.run, record.tag, record.step, record.details.name];
    const shown = this.element.hidden ? "" : JSON.stringify([tour, languages, about]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    if (shown === "") return;
    const [words, other] = languages.map((one) => LANGUAGES[one]);
    this.#write(words, other);
    if (!step) return;
    // Each step starts from the initial state, so that it shows the same whatever came before.
    const { run, image, step: at, language } = app.state;
    await app.set({ ...parseState({}), run, image, step: at, tour, language });
    const whole = app.panes[0].record;
    if (shown !== this.#shown || !whole) return;
    const [state, figures, missing = ""] = step(whole, words);
    const asks = "patches" in state;
    const problem = asks && !app.canAsk() ? app.panes[0].liveNote : missing;
    if (!problem) await (asks ? app.edit(state) : app.set(state));
    if (state.view || state.order) app.panes[0].host.scrollIntoView({ block: "nearest" });
    if (shown !== this.#shown) return;
    const say = words.steps[tour - 1][1];
    const found = { ...figures, ...changeOf(app.panes[0].record) };
    write(this.text, problem ? words.missing(problem) : say(found));
  }

  #write(words, other) {
    const { tour } = this.app.state;
    this.element.lang = words.language;
    write(this.title, tour ? `${tour}/${STEPS.length} ${words.steps[tour - 1][0]}.` : "");
    write(this.text, tour ? "…" : words.offer);
    write(this.back, words.back);
    write(this.next, tour ? words.next : words.start);
    write(this.close, tour ? words.close : words.decline);
    write(this.other, other.name);
    this.back.hidden = !tour;
    this.back.disabled = tour === 1;
    this.next.disabled = tour === STEPS.length;
  }
}
