// The line above a picture: the true and the predicted class.

import { make } from "./dom.js";
import { percent } from "./maths.js";

/** Return the parts of a record's caption; its tag if no class is known. */
export function captionOf({ details, className, tag }) {
  const { label, top } = details;
  const parts = [];
  if (label !== null) parts.push(make("span", {}, "true ", make("strong", {}, className(label))));
  if (top.length) {
    const [index, probability] = top[0];
    const mark = label === null ? "" : index === label ? "✓" : "✗";
    parts.push(
      make("span", {}, "predicted ", make("strong", {}, className(index))),
      make(
        "span",
        { class: "fixed" },
        `${percent(probability)} `,
        make(
          "b",
          {
            class: mark === "✓" ? "right" : "wrong",
            "aria-label": { "✓": "right", "✗": "wrong" }[mark],
          },
          mark,
        ),
      ),
    );
  }
  return parts.length ? parts : [make("span", {}, tag)];
}
