// The tab as a whole: its state, what it asks the server for, and its panes.

import { fetchImages, fetchRuns } from "./api.js";
import { classify } from "./asking.js";
import { Chooser } from "./chooser.js";
import { make, write } from "./dom.js";
import { fillPatches, moved, onlyHead, toggleHeads } from "./edits.js";
import { readAddress, takeFocus, watchAddress, watchTheme, writeAddress } from "./host.js";
import { listen } from "./keyboard.js";
import { MEAN, middleOf, nearest, range, tokenName, tokenOf } from "./maths.js";
import { Pane, hasOtherGrid } from "./pane.js";
import { open } from "./photo.js";
import { scalesOf } from "./scale.js";
import { FUSED, parseState, stateParameters } from "./state.js";
import { Toolbar } from "./toolbar.js";

const POLL = 3000; // milliseconds between questions for new steps
const SPEAK = 500; // milliseconds of rest until a screen reader is told what is shown

export class App {
  state = parseState(readAddress());
  runs = []; // as listed by the server
  pointed = null; // name of the token under the pointer
  brush = "point"; // one of BRUSHES in what_if.js
  brushes = false; // whether the pointer is a brush on the picture
  held = null; // the patch that is being moved or swapped
  photo = null; // a file of the user's, in place of the images
  history = []; // changes before the present ones
  #lists = new Map(); // run → its images, as listed by the server
  #known = null; // JSON of the runs
  #taken = null; // the photo that is being opened
  #left = ""; // the image that was shown when another run was chosen
  #turn = 0;

  constructor(root) {
    this.chooser = new Chooser((image) => {
      this.photo = null;
      this.history.forEach((before) => (before.photo = null));
      this.set({ image });
    });
    this.panes = [new Pane(this, "a"), new Pane(this, "b")];
    this.toolbar = new Toolbar(this);
    this.banner = make("p", { class: "banner", role: "alert", hidden: true });
    this.spoken = make("p", { class: "unseen", "aria-live": "polite" });
    const different = "These are different images.";
    this.notice = make("p", { class: "notice", role: "status", hidden: true }, different);
    const panes = this.panes.map((pane) => pane.element);
    this.main = make("main", { id: "panes" }, this.notice, ...panes);
    this.body = make("div", "body", this.chooser.element, this.main);
    this.empty = emptyState();
    this.waiting = make("p", "empty quiet", "Loading …");
    const { canvas } = this.panes[0].picture;
    root.addEventListener("chosen", () => canvas.focus({ preventScroll: true }));
    root.append(this.toolbar.element, this.body, this.empty, this.waiting, this.banner, this.spoken);
    this.toolbar.element.hidden = this.body.hidden = this.empty.hidden = true;
  }

  async start() {
    watchTheme(() => this.layout());
    watchAddress((parameters) => {
      this.state = parseState(parameters);
      this.refresh();
      takeFocus();
    });
    new ResizeObserver(() => this.layout()).observe(this.main);
    listen(this, this.toolbar);
    takeFocus();
    listenForPhotos((file) => this.takePhoto(file));
    window.attentionTab = this;
    window.attention = { classify: (...asked) => classify(this, ...asked) };
    await this.#poll();
  }

  /** Ask for new runs and steps, again and again; not while another tab of TensorBoard is open. */
  async #poll() {
    if (!this.#known || document.documentElement.clientWidth > 0) {
      try {
        await this.#update(await fetchRuns());
        this.banner.hidden = true;
      } catch (error) {
        write(this.banner, `${error.message} Trying again every ${POLL / 1000} seconds.`);
        this.banner.hidden = false;
        this.#known = null; // so that everything is asked for again
      }
    }
    setTimeout(() => this.#poll(), POLL);
  }

  async #update(runs) {
    const known = JSON.stringify(runs);
    if (known === this.#known) return;
    for (const { name, wall_time } of runs) {
      if (!this.#lists.has(name) || this.newsOf(name) === wall_time) continue;
      if (name === this.state.run || name === this.state.run2) {
        this.#follow(name, await fetchImages(name));
      } else this.#lists.delete(name);
    }
    [this.runs, this.#known] = [runs, known];
    await this.refresh();
  }

  /** Take over new images of a run; a pane that shows the newest step goes on to the newest. */
  #follow(run, list) {
    const { state } = this;
    const { step, step2 } = state;
    const lastOf = ({ images }, tag) => images.find((one) => one.tag === tag)?.steps.at(-1)?.step;
    const next = (step, tag) =>
      step === lastOf(this.#lists.get(run), tag) ? (lastOf(list, tag) ?? step) : step;
    if (state.run === run) state.step = next(state.step, state.image);
    if (state.run2 === run) state.step2 = next(state.step2, this.secondImage());
    if (state.linked === "yes" && state.run2) {
      if (state.step !== step) state.step2 = null;
      else if (state.step2 !== step2 && step2 === step) state.step = state.step2;
    }
    const before = this.#lists.get(run).images.map(({ tag }) => tag);
    this.#lists.set(run, inOrder(list, before));
  }

  /** Change the state and show it. */
  set(changes) {
    Object.assign(this.state, changes);
    return this.refresh();
  }

  /** Show the state: fill in what it leaves open, load what it names. */
  refresh() {
    this.ready = this.#refresh();
    return this.ready;
  }

  async #refresh() {
    const turn = ++this.#turn;
    const { state } = this;
    this.waiting.hidden = true;
    this.empty.hidden = this.runs.length > 0;
    this.toolbar.element.hidden = this.body.hidden = this.runs.length === 0;
    if (this.runs.length === 0) return;
    if (!state.run) state.run = latest(this.runs).name;
    const problems = new Map();
    for (const run of new Set([state.run, state.run2].filter(Boolean))) {
      try {
        if (!this.runs.some((one) => one.name === run)) {
          throw new Error(
            `There is no run ${run} with attention in this log directory; choose another one.`,
          );
        }
        if (!this.#lists.has(run)) this.#lists.set(run, inOrder(await fetchImages(run)));
      } catch (error) {
        problems.set(run, error.message);
      }
    }
    if (turn !== this.#turn) return;
    const images = this.#lists.get(state.run)?.images ?? [];
    if (!state.image) state.image = this.#imageOf(state.run, this.#left);
    const first = this.#wanted(state.run, state.image, state.step, problems);
    state.step ??= first.at?.step ?? null; // what was asked for, though the nearest is shown
    let otherStep = state.step2;
    if (otherStep === null && state.linked === "yes") otherStep = state.step;
    const image2 = this.secondImage();
    const wanted = state.run2 && this.#wanted(state.run2, image2, otherStep, problems);
    const second = wanted && { ...wanted, beside: first };
    if (second) state.step2 = otherStep ?? second.at?.step ?? null;
    this.main.classList.toggle("two", Boolean(second));
    this.panes[1].element.hidden = !second;
    this.chooser.render(images, this.photo ? { ...state, image: null } : state);
    const shown = Promise.all([this.panes[0].show(first), second && this.panes[1].show(second)]);
    this.toolbar.render(images);
    this.#remember();
    await shown;
    if (turn !== this.#turn) return;
    this.toolbar.render(images); // with the classes of what has been loaded
    const [one, other] = this.panes.map((pane) => pane.record?.details.image);
    this.notice.hidden = !(second && one && other && one !== other);
    if (state.view === "features") this.layout(); // each side shows the other one's image, too
    // On the scales of all that has been loaded.
    this.paint();
    this.toolbar.tour.render();
  }

  /** Return an image of a run: the one with a tag, else its first; empty if it has none. */
  #imageOf(run, tag) {
    const images = this.#lists.get(run)?.images ?? [];
    return (images.find((one) => one.tag === tag) ?? images[0])?.tag ?? "";
  }

  /** Return the image of the second pane. */
  secondImage() {
    const { run2, image, image2 } = this.state;
    return image2 || this.#imageOf(run2, image);
  }

  /** Return what a pane is to show: the step, or the nearest that exists. */
  #wanted(run, tag, step, problems) {
    if (problems.has(run)) return { run, images: [], problem: problems.get(run) };
    const { images, problems: damaged = [] } = this.#lists.get(run);
    const image = images.find((one) => one.tag === tag);
    if (!image) {
      const problem = `Run ${run} has no image ${tag}; choose another one.`;
      return { run, images, problem: [problem, ...damaged].join(" ") };
    }
    const steps = image.steps.map((one) => one.step);
    const at = steps.indexOf(step === null ? steps.at(-1) : nearest(steps, step));
    return { run, images, image, at: image.steps[at] };
  }

  #remember() {
    clearTimeout(this.remembering);
    this.remembering = setTimeout(() => writeAddress(stateParameters(this.state)), 200);
  }

  layout() {
    this.panes.forEach((pane) => pane.layout());
  }

  /** Return the scales of all that is shown: both panes share them, to be comparable. */
  scales() {
    return scalesOf(
      this.state.contrast,
      this.panes.flatMap((pane) => pane.onScale()),
    );
  }

  /** Paint before the next frame, once however often this is called. */
  paint() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.panes.forEach((pane) => pane.element.hidden || pane.paint());
      clearTimeout(this.speaking);
      this.speaking = setTimeout(() => write(this.spoken, this.panes[0].read()), SPEAK);
    });
  }

  /** Note the token under the pointer, or null; `brushes`: to change it, not to look from it. */
  point(name, brushes = false) {
    this.brushes = brushes;
    if (name === this.pointed) return;
    this.pointed = name;
    this.paint();
  }

  /** Keep a token, or release it if it is kept already. */
  pin(name) {
    this.#keep(this.state.token === name ? "" : name);
  }

  #keep(token) {
    this.state.token = token;
    this.#remember();
    this.paint();
  }

  /** Keep the patch next to the one in question. */
  movePatch(down, right) {
    const { record } = this.panes[0];
    if (record) this.#keep(nextPatch(record, this.state.token || this.pointed, down, right));
  }

  /** Keep the next of the tokens that are no patches. */
  nextToken() {
    const { record } = this.panes[0];
    if (record) this.#keep(nextSpecial(record, this.state.token));
  }

  /** Return what tells whether a run has something new. */
  newsOf(run) {
    return this.runs.find((one) => one.name === run)?.wall_time;
  }

  /** Return the second image: the one that is chosen, or the next in the list. */
  secondOf(images) {
    const { image, second } = this.state;
    const next = images[(images.findIndex(({ tag }) => tag === image) + 1) % images.length];
    return images.find(({ tag }) => tag === second) ?? next;
  }

  isChanged() {
    return Boolean(this.state.mute || this.state.patches || this.photo);
  }

  canAsk() {
    return this.panes.some((pane) => pane.isLive && !pane.element.hidden);
  }

  /** Change the model or the image; `along`: as a part of the change before. */
  edit(changes, along = false) {
    if (!this.canAsk()) return this.toolbar.say(this.panes[0].liveNote);
    return this.#change(changes, along);
  }

  #change({ photo = this.photo, ...others }, along = false) {
    const { mute, patches } = this.state;
    if (!along) this.history.push({ mute, patches, photo: this.photo });
    this.photo = photo;
    return this.set(others);
  }

  /** Take back the last change; those that changed nothing do not count. */
  undo() {
    const now = { ...this.state, photo: this.photo };
    const differs = (before) => Object.entries(before).some(([name, value]) => value !== now[name]);
    while (this.history.length) {
      const before = this.history.pop();
      if (differs(before)) return this.#change(before, true);
    }
    return this.refresh();
  }

  reset() {
    if (this.isChanged()) this.#change({ mute: "", patches: "", photo: null });
  }

  /** Show a photo in place of the images, if it can be read; null takes it away. */
  async takePhoto(photo) {
    const shown = this.state.image;
    this.#taken = photo;
    try {
      if (photo) (await open(photo)).close();
    } catch (error) {
      return this.toolbar.say(`${photo.name}: ${error.message}`);
    }
    if (this.#taken !== photo || this.state.image !== shown) return undefined; // by now, another is chosen
    return photo ? this.edit({ photo }) : this.#change({ photo });
  }

  muteHeads(heads) {
    return this.edit({ mute: toggleHeads(this.state.mute, heads) });
  }

  /** Mute the chosen "head", its "layer", or the "others" of its layer; or unmute them. */
  mute(what) {
    const [{ record }] = this.panes;
    if (!record) return;
    const { layer, head } = this.panes[0].seen();
    if (what !== "layer" && FUSED.includes(head)) {
      this.toolbar.say("Choose a head first: click its map.");
      return;
    }
    const all = range(record.heads).map((one) => [layer, one]);
    const others = all.filter(([, one]) => one !== head);
    if (what === "others") this.edit({ mute: onlyHead(this.state.mute, [layer, head], others) });
    else this.muteHeads(what === "head" ? [[layer, head]] : all);
  }

  /** Return what a click does to patches: nothing without a model to ask. */
  brushNow() {
    return this.canAsk() ? this.brush : "point";
  }

  takeBrush(brush) {
    this.brush = brush;
    this.held = null;
    return this.refresh();
  }

  /** Use the brush on the kept patch. */
  brushKept() {
    if (!this.canAsk()) return this.toolbar.say(this.panes[0].liveNote);
    const { record } = this.panes[0];
    const patch = record ? (tokenOf(this.state.token, record) ?? -1) - record.prefix.length : -1;
    if (patch < 0) return this.toolbar.say("Keep a patch first: click it, or press an arrow key.");
    if (this.brush === "point") this.brush = "mean";
    if (this.held !== null) return this.release(patch);
    this.press(record, patch, false);
    if (this.held !== null) this.toolbar.say("Go to another patch, and press H again.");
    return undefined;
  }

  /** Use the brush on a patch; `along`: in the same stroke as the patch before. */
  press(record, patch, along) {
    const { state } = this;
    const brush = this.brushNow();
    if (brush === "point") {
      if (!along) this.pin(tokenName(record.prefix.length + patch, record));
    } else if (hasOtherGrid(this.panes[0].record, record)) {
      this.held = null;
      this.toolbar.say("Change patches in the first picture: this one has another grid.");
    } else if (brush === "move" || brush === "swap") {
      if (!along) this.held = patch;
    } else {
      const fill = brush === "restore" ? null : brush;
      this.edit({ patches: fillPatches(state.patches, [[patch, fill]]) }, along);
    }
  }

  /** End a stroke: a patch that is being moved arrives. */
  release(patch) {
    const { held, brush, state } = this;
    this.held = null;
    if (held === null || patch === null || patch === held) return;
    const fills = moved(state.patches, held, patch, brush === "swap");
    this.edit({ patches: fillPatches(state.patches, fills) });
  }

  /** Show a run: the image that is shown, if the run has it, else its first one. */
  chooseRun(run) {
    this.#left = this.state.image || this.#left; // empty until the images of a run are listed
    this.set({ run, step: null, image: "", ...(this.state.linked === "yes" && { step2: null }) });
  }

  /** Show another run beside this one, or this run at another step; "" shows one pane. */
  compare(run) {
    const same = run === this.state.run;
    this.set({ run2: run, image2: "", step2: same ? 0 : null, linked: same ? "no" : "yes" });
  }

  chooseStep(side, step) {
    if (step === undefined) return undefined;
    const { linked, run2 } = this.state;
    const both = linked === "yes" && run2;
    return this.set(both ? { step, step2: step } : { [side === "a" ? "step" : "step2"]: step });
  }

  moveStep(by) {
    const [{ steps, slider }] = this.panes;
    return this.chooseStep("a", steps[Number(slider.value) + by]);
  }

  /** Return what is painted, as plain numbers: one object for each pane. */
  numbers() {
    return this.panes.filter((pane) => !pane.element.hidden).map((pane) => pane.numbers());
  }
}

/** Make what the tab shows of a log directory without attention. */
function emptyState() {
  return make(
    "section",
    "empty",
    make("h2", {}, "No attention has been recorded in this log directory."),
    make("p", {}, "To make a small run in two minutes:"),
    make("pre", {}, "vit-train --config shapes\ntensorboard --logdir runs"),
    make("p", {}, "For a run that is finished, or a model of timm:"),
    make("pre", {}, "vit-eval runs/quick maps"),
    make("p", "quiet", "This page looks for new runs every few seconds."),
  );
}

/** Call a function with a photo that is dropped on the page or pasted. */
function listenForPhotos(take) {
  const offered = (event, { files }) => {
    const file = [...files].find(({ type }) => type.startsWith("image/")) ?? files[0];
    if (event.type === "drop" || file) event.preventDefault(); // nothing else is opened
    if (file) take(file);
  };
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => offered(event, event.dataTransfer));
  document.addEventListener("paste", (event) => offered(event, event.clipboardData));
}

/** Return the name of the patch next to a token; of one in the middle, if it is no patch. */
function nextPatch(record, name, down, right) {
  const { rows, columns } = record;
  const prefix = record.prefix.length;
  const token = name ? tokenOf(name, record) : null;
  if (token === null || token < prefix) return tokenName(middleOf(record), record);
  const within = (index, count) => Math.min(Math.max(index, 0), count - 1);
  const row = within(Math.floor((token - prefix) / columns) + down, rows);
  const column = within(((token - prefix) % columns) + right, columns);
  return tokenName(prefix + row * columns + column, record);
}

/** Return the name of the next token that is no patch; after the last comes the mean of patches. */
function nextSpecial(record, name) {
  const names = [MEAN, ...range(record.prefix.length)].map((token) => tokenName(token, record));
  return names[(names.indexOf(name) + 1) % names.length];
}

/**
 * Return what the server lists of a run with its images in order: as before, or else the most
 * confident right prediction first, then the most confident mistake.
 */
function inOrder(list, before = []) {
  const last = (image) => image.steps.at(-1);
  const best = (correct) =>
    list.images
      .filter((image) => last(image).correct === correct)
      .sort((a, b) => last(b).probability - last(a).probability)[0];
  const first = before.length ? before : [best(true), best(false)].map((one) => one?.tag);
  const rank = ({ tag }) => (first.includes(tag) ? first.indexOf(tag) : first.length);
  return { ...list, images: list.images.toSorted((a, b) => rank(a) - rank(b)) };
}

/** Return the newest run, of those with several steps if there are some: they are listed first. */
function latest(runs) {
  const among = runs.filter((run) => run.several_steps === runs[0].several_steps);
  return among.reduce((best, run) => (run.wall_time > best.wall_time ? run : best));
}
