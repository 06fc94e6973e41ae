// A pane: one image of one run at one step. Two panes stand side by side to be compared.

import { fetchRecord } from "./api.js";
import { ask, cancelAll, liveOf } from "./asking.js";
import { basisOf } from "./basis.js";
import { ColourBar } from "./colour_bar.js";
import { button, make, shortName, write } from "./dom.js";
import { changedPatches } from "./edits.js";
import { numbersOf } from "./exporting.js";
import { FeaturesView, patchesOf, similaritiesOf } from "./features.js";
import { HeadsView } from "./heads.js";
import { MapsView } from "./kinds.js";
import { bar, fill, LensView } from "./lens.js";
import { MEAN, middleOf, percent, range, readToken, tokenName, tokenOf } from "./maths.js";
import { byOffset, recordsToAverage } from "./offsets.js";
import { Picture } from "./picture.js";
import { describe, onScale, show, valuesOf } from "./scene.js";
import { FUSED } from "./state.js";
import { Change } from "./what_if.js";

const MARKS = { right: "✓", wrong: "✗" };
const SLOW = 300; // milliseconds until a pane says that it is loading

export class Pane {
  logged = null; // the record as the server has it
  fetched = Promise.resolve(null); // the record that is wanted, of a turn that may not be shown
  record = null; // what is shown: the same, or what the live model makes of it
  isLive = false;
  liveNote = "";
  images = []; // of the run, as listed by the server
  steps = []; // of the image
  compared = []; // {record, features} of this image and of the second one
  averaged = []; // records whose attention by offset is shown
  #turn = 0;
  #painted = 0; // the turn that is shown
  #key = null; // of the image and step that are wanted
  #probe = null; // map and token under the pointer in the layers x heads
  #memory = {};

  constructor(app, side) {
    this.app = app;
    this.side = side;
    const nameOf = (patch) =>
      patch === null ? null : tokenName(this.record.prefix.length + patch, this.record);
    const point = (patch) => app.point(nameOf(patch));
    this.picture = new Picture({
      point: (patch) => app.point(nameOf(patch), app.brushNow() !== "point"),
      press: (patch, along) => app.press(this.record, patch, along),
      release: (patch) => app.release(patch),
    });
    this.views = {
      heads: new HeadsView({
        choose: (layer, head) => app.set({ layer, head }),
        mute: (layer, head) => app.muteHeads([[layer, head]]),
        point: (probe) => {
          this.#probe = probe;
          app.paint();
        },
      }),
      maps: new MapsView({ choose: (map) => app.set({ map }), point }),
      lens: new LensView({ choose: (layer) => app.set({ layer }), point }),
      features: new FeaturesView({ choose: (chosen) => app.set(chosen), point }),
    };
    this.#build();
  }

  #build() {
    this.title = make("h2");
    this.file = make("p", "file quiet");
    this.caption = make("p", "caption");
    this.box = make("div", "box", this.picture.canvas);
    this.chips = make("div", {
      class: "chips",
      role: "group",
      "aria-label": "Tokens other than patches",
    });
    this.colourBar = new ColourBar();
    this.lines = range(3).map(() => make("p"));
    this.readout = make("div", "readout", ...this.lines);
    this.slider = make("input", {
      type: "range",
      min: 0,
      "aria-label": "Step",
      input: () => this.app.chooseStep(this.side, this.steps[Number(this.slider.value)]),
    });
    this.step = make("output");
    this.top = range(5).map(() => bar());
    this.bars = make("div", {}, ...this.top.map((one) => one.element));
    this.change = new Change((target) => this.app.set({ target }));
    this.working = make(
      "p",
      "working",
      "The model is working … ",
      button("Cancel", () => cancelAll()),
    );
    this.host = make("div", "host");
    this.content = make(
      "div",
      "content",
      make(
        "div",
        "left",
        make("div", "captions", this.file, this.caption),
        this.box,
        this.chips,
        make("div", "top", this.working, this.change.element, this.bars),
        this.colourBar.element,
        this.readout,
      ),
      this.host,
    );
    this.message = make("p", { class: "message", role: "status" });
    this.element = make(
      "section",
      "pane",
      make("header", {}, this.title, make("div", "steps", this.slider), this.step),
      this.message,
      this.content,
    );
  }

  /** Show an image at a step, as soon as it is loaded; until then what was shown before. */
  async show(wanted) {
    const turn = ++this.#turn;
    // While a patch is brushed, each answer is shown, though the question is no longer the last.
    const key = JSON.stringify([wanted.run, wanted.image?.tag, wanted.at]);
    this.#key = key;
    const isCurrent = () => turn === this.#turn || (key === this.#key && turn > this.#painted);
    this.#writeSteps(wanted);
    this.images = wanted.images;
    if (wanted.problem) {
      this.element.classList.remove("loading");
      return this.#fail(wanted.problem);
    }
    if (!this.record) this.#say("Loading …");
    this.working.hidden = true; // until a model is asked
    const slow = setTimeout(
      () => turn === this.#turn && this.element.classList.add("loading"),
      SLOW,
    );
    try {
      this.fetched = fetchRecord(wanted.run, wanted.image, wanted.at);
      const logged = await this.fetched;
      // Patches that were changed in another grid are other places here.
      if (this.side === "a" && turn === this.#turn && hasOtherGrid(this.logged, logged)) {
        for (const change of this.app.history) change.patches = "";
        if (this.app.state.patches) return this.app.set({ patches: "" });
      }
      const record = await this.#ask(logged, wanted, turn);
      if (record === null) return undefined;
      const compared = record.change ? [] : await this.#features(wanted);
      const averaged = await recordsToAverage(record, wanted, this.app.state);
      if (!isCurrent()) return undefined;
      this.#painted = turn;
      if (this.logged !== logged) this.logged?.weights?.forget();
      this.logged = logged;
      this.record = record;
      this.compared = compared;
      this.averaged = averaged;
      this.#memory = {};
      this.#say("");
      this.layout();
    } catch (error) {
      if (turn === this.#turn) this.#fail(error.message);
    } finally {
      clearTimeout(slow);
      if (turn === this.#turn) this.element.classList.remove("loading");
    }
    return undefined;
  }

  /**
   * Return what the live model makes of a record: the record itself if nothing is changed, null if
   * a newer question took the place of this one.
   */
  async #ask(logged, { run, images }, turn) {
    const { app } = this;
    const say = (note) => turn === this.#turn && (this.liveNote = note);
    try {
      const live = await liveOf(run, app.newsOf(run));
      const isLive = live.steps.some(({ step }) => step === logged.step);
      if (turn === this.#turn) this.isLive = isLive;
      say(noteOf(live, logged.step));
      if (!isLive || !app.isChanged()) return logged;
      const first = await app.panes[0].fetched.catch(() => null);
      if (app.state.patches && this.side === "b" && hasOtherGrid(first, logged))
        throw new Error("Nothing is changed here, because the grids of patches differ.");
      const lender = app.state.patches.includes("other") && app.secondOf(images);
      if (lender && !app.photo && lender.tag === logged.tag)
        throw new Error("There is no other image; choose a second image.");
      const other = lender && (await fetchRecord(run, lender, lender.steps.at(-1)));
      const { mute, patches } = app.state;
      const question = { live, mute, patches, photo: app.photo, other };
      const asked = this.logged === logged && this.record.change;
      const isAnswered = Object.keys(question).every((name) => question[name] === asked?.[name]);
      if (turn === this.#turn) this.working.hidden = isAnswered;
      // The same record is not drawn again, so that a button keeps the focus.
      return isAnswered ? this.record : await ask(logged, question, this.side);
    } catch (error) {
      if (error.name === "AbortError" && turn !== this.#turn) return null;
      say(error.message);
      return logged;
    }
  }

  /** Return the patches of the image and of the second one, if they are shown. */
  async #features(wanted) {
    if (this.app.state.view !== "features") return [];
    const { run, image, images, beside } = wanted;
    const both = [...new Set([image, this.app.secondOf(images)])];
    const [own, ...others] = await Promise.all(both.map((one) => patchesOf(one, wanted)));
    if (!own) return [];
    const basis = beside?.at && beside.run !== run ? await basisOf(beside, wanted) : null;
    return [{ ...own, features: own.features.in(basis) }, ...others.filter(Boolean)];
  }

  #fail(problem) {
    this.logged = this.record = null;
    this.compared = [];
    this.#say(problem, true);
  }

  /** Say something instead of showing the record; nothing shows the record. */
  #say(text, wrong = false) {
    write(this.message, text);
    this.message.hidden = text === "";
    this.message.classList.toggle("wrong", wrong);
    this.content.hidden = text !== "";
  }

  #writeSteps({ run, image, at }) {
    write(this.title, run);
    this.title.title = run;
    this.steps = image?.steps.map((one) => one.step) ?? [];
    this.slider.max = Math.max(0, this.steps.length - 1);
    const number = at ? this.steps.indexOf(at.step) : 0;
    this.slider.value = number;
    this.slider.disabled = this.steps.length < 2;
    const text = at ? `step ${at.step.toLocaleString("en")}` : "";
    write(this.step, at ? `${text} (${number + 1} of ${this.steps.length})` : "");
    this.slider.setAttribute("aria-valuetext", text);
  }

  /** Return the step that is wanted, or the nearest that exists. */
  chosenStep() {
    return this.steps[Number(this.slider.value)];
  }

  /** Arrange everything for the record and the size of the window, then paint. */
  layout() {
    const { record, app } = this;
    if (!record || this.box.clientWidth === 0) return;
    const view = this.views[app.state.view];
    this.#probe = null;
    this.arranged = this.#arrangement();
    if (this.host.firstChild !== view.element) this.host.replaceChildren(view.element);
    const height = Math.max(160, Math.min(640, window.innerHeight - 410));
    this.picture.layout(record, this.box.clientWidth, height);
    this.#writeCaption();
    this.#writeChips();
    this.chips.hidden = this.seen().direction === "offset"; // of patches alone
    const usable = app.state.view !== "heads" || record.weights !== null;
    const free = Math.max(160, window.innerHeight - 240); // without scrolling
    if (usable) view.layout(record, this.seen(), this.host.clientWidth, free);
    else
      this.host.replaceChildren(make("p", "note", `${record.missing} See Maps and Predictions.`));
    this.paint();
  }

  #writeCaption() {
    const { details, className } = this.record;
    const isIgnored = this.app.isChanged() && !this.record.change;
    const why = isIgnored ? `This shows the model without the change. ${this.liveNote}` : "";
    this.change.render(this.record, this.app.state.target, why);
    this.bars.hidden = Boolean(this.record.change?.isChanged);
    write(this.file, shortName(details.name));
    this.file.title = details.name;
    this.caption.replaceChildren(...captionOf(this.record));
    this.top.forEach((line, rank) => {
      const [index, probability] = details.top[rank] ?? [null, 0];
      fill(line, index === null ? "" : className(index), probability);
    });
  }

  #writeChips() {
    const tokens = [MEAN, ...range(this.record.prefix.length)];
    const names = tokens.map((token) => tokenName(token, this.record));
    if (JSON.stringify(names) === this.chipNames) return;
    this.chipNames = JSON.stringify(names);
    this.chipParts = names.map((name, index) => {
      const swatch = make("i", "swatch");
      const value = make("span", "number");
      const contents = tokens[index] === MEAN ? name : [swatch, name, value];
      const element = button(contents, () => this.app.pin(name), {
        class: "chip",
        pointerenter: () => this.app.point(name),
        pointerleave: () => this.app.point(null),
      });
      return { element, swatch, value, token: tokens[index] };
    });
    this.chips.replaceChildren(...this.chipParts.map((part) => part.element));
  }

  /** Return the state with what this record has: its layers, its heads. */
  seen() {
    const { record } = this;
    const { state } = this.app;
    const layer = Math.min(state.layer ?? record.layers - 1, record.layers - 1);
    const head = FUSED.includes(state.head) || state.head < record.heads ? state.head : "mean";
    const beside = state.run2 ? this.app.panes.find((pane) => pane !== this).compared : [];
    const compared = this.compared.length ? [...this.compared, ...beside.slice(0, 1)] : [];
    const isOther = state.direction === "offset" && state.view !== "heads";
    const direction = isOther ? "to" : state.direction;
    const { averaged } = this;
    const { statistics } = record.details;
    return { ...state, layer, head, direction, statistics, compared, averaged };
  }

  /** Return what the places of all maps depend on, besides the record. */
  #arrangement() {
    const { view, direction } = this.seen();
    return view + (direction === "offset");
  }

  /** Return everything that the next painting shows. */
  #scene() {
    const { record, app } = this;
    const state = this.seen();
    const pinned = tokenOf(state.token, record);
    const pointer = app.pointed === null ? null : tokenOf(app.pointed, record);
    const isByOffset = state.direction === "offset";
    const ofPatches = isByOffset || state.view === "features"; // other tokens have no place, no features
    const byDefault = ofPatches ? MEAN : readToken(record);
    let token = pinned ?? (app.brushes ? null : pointer) ?? byDefault;
    if (isByOffset && token < record.prefix.length) token = middleOf(record);
    const isShown = state.view === "heads" && record.weights;
    const attention = isShown ? this.#attention(token, state.direction) : null;
    const scene = { state, token, pinned: pinned !== null, pointer, attention, probe: this.#probe };
    scene.similar = similaritiesOf(record, state.compared, token);
    scene.values = attention && valuesOf(attention, state.layer, state.head);
    return scene;
  }

  #attention(token, direction) {
    const isByOffset = direction === "offset";
    const key = isByOffset ? direction : [token, direction].join();
    if (this.#memory.key !== key) {
      const { weights } = this.record;
      this.#memory = {
        key,
        attention: isByOffset ? byOffset(this.averaged) : weights.of(token, direction),
      };
    }
    return this.#memory.attention;
  }

  /** Return what has to be on the scales, see `scalesOf`. */
  onScale() {
    return this.record && !this.element.hidden ? onScale(this.record, this.#scene()) : [];
  }

  /** Paint what depends on the pointer; nothing changes its size. */
  paint() {
    const { record, app } = this;
    if (!record || !this.picture.size) return undefined;
    if (this.arranged !== this.#arrangement()) return this.layout(); // which paints
    const scene = { ...this.#scene(), scales: app.scales() };
    const { state, token, pointer, scales } = scene;
    const prefix = record.prefix.length;
    const patchOf = (one) => (one !== null && one >= prefix ? one - prefix : null);
    const shown = show(record, scene);
    // What is dark on a sequential scale is transparent, so that the picture keeps its colours.
    const base = state.view === "heads" && !shown.scale.signed ? record.colour : record.grey;
    const colourOf = state.heat === "yes" ? shown.colourOf : null;
    const isThere = this.isLive && !hasOtherGrid(app.panes[0].record, record);
    this.picture.paint(
      record,
      { colourOf, base },
      {
        patch: patchOf(token),
        pinned: scene.pinned,
        pointer: patchOf(pointer),
        changed: isThere ? changedPatches(state.patches, record) : new Map(),
      },
    );
    const view = this.views[state.view];
    if (scene.attention) view.paint(scene.attention, token, scales);
    if (state.view === "maps") view.paint(record, patchOf(pointer ?? token), scales);
    if (state.view === "features") view.paint(scene.similar, patchOf(token), scales.similarity);
    if (state.view === "lens" && record.details.lens)
      view.paint(record, token, describe(token, record));
    for (const chip of this.chipParts) {
      chip.element.setAttribute("aria-pressed", String(chip.token === token));
      chip.swatch.style.background = shown.swatch(chip.token);
      write(chip.value, shown.number(chip.token));
    }
    this.lines.forEach((line, index) => write(line, shown.lines[index] ?? ""));
    this.colourBar.paint(shown, state.view !== "lens", Boolean(state.run2));
    this.painted = { scene, shown };
  }

  /** Return the lines below the picture as one text. */
  read() {
    return [this.change.words, this.change.logit, ...this.lines]
      .map((line) => line.textContent)
      .filter(Boolean)
      .join(". ");
  }

  /** Return what is painted as plain numbers. */
  numbers() {
    const { record, painted } = this;
    if (!record || !painted) return { problem: this.message.textContent };
    return numbersOf(record, painted.scene, painted.shown);
  }
}

/** Tell whether two records have different grids of patches. */
export function hasOtherGrid(first, second) {
  return first && (first.rows !== second.rows || first.columns !== second.columns);
}

/** Say why a step is not live, and which steps are; nothing if all are. */
function noteOf({ steps, note }, step) {
  const live = steps.map((one) => one.step);
  if (live.includes(step)) return note && `Live: step ${live.join(", ")}; ${note}.`;
  const others = live.length ? ` (${live.join(", ")} are)` : "";
  return `Step ${step} is not live${others}: ${note || "its weights are not stored, or damaged"}.`;
}

/** Return the parts of a record's caption; its tag if no class is known. */
function captionOf({ details, className, tag }) {
  const { label, top } = details;
  const parts = [];
  if (label !== null) parts.push(make("span", {}, "true ", make("strong", {}, className(label))));
  if (top.length) {
    const [index, probability] = top[0];
    const mark = label === null ? "" : index === label ? "right" : "wrong";
    parts.push(
      make("span", {}, "predicted ", make("strong", {}, className(index))),
      make(
        "span",
        { class: "fixed", title: "of the model as trained, without calibration" },
        `${percent(probability)} `,
        mark === "" ? null : make("b", { class: mark, "aria-label": mark }, MARKS[mark]),
      ),
    );
  }
  return parts.length ? parts : [make("span", {}, tag)];
}
