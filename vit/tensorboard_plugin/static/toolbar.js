// The two lines above the panes: what is shown, how, and what can be saved.

import { copyLink, saveNumbers } from "./exporting.js";
import { button, make, menu, offer } from "./dom.js";
import { helpDialog } from "./keyboard.js";
import { targetOf, targetsOf } from "./kinds.js";
import { CONTRASTS, DIRECTIONS, ORDERS, STATISTICS, VIEWS } from "./state.js";
import { Tour } from "./tour.js";
import { WhatIf } from "./what_if.js";

const EXPLAINED = [
  "entropy: 0 if every token attends to a single token, 1 if attention is uniform",
  "distance: mean distance in pixels between patches that attend to each other",
  "sink: fraction of all attention that goes to the token that receives the most",
  "importance: fall of the true class's probability when the head is muted, on held-out images",
].join("\n");
const LISTED = "Runs with recorded attention. vit-eval RUN maps adds that of a finished one.";
const CONTRAST = [
  "fixed: 0 to 3, or −3 to 3 if signed",
  "automatic: all values that are shown, on both sides",
  "fixed unless even: automatic for the large map where fixed would show one even colour",
].join("\n");

// Menus of a part of the state: its options, the name of the menu, and what explains it.
const MENUS = {
  direction: [DIRECTIONS, "Direction"],
  statistic: [STATISTICS, "Statistic of the heads", EXPLAINED],
  order: [ORDERS, "Order of the heads"],
  contrast: [CONTRASTS, "Contrast", CONTRAST],
};

export class Toolbar {
  constructor(app) {
    this.app = app;
    this.runs = menu("Run", (run) => app.chooseRun(run), { title: LISTED });
    this.others = menu("Compare with", (run) => app.compare(run));
    this.linked = this.#checkbox("linked", { step2: null });
    this.image2 = menu("Image of the second pane", (image2) => app.set({ image2 }));
    this.comparing = make(
      "span",
      "group",
      make("label", {}, "image ", this.image2),
      make("label", "check", this.linked, "same step"),
    );
    this.said = make("span", { class: "said", role: "status" });
    this.help = helpDialog();
    this.tabs = Object.entries(VIEWS).map(([view, title]) =>
      button(title, () => app.set({ view }), {
        role: "tab",
        id: `tab-${view}`,
        "aria-controls": "panes",
      }),
    );
    this.menus = Object.fromEntries(
      Object.entries(MENUS).map(([name, [, label, title]]) => [
        name,
        menu(label, (value) => app.set({ [name]: value }), { title }),
      ]),
    );
    this.targets = menu("Class that the maps explain", (target) =>
      app.set({ target: Number(target) }),
    );
    this.second = menu("Second image", (second) => app.set({ second }));
    this.contrast = make("label", {}, "contrast ", this.menus.contrast);
    this.heat = this.#checkbox("heat");
    this.whatIf = new WhatIf(app);
    this.tour = new Tour(app);
    const lines = [this.#firstLine(), this.#secondLine(), this.whatIf.element, this.tour.element];
    this.element = make("header", "toolbar", ...lines, this.help);
  }

  /** Make a checkbox of a part of the state; `ticked`: what else changes when it is ticked. */
  #checkbox(name, ticked = {}) {
    const change = ({ target }) =>
      this.app.set(target.checked ? { [name]: "yes", ...ticked } : { [name]: "no" });
    return make("input", { type: "checkbox", change });
  }

  #firstLine() {
    const { app } = this;
    return make(
      "div",
      "line",
      make("label", {}, "Run ", this.runs),
      make("label", {}, "compare with ", this.others),
      this.comparing,
      make("span", "space"),
      this.said,
      this.tour.open,
      button("JSON", () => this.say(saveNumbers(app)), {
        title: "Save the numbers that are shown",
      }),
      button("Copy link", async () => this.say(await copyLink(app)), {
        title: "Copy an address that shows the same",
      }),
      button("Keys", () => this.help.showModal(), { title: "Show the keys (?)" }),
    );
  }

  #secondLine() {
    const { direction, statistic, order } = this.menus;
    const group = (...parts) => make("div", "group", ...parts);
    const labelled = (text, one) => make("label", {}, text, one);
    this.groups = {
      heads: group(direction, labelled("statistic ", statistic), labelled("order ", order)),
      maps: group(labelled("class ", this.targets)),
    };
    this.secondLabel = labelled("second image ", this.second);
    return make(
      "div",
      "line",
      make("div", { class: "tabs", role: "tablist", "aria-label": "View" }, ...this.tabs),
      ...Object.values(this.groups),
      this.secondLabel,
      make("span", "space"),
      this.contrast,
      make("label", { class: "check", title: "Colours over the picture" }, this.heat, "overlay"),
    );
  }

  /** Say something for a few seconds. */
  say(text) {
    this.said.textContent = text;
    clearTimeout(this.silence);
    this.silence = setTimeout(() => (this.said.textContent = ""), 4000);
  }

  render(images) {
    const { app, tabs } = this;
    const { state } = app;
    this.whatIf.render();
    this.#renderRuns(app.runs, state);
    for (const tab of tabs)
      tab.setAttribute("aria-selected", String(tab.id === `tab-${state.view}`));
    for (const [name, [options]] of Object.entries(MENUS))
      offer(this.menus[name], Object.entries(options), state[name]);
    for (const [view, group] of Object.entries(this.groups)) group.hidden = view !== state.view;
    this.contrast.hidden = state.view === "lens";
    const named = ({ tag, label }) => [tag, label ? `${tag}, ${label}` : tag];
    offer(this.second, images.map(named), app.secondOf(images)?.tag);
    const lends = app.brush === "other" || state.patches.includes("other");
    this.secondLabel.hidden = state.view !== "features" && !lends;
    const others = app.panes[1].images.map(named);
    const second = app.secondImage();
    const chosen2 = second === state.image ? state.image2 : second;
    offer(this.image2, [["", "the same"], ...others], chosen2);
    this.heat.checked = state.heat === "yes";
    const panes = app.panes.filter(({ record, element }) => record && !element.hidden);
    const shown = panes.map((pane) => pane.record);
    const record = shown.find((one) => targetsOf(one).length) ?? shown[0];
    if (!record) return;
    const targets = targetsOf(record).map((target) => [String(target), record.className(target)]);
    const chosen = String(targetOf(record, state.target) ?? "");
    offer(this.targets, targets.length ? targets : [["", "—"]], chosen);
  }

  #renderRuns(runs, { run, run2, linked }) {
    const options = runs.map(({ name }) => [name, name]);
    offer(this.runs, options, run);
    const others = options.map(([name]) => [name, name === run ? "this run, another step" : name]);
    offer(this.others, [["", "nothing"], ...others], run2);
    this.comparing.hidden = run2 === "";
    this.linked.checked = linked === "yes";
  }
}
