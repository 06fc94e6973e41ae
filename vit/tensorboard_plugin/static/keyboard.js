// Keys that work anywhere in the tab, and the list of them.

import { make } from "./dom.js";
import { VIEWS } from "./state.js";

const KEYS = [
  ["← ↑ → ↓", "move the patch; in a list or a grid, choose there"],
  ["T", "class token, registers, mean of patches"],
  ["Enter", "enlarge the chosen head"],
  ["Esc", "back to all heads; release the patch"],
  ["X", "where it attends ⇄ who attends to it"],
  ["A D, W S", "previous and next head, layer"],
  ["[ ]", "previous and next step"],
  ["Space", "play the steps"],
  ["P N", "previous and next image"],
  ["M L O", "mute the chosen head, its layer, all others of the layer"],
  ["B, H", "next brush; use it on the kept patch"],
  ["U R", "undo the last change; reset"],
  ["1 2 3 4", "heads, maps, predictions, features"],
  ["C", "colours over the picture on and off"],
  ["?", "this list"],
];

export function helpDialog() {
  const dialog = make(
    "dialog",
    { "aria-label": "Keys", click: (event) => event.target === dialog && dialog.close() },
    make("h2", {}, "Keys"),
    make("dl", {}, ...KEYS.flatMap(([keys, does]) => [make("dt", {}, keys), make("dd", {}, does)])),
    make("p", { class: "quiet" }, "Click a patch to keep it, and again to release it."),
    make("button", { type: "button", click: () => dialog.close() }, "Close"),
  );
  return dialog;
}

/** Let keys control the tab. */
export function listen(app, help) {
  const actions = {
    ArrowLeft: () => app.movePatch(0, -1),
    ArrowRight: () => app.movePatch(0, 1),
    ArrowUp: () => app.movePatch(-1, 0),
    ArrowDown: () => app.movePatch(1, 0),
    t: () => app.nextToken(),
    Enter: () => app.enlarge(),
    Escape: () => app.escape(),
    x: () => app.set({ direction: app.state.direction === "to" ? "from" : "to" }),
    a: () => app.moveHead(-1),
    d: () => app.moveHead(1),
    w: () => app.moveLayer(-1),
    s: () => app.moveLayer(1),
    "[": () => app.moveStep(-1),
    "]": () => app.moveStep(1),
    " ": () => app.togglePlay("a"),
    p: () => app.chooser.step(-1),
    n: () => app.chooser.step(1),
    c: () => app.set({ heat: app.state.heat === "yes" ? "no" : "yes" }),
    m: () => app.mute("head"),
    l: () => app.mute("layer"),
    o: () => app.mute("others"),
    b: () => app.nextBrush(),
    h: () => app.brushKept(),
    u: () => app.undo(),
    r: () => app.reset(),
    "?": () => help.showModal(),
  };
  Object.keys(VIEWS).forEach((view, index) => (actions[index + 1] = () => app.set({ view })));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || help.open)
      return;
    const { target } = event;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (target.matches("select") || !(key in actions)) return;
    if (key.startsWith("Arrow") && target.matches("input")) return; // the slider's own keys
    if ([" ", "Enter"].includes(key) && target.matches("button, input")) return;
    event.preventDefault();
    actions[key]();
  });
}
