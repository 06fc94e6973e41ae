// The line of the toolbar that changes the model and the image, and what a change did to a pane.

import { describeEdits } from "./edits.js";
import { button, make, menu, offer, write } from "./dom.js";
import { bestOf, percent, range } from "./maths.js";
import { FUSED } from "./state.js";

export const BRUSHES = {
  point: "point only",
  mean: "hide: mean colour",
  blur: "hide: blur",
  other: "hide: another image",
  out: "out of attention",
  move: "move a patch",
  swap: "swap two patches",
  restore: "restore",
};
const ROWS = 6; // classes that are compared
const BRUSH = "What a click or a stroke on the picture does to patches (H: to the kept patch)";
const MUTE = "Leave this head out of its layer's output (M)";
const PHOTO = "Ask about a photo of your own, also dropped or pasted. It stays in this page.";

/** The line of the toolbar. */
export class WhatIf {
  constructor(app) {
    this.app = app;
    this.brush = menu("Brush", (brush) => app.takeBrush(brush), { title: BRUSH });
    const titled = (text, title, click) => button(text, click, { title });
    this.head = titled("", MUTE, () => app.mute("head"));
    this.layer = titled("", "Leave out all heads of the layer (L)", () => app.mute("layer"));
    this.only = titled("", "Leave out the other heads of the layer (O)", () => app.mute("others"));
    this.file = make("input", {
      type: "file",
      accept: "image/*",
      hidden: true,
      change: () => {
        app.takePhoto(this.file.files[0] ?? null);
        this.file.value = ""; // so that the same file can be chosen again
      },
    });
    this.photo = titled("Photo …", PHOTO, () =>
      app.photo ? app.takePhoto(null) : this.file.click(),
    );
    this.undo = titled("Undo", "Take back the last change (U)", () => app.undo());
    this.reset = titled("Reset", "Take back all changes (R)", () => app.reset());
    this.buttons = [this.head, this.layer, this.only];
    this.tools = make(
      "div",
      "group",
      ...this.buttons,
      make("label", {}, "brush ", this.brush),
      this.photo,
      this.file,
      this.undo,
      this.reset,
    );
    this.note = make("span", "quiet");
    this.element = make(
      "div",
      "line what-if",
      make("strong", {}, "What if"),
      this.tools,
      this.note,
    );
  }

  render() {
    const { app } = this;
    const [pane] = app.panes;
    const { record } = pane;
    this.element.hidden = !record;
    if (!record) return;
    const live = app.canAsk();
    this.tools.hidden = !live && !app.isChanged(); // what is changed can be taken back
    this.brush.disabled = !live;
    this.note.title = pane.liveNote;
    write(this.note, pane.liveNote);
    const { layer, head } = pane.seen();
    const muted = new Set(app.state.mute.split(","));
    const fused = FUSED.includes(head);
    const name = fused ? "head" : `head ${head}`;
    const isMuted = (one) => muted.has(`${layer}.${one}`);
    write(this.head, `Mute ${name}`);
    write(this.layer, `Mute layer ${layer}`);
    write(this.only, `Only ${name}`);
    this.head.disabled = this.only.disabled = fused || !live;
    this.layer.disabled = !live;
    this.photo.disabled = !live && !app.photo;
    this.head.title = fused ? "Choose a head first: click its map" : MUTE;
    this.head.setAttribute("aria-pressed", String(!fused && isMuted(head)));
    this.layer.setAttribute("aria-pressed", String(range(record.heads).every(isMuted)));
    offer(this.brush, Object.entries(BRUSHES), app.brush);
    write(this.photo, app.photo ? "Remove the photo" : "Photo …");
    this.undo.disabled = app.history.length === 0;
    this.reset.disabled = !app.isChanged();
  }
}

/** What a change did: in words, and the classes before and after. */
export class Change {
  constructor(choose) {
    this.choose = choose;
    this.words = make("p");
    this.logit = make("p", "logit");
    this.body = make("tbody");
    const titles = ["class", "before", "after", "logit"].map((text) =>
      make("th", { scope: "col" }, text),
    );
    this.device = make("caption", "quiet");
    const head = make("thead", {}, make("tr", {}, ...titles));
    this.table = make("table", {}, this.device, head, this.body);
    this.element = make(
      "div",
      { class: "change", hidden: true },
      this.words,
      this.logit,
      this.table,
    );
  }

  /**
   * @param {object} record - With `change` if the model was asked, see `ask`.
   * @param {?number} target - The class whose logit is written; null is the true one.
   * @param {string} problem - Why a change is not applied; empty if there is none.
   */
  render(record, target, problem) {
    const { change } = record;
    const isChanged = Boolean(change?.isChanged);
    this.element.hidden = !isChanged && problem === "";
    this.table.hidden = this.logit.hidden = !isChanged;
    write(this.words, isChanged ? describeEdits(record, change) : problem);
    if (!isChanged) return write(this.logit, "");
    const { before, after } = change;
    const wanted = target ?? record.details.label;
    const chosen = before.logits[wanted] === undefined ? bestOf(before.logits, 1)[0] : wanted;
    const best = [chosen, ...bestOf(after.logits, 2), ...bestOf(before.logits, ROWS)];
    const shown = [...new Set(best)].slice(0, ROWS);
    shown.sort((a, b) => before.logits[b] - before.logits[a]);
    const [was, is] = [before, after].map(({ logits }) => signed(logits[chosen], ""));
    const by = signed(after.logits[chosen] - before.logits[chosen]);
    write(this.logit, `${record.className(chosen)}: logit ${was} → ${is} (${by})`);
    write(this.device, `${after.device}, ${Math.round(after.milliseconds)} ms`);
    const focused = this.body.contains(document.activeElement) && document.activeElement.title;
    this.body.replaceChildren(
      ...shown.map((index) =>
        make(
          "tr",
          { "aria-selected": String(index === chosen), click: () => this.choose(index) },
          make("th", { scope: "row" }, nameOf(record, index)),
          ...[before, after].map(({ probabilities }) => barOf(probabilities[index])),
          make("td", "number", signed(after.logits[index] - before.logits[index])),
        ),
      ),
    );
    const same = [...this.body.querySelectorAll("button")].find((one) => one.title === focused);
    return same?.focus({ preventScroll: true });
  }
}

/** Make a button with the name of a class, which may be cut off. */
function nameOf(record, index) {
  const name = record.className(index);
  return button(name, null, { title: name });
}

function barOf(probability) {
  const length = make("i", { style: `transform: scaleX(${probability})` });
  return make("td", "number", length, make("span", {}, percent(probability)));
}

function signed(value, plus = "+") {
  return `${value >= 0 ? plus : "−"}${Math.abs(value).toFixed(2)}`;
}
