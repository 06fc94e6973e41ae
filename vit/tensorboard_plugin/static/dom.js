// Making elements. Text is always a text node, so names of runs and classes are never HTML.

/**
 * Make an element. Functions are event listeners; null, undefined and false leave an attribute out;
 * a string in place of the properties is the class.
 */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  if (typeof properties === "string") properties = { class: properties };
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Make a button with a text, or other contents. */
export function button(contents, click, properties = {}) {
  return make("button", { type: "button", click, ...properties }, ...[contents].flat());
}

/** Change an element's text, if it is another one: the browser then has nothing to lay out. */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Make a labelled menu. `choose` is called with the value of the chosen option.
 *
 * A choice in the open list, by mouse or Enter, is final, and "chosen" is dispatched, so that the
 * focus can move on; arrow keys and letters change a closed menu, and more of them may follow.
 */
export function menu(label, choose, properties = {}) {
  let key = null; // the last one pressed; those in the open list are not reported
  const select = make("select", {
    "aria-label": label,
    ...properties,
    focus: () => (key = null),
    pointerdown: () => (key = null),
    keydown: (event) => (key = event.key),
    change: () => {
      choose(select.options[select.selectedIndex].value);
      if ([null, "Enter", " "].includes(key))
        select.dispatchEvent(new CustomEvent("chosen", { bubbles: true }));
    },
  });
  return select;
}

/** Set the options of a menu, [value, text] each, and select one of them. */
export function offer(select, options, chosen) {
  const known = [...select.options].map((option) => [option.value, option.text]);
  if (JSON.stringify(known) !== JSON.stringify(options)) {
    select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
  }
  select.value = chosen;
}

/** Return the last part of a path or a tag. */
export function shortName(path) {
  return path.slice(path.lastIndexOf("/") + 1);
}
