// Which image a pane shows: the menu, the line above the picture, and the difference of two panes.

import { make, menu, offer, shortName } from "./dom.js";
import { percent } from "./maths.js";

const MARKS = { right: "✓", wrong: "✗" };

/** Return the parts of a record's caption; its tag if no class is known. */
export function captionOf({ details, className, tag }) {
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
        "fixed",
        `${percent(probability)} `,
        mark === "" ? null : make("b", { class: mark, "aria-label": mark }, MARKS[mark]),
      ),
    );
  }
  return parts.length ? parts : [make("span", {}, tag)];
}

/** The menu of a pane's images. A pane that compares shows the same image unless told otherwise. */
export class ImageMenu {
  /** @param {("a"|"b")} side @param {function(string): void} choose - Called with a tag, or "". */
  constructor(side, choose) {
    this.side = side;
    this.select = menu(`Image of the ${side === "a" ? "first" : "second"} pane`, choose);
    this.element = make("label", "which", "image ", this.select);
  }

  /**
   * Offer the images of the pane's run.
   *
   * @param {object[]} images - As listed by the server.
   * @param {{image: string, image2: string}} state
   */
  render(images, { image, image2 }) {
    const nameOf = ({ tag, name, label }) =>
      [tag, label, shortName(name)].filter(Boolean).join(", ");
    const options = images.map((one) => [one.tag, nameOf(one)]);
    const chosen = this.side === "a" ? image : image2;
    const there = images.some(({ tag }) => tag === chosen);
    if (this.side === "b") options.unshift(["", `same name, ${image}`]);
    if (chosen !== "" && !there) options.push([chosen, `${chosen} (not found)`]);
    offer(this.select, options, chosen);
  }
}

/** Say that two records show different images; nothing if they show the same. */
export function differenceOf(first, second) {
  if (!first || !second || first.details.image === second.details.image) return "";
  const sizes = [first, second].map(({ details }) => details.image_size.join(" × "));
  const labels = [first, second].map(({ details }) => details.classes[details.label]);
  const what =
    sizes[0] === sizes[1] || labels[0] !== labels[1]
      ? "These are different images"
      : `These are different images, or one image at ${sizes.join(" and ")} pixels`;
  const names = [first, second].map(({ run, tag, details, className }) => {
    const label = details.label === null ? "" : ` (${className(details.label)})`;
    return `${tag}${label} of ${run}`;
  });
  return `${what}: ${names.join(" and ")}.`;
}
