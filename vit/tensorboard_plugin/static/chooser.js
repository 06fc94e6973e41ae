// The list of images, with their predictions at the step that is shown.

import { button, make, shortName } from "./dom.js";
import { nearest, percent } from "./maths.js";

const MOODS = { null: ["", ""], true: ["right", "✓ "], false: ["wrong", "✗ "] };

export class Chooser {
  #shown = "";
  #chosen = ""; // the run and the image to which the list was scrolled

  /** Call `choose` with an image's tag. */
  constructor(choose) {
    this.choose = choose;
    this.element = make("aside", { class: "chooser", "aria-label": "Images" });
  }

  render(images, { run, image: chosen, step }) {
    const rows = images.map((image) => ({ image, at: predictionAt(image, step) }));
    const shown = JSON.stringify(rows);
    if (shown !== this.#shown) this.element.replaceChildren(...rows.map((row) => this.#row(row)));
    this.#shown = shown; // else a button may keep the focus
    images.forEach(({ tag }, index) => {
      const row = this.element.children[index];
      row.setAttribute("aria-pressed", String(tag === chosen));
      const place = JSON.stringify([run, tag]);
      if (tag !== chosen || place === this.#chosen) return;
      row.scrollIntoView({ block: "nearest" });
      this.#chosen = place;
    });
  }

  #row({ image, at }) {
    const words = [make("strong", {}, image.label ?? shortName(image.tag))];
    if (at.prediction !== null) {
      const [mood, mark] = MOODS[at.correct];
      words.push(make("span", mood, mark + at.prediction));
      words.push(make("span", "quiet", percent(at.probability)));
    }
    const picture = make("img", { src: image.image, alt: "" });
    const contents = [picture, make("div", {}, ...words)];
    return button(contents, () => this.choose(image.tag), { title: image.name || image.tag });
  }
}

function predictionAt(image, step) {
  const steps = image.steps.map((one) => one.step);
  return image.steps[steps.indexOf(nearest(steps, step ?? steps.at(-1)))];
}
