// The line above the picture.

import { make } from "./dom.js";
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
