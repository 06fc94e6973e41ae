// The two lines above the panes: what is shown, how, and what can be saved.

import { copyLink, saveNumbers, savePicture } from "./exporting.js";
import { make, menu, offer } from "./dom.js";
import { helpDialog } from "./keyboard.js";
import { targetOf, targetsOf } from "./kinds.js";
import { CONTRASTS, DIRECTIONS, FEATURES, ORDERS, OVER, STATISTICS, VIEWS } from "./state.js";
import { WhatIf } from "./what_if.js";

const EXPLAINED = [
  "entropy: 0 if every token attends to a single token, 1 if attention is uniform",
  "distance: mean distance in pixels between patches that attend to each other",
  "sink: fraction of all attention that goes to the token that receives the most",
  "importance: fall of the true class's probability when the head is muted, on held-out images",
].join("\n");
const LISTED = "Runs with recorded attention. python eval.py RUN maps adds that of a finished one.";
const CONTRAST =
  "fixed: 0 to 3, or −3 to 3 if signed; the others: all values that are shown, on both sides";
const NONE = JSON.stringify(null); // no run has this name, because names are quoted

export class Toolbar {
  constructor(app) {
    this.app = app;
    this.runs = menu("Run", (value) => app.chooseRun(JSON.parse(value)), { title: LISTED });
    this.others = menu("Compare with", (value) => app.compare(JSON.parse(value)));
    this.linked = make("input", {
      type: "checkbox",
      change: () => app.set({ linked: this.linked.checked ? "yes" : "no" }),
    });
    this.linkedLabel = make("label", { class: "check" }, this.linked, "same step");
    this.said = make("span", { class: "said", role: "status" });
    this.help = helpDialog();
    this.tabs = Object.entries(VIEWS).map(([view, title]) =>
      make(
        "button",
        {
          type: "button",
          role: "tab",
          id: `tab-${view}`,
          "aria-controls": "panes",
          click: () => app.set({ view }),
          keydown: (event) => this.#moveTab(event),
        },
        title,
      ),
    );
    this.directions = Object.entries(DIRECTIONS).map(([direction, text]) => {
      const input = make("input", {
        type: "radio",
        name: "direction",
        value: direction,
        change: () => app.set({ direction }),
      });
      return { input, label: make("label", {}, input, make("span", {}, text)) };
    });
    this.statistics = menu("Statistic of the heads", (statistic) => app.set({ statistic }), {
      title: EXPLAINED,
    });
    this.over = menu("Images of the statistic", (over) => app.set({ over }));
    this.orders = menu("Order of the heads", (order) => app.set({ order }));
    this.targets = menu("Class that the maps explain", (target) =>
      app.set({ target: Number(target) }),
    );
    this.features = menu("Picture of the features", (feature) => app.set({ feature }));
    this.second = menu("Second image", (second) => app.set({ second }));
    this.contrasts = menu("Contrast", (contrast) => app.set({ contrast }), { title: CONTRAST });
    this.contrast = make("label", {}, "contrast ", this.contrasts);
    this.heat = make("input", {
      type: "checkbox",
      change: () => app.set({ heat: this.heat.checked ? "yes" : "no" }),
    });
    this.whatIf = new WhatIf(app);
    const lines = [this.#first(), this.#second(), this.whatIf.element];
    this.element = make("header", { class: "toolbar" }, ...lines, this.help);
  }

  #first() {
    const button = (text, click, title) => make("button", { type: "button", click, title }, text);
    return make(
      "div",
      { class: "line" },
      make("label", {}, "Run ", this.runs),
      make("label", {}, "compare with ", this.others),
      this.linkedLabel,
      make("span", { class: "space" }),
      this.said,
      button(
        "PNG",
        () => this.#try(() => savePicture(this.app)),
        "Save what is shown as a picture",
      ),
      button(
        "JSON",
        () => this.#try(() => saveNumbers(this.app)),
        "Save the numbers that are shown",
      ),
      button(
        "Copy link",
        () => this.#try(() => copyLink(this.app)),
        "Copy an address that shows the same",
      ),
      button("Keys", () => this.help.showModal(), "Show the keys (?)"),
    );
  }

  #second() {
    this.forHeads = make(
      "div",
      { class: "group" },
      make(
        "div",
        { class: "segments", role: "radiogroup", "aria-label": "Direction" },
        ...this.directions.map((one) => one.label),
      ),
      make("div", { class: "group" }, make("label", {}, "statistic ", this.statistics), this.over),
      make("label", {}, "order ", this.orders),
    );
    this.forMaps = make("div", { class: "group" }, make("label", {}, "class ", this.targets));
    this.forFeatures = make(
      "div",
      { class: "group" },
      make("label", {}, "picture ", this.features),
      make("label", {}, "second image ", this.second),
    );
    return make(
      "div",
      { class: "line" },
      make("div", { class: "tabs", role: "tablist", "aria-label": "View" }, ...this.tabs),
      this.forHeads,
      this.forMaps,
      this.forFeatures,
      make("span", { class: "space" }),
      this.contrast,
      make("label", { class: "check", title: "Colours over the picture" }, this.heat, "overlay"),
    );
  }

  async #try(action) {
    let text;
    try {
      text = await action();
    } catch (error) {
      text = `That failed: ${error.message}`;
    }
    this.say(text);
  }

  /** Say something for a few seconds. */
  say(text) {
    this.said.textContent = text;
    clearTimeout(this.silence);
    this.silence = setTimeout(() => (this.said.textContent = ""), 4000);
  }

  #moveTab(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    const next =
      this.tabs[(this.tabs.indexOf(event.target) + by + this.tabs.length) % this.tabs.length];
    next.focus();
    next.click();
  }

  /** @param {object[]} images - Those of the first pane's run. */
  render(images) {
    const { state, runs, panes } = this.app;
    this.whatIf.render(images);
    const names = runs.map((run) => [JSON.stringify(run.name), run.name]);
    const known = names.some(([, name]) => name === state.run);
    offer(
      this.runs,
      known ? names : [[JSON.stringify(state.run), `${state.run} (not found)`], ...names],
      JSON.stringify(state.run),
    );
    const others = names.map(([value, name]) => [
      value,
      name === state.run ? "this run, another step" : name,
    ]);
    const otherKnown = state.run2 === "" || names.some(([, name]) => name === state.run2);
    if (!otherKnown) others.push([JSON.stringify(state.run2), `${state.run2} (not found)`]);
    offer(
      this.others,
      [[NONE, "nothing"], ...others],
      state.run2 === "" ? NONE : JSON.stringify(state.run2),
    );
    this.linkedLabel.hidden = state.run2 === "";
    this.linked.checked = state.linked === "yes";
    this.tabs.forEach((tab) => {
      const chosen = tab.id === `tab-${state.view}`;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
    });
    this.directions.forEach(({ input }) => (input.checked = input.value === state.direction));
    offer(this.statistics, Object.entries(STATISTICS), state.statistic);
    offer(this.over, Object.entries(OVER), state.over);
    offer(this.orders, Object.entries(ORDERS), state.order);
    offer(this.contrasts, Object.entries(CONTRASTS), state.contrast);
    this.contrast.hidden = state.view === "lens";
    this.forHeads.hidden = state.view !== "heads";
    this.forMaps.hidden = state.view !== "maps";
    this.forFeatures.hidden = state.view !== "features";
    offer(this.features, Object.entries(FEATURES), state.feature);
    const tags = images.map(({ tag, label }) => [tag, label ? `${tag}, ${label}` : tag]);
    offer(this.second, tags, this.app.lender(images, state.second)?.tag);
    this.heat.checked = state.heat === "yes";
    const record = panes.map((pane) => pane.record).find(Boolean);
    if (!record) return;
    const targets = targetsOf(record);
    offer(
      this.targets,
      targets.length
        ? targets.map((target) => [String(target), record.className(target)])
        : [["", "—"]],
      targets.length ? String(targetOf(record, state.target)) : "",
    );
  }
}
