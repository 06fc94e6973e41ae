// The tour: states of the tab, and what the model that is shown does in each.

import { isFile } from "./assets.js";
import { button, make, write } from "./dom.js";
import { fillPatches } from "./edits.js";
import { readAddress } from "./host.js";
import { mapsOf } from "./kinds.js";
import { lensOf } from "./lens.js";
import { MEAN, bestOf, digits, indexOfLargest, percent, readRollout, tokenName } from "./maths.js";
import { parseState } from "./state.js";
import * as de from "./tour_de.js";
import * as en from "./tour_en.js";

const LANGUAGES = { en, de };
const HIDDEN = 0.25; // of the patches
// What a step starts from, so that it shows the same whatever came before.
const { run, image, step, run2, image2, step2, linked, tour, language, ...INITIAL } = parseState(
  {},
);
const TITLE = "How this model looks at a picture, in seven steps";

/** The steps. Each returns a state, figures for the text, and what there is to say instead. */
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
  const [sharp, even] = [looks[0], looks.at(-1)];
  const { patch, layer, head } = even;
  const figures = { sharp: { ...sharp, share: percent(sharp.share) }, layer, head };
  return [
    { token: patch, layer, head },
    { ...figures, share: percent(even.share) },
  ];
}

function showRollout(record) {
  const values = readRollout(record);
  const best = indexOfLargest(values);
  const mean = values.reduce((sum, value) => sum + value) / values.length;
  return [{}, { patch: nameOf(best, record), value: digits(values[best] / mean) }];
}

function showLens(record) {
  if (!record.details.lens) return [{}, {}, (words) => words.noLens];
  const [[index, probability]] = lensOf(record, 0, MEAN);
  const early = { early: record.className(index), earlyProbability: percent(probability) };
  return [{ view: "lens" }, { ...early, last: record.layers - 1, ...answerOf(record) }];
}

function hidePatches(record) {
  const relevance = mapsOf(record, null).find((map) => map.kind === "lrp");
  const values = relevance?.values ?? readRollout(record);
  const count = Math.ceil(HIDDEN * values.length);
  const fills = bestOf(values, count).map((patch) => [patch, "mean"]);
  const patches = fillPatches("", fills);
  return [
    { patches, heat: "no" },
    { count, isTraced: relevance !== undefined },
  ];
}

const nameOf = (patch, record) => tokenName(record.prefix.length + patch, record);

function answerOf({ details, className }) {
  const [[index, probability]] = details.top;
  return { best: className(index), probability: percent(probability) };
}

/** Return how the patch that rollout finds looks at one other patch, sharpest head first. */
function looksOf(record) {
  const { weights, prefix, tokens } = record;
  const from = indexOfLargest(readRollout(record));
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
  #shown = ""; // the step and the image that the text is about
  #set = null; // the state that the step has set
  #say = () => ""; // the text in a language
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
    const { app } = this;
    if (!app.state.tour) this.#before = this.#ownState();
    const isDone = tour === null && app.state.tour === STEPS.length; // what was done there stays
    const start = tour === null ? this.#before : INITIAL;
    this.isOffered = false;
    app.history = [];
    await app.set({ ...(isDone ? {} : start), tour });
    (tour === null ? this.open : this.next.disabled ? this.close : this.next).focus();
  }

  /** Return the part of the state that the tour changes. */
  #ownState() {
    return Object.fromEntries(Object.keys(INITIAL).map((name) => [name, this.app.state[name]]));
  }

  /** Return the language of the tour, then the other ones. */
  #languages() {
    const wanted = [this.app.state.language, ...navigator.languages.map((one) => one.slice(0, 2))];
    const language = wanted.find((one) => one in LANGUAGES) ?? "en";
    return [language, ...Object.keys(LANGUAGES).filter((one) => one !== language)];
  }

  /** Show the step, once for each image, and what it says. */
  render() {
    const { tour } = this.app.state;
    const [{ record }] = this.app.panes;
    const { readout, top } = record?.details ?? {};
    this.open.hidden = !record?.weights || readout === null || top.length === 0;
    this.element.hidden = this.open.hidden || !(STEPS[tour - 1] || this.isOffered);
    if (this.element.hidden) return (this.#shown = "");
    const shown = JSON.stringify([tour, record.run, record.tag, record.step, record.details.name]);
    const isNew = shown !== this.#shown;
    this.#shown = shown;
    if (isNew && tour) this.#enter(tour, shown);
    return this.#write();
  }

  /** Bring the tab into the state of a step; the last one leaves it as it is. */
  async #enter(tour, shown) {
    const { app } = this;
    const isLast = tour === STEPS.length;
    this.#set = null;
    this.#say = () => "…";
    if (!isLast) await app.set(INITIAL);
    const whole = app.panes[0].record;
    if (shown !== this.#shown || !whole) return;
    const [state, figures, missing] = STEPS[tour - 1](whole);
    const asks = "patches" in state;
    let problem = asks && !app.canAsk() ? () => app.panes[0].liveNote : missing;
    if (!problem) await (asks ? app.edit(state) : app.set(state));
    const { record } = app.panes[0];
    if (!problem && asks && !record?.change) problem = () => app.panes[0].liveNote;
    if (state.view) app.panes[0].host.scrollIntoView({ block: "nearest" });
    if (shown !== this.#shown) return;
    const found = { ...figures, ...changeOf(record ?? {}) };
    this.#set = isLast ? null : JSON.stringify(this.#ownState());
    this.#say = (words) => (problem ? problem(words) : words.steps[tour - 1][1](found));
    this.#write();
  }

  #write() {
    const { tour } = this.app.state;
    const [words, other] = this.#languages().map((one) => LANGUAGES[one]);
    const isLeft = this.#set !== null && this.#set !== JSON.stringify(this.#ownState());
    this.element.lang = words.language;
    write(this.title, tour ? `${tour}/${STEPS.length} ${words.steps[tour - 1][0]}.` : "");
    write(this.text, tour ? (isLeft ? words.left : this.#say(words)) : words.offer);
    write(this.back, words.back);
    write(this.next, tour ? words.next : words.start);
    write(this.close, tour ? words.close : words.decline);
    write(this.other, other.name);
    this.back.hidden = !tour;
    this.back.disabled = tour === 1;
    this.next.disabled = tour === STEPS.length;
  }
}
