// The list of images, filtered by class and by whether the prediction is right.

import { checkedImage } from "./api.js";
import { make, menu, offer, shortName, write } from "./dom.js";
import { nearest, percent } from "./maths.js";

const OUTCOMES = [
  ["", "right or wrong"],
  ["right", "right"],
  ["wrong", "wrong"],
];

const MOODS = { null: ["", ""], true: ["right", "✓ "], false: ["wrong", "✗ "] };

export class Chooser {
  #label = "";
  #outcome = "";
  #tags = [];
  #shown = "";

  /** @param {function(string): void} choose - Called with an image's tag. */
  constructor(choose) {
    this.choose = choose;
    const again = (change) => (value) => {
      change(value);
      this.render(this.images, this.state);
      if (!this.#tags.includes(this.state.image)) this.step(0); // to the first that remains
    };
    this.labels = menu(
      "Class",
      again((value) => (this.#label = value)),
    );
    this.outcomes = menu(
      "Prediction",
      again((value) => (this.#outcome = value)),
    );
    this.list = make("div", {
      role: "listbox",
      tabindex: "0",
      "aria-label": "Images",
      keydown: (event) => this.#key(event),
    });
    this.note = make("p", "note");
    const parts = [this.labels, this.outcomes, this.list, this.note];
    this.element = make("aside", "chooser", ...parts);
  }

  /** List the images of a run with their predictions at the step that is shown. */
  render(images, state) {
    [this.images, this.state] = [images, state];
    const labels = [
      ...new Set(images.map((image) => image.label).filter((label) => label !== null)),
    ].sort();
    if (!labels.includes(this.#label)) this.#label = "";
    offer(
      this.labels,
      [["", "all classes"], ...labels.map((label) => [label, label])],
      this.#label,
    );
    offer(this.outcomes, OUTCOMES, this.#outcome);
    const rows = images
      .map((image) => ({ image, at: predictionAt(image, state.step) }))
      .filter(
        ({ image, at }) =>
          (this.#label === "" || image.label === this.#label) &&
          (this.#outcome === "" || at.correct === (this.#outcome === "right")),
      );
    this.#tags = rows.map(({ image }) => image.tag);
    write(this.note, rows.length ? "" : "No image matches.");
    this.#draw(rows, state.image);
  }

  #draw(rows, chosen) {
    const shown = JSON.stringify([rows, chosen]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.list.replaceChildren(...rows.map((row, index) => this.#option(row, index, chosen)));
    const index = this.#tags.indexOf(chosen);
    if (index >= 0) {
      this.list.setAttribute("aria-activedescendant", `image-${index}`);
      this.list.children[index].scrollIntoView({ block: "nearest" });
    } else this.list.removeAttribute("aria-activedescendant");
  }

  #option({ image, at }, index, chosen) {
    const words = [make("strong", {}, image.label ?? shortName(image.tag))];
    if (at.prediction !== null) {
      const [mood, mark] = MOODS[at.correct];
      words.push(make("span", mood, mark + at.prediction));
      words.push(make("span", "quiet", percent(at.probability)));
    }
    return make(
      "div",
      {
        role: "option",
        id: `image-${index}`,
        "aria-selected": String(image.tag === chosen),
        title: image.name || image.tag,
        click: () => this.choose(image.tag),
      },
      picture(image.thumbnail),
      make("div", {}, ...words),
    );
  }

  /** Choose another image of the list, `by` places further; the first, if none of it is shown. */
  step(by) {
    const at = this.#tags.indexOf(this.state.image);
    const next = this.#tags[at < 0 ? 0 : at + by];
    if (next !== undefined) this.choose(next);
  }

  #key(event) {
    const by = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.step(by);
  }
}

function predictionAt(image, step) {
  const steps = image.steps.map((one) => one.step);
  const at = nearest(steps, step ?? steps[steps.length - 1]);
  return image.steps[steps.indexOf(at)];
}

function picture(thumbnail) {
  try {
    return make("img", { src: checkedImage(thumbnail), alt: "" });
  } catch {
    return make("span", "no-picture");
  }
}
