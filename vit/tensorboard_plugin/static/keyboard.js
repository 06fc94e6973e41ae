// Keys that work anywhere in the tab, and the list of them.

import { button, make } from "./dom.js";
import { DIRECTIONS, VIEWS } from "./state.js";

const KEYS = [
  ["← ↑ → ↓", "move the patch; in a list or a grid, choose there"],
  ["T", "class token, registers, mean of patches"],
  ["Esc", "release the patch; end the tour"],
  ["X", Object.values(DIRECTIONS).join(" → ")],
  ["[ ]", "previous and next step"],
  ["M L O", "mute the chosen head, its layer, all others of the layer"],
  ["H", "use the brush on the kept patch"],
  ["U R", "undo the last change; reset"],
  ["1 2 3 4", "heads, maps, predictions, features"],
  ["?", "this list"],
];

export function helpDialog() {
  const dialog = make(
    "dialog",
    { "aria-label": "Keys", click: (event) => event.target === dialog && dialog.close() },
    make("h2", {}, "Keys"),
    make("dl", {}, ...KEYS.flatMap(([keys, does]) => [make("dt", {}, keys), make("dd", {}, does)])),
    make("p", "quiet", "Click a patch to keep it, and again to release it."),
    button("Close", () => dialog.close()),
  );
  return dialog;
}

const nextOf = (list, one) => list[(list.indexOf(one) + 1) % list.length];

/** Let keys control the tab. */
export function listen(app, { help, tour }) {
  const actions = {
    ArrowLeft: () => app.movePatch(0, -1),
    ArrowRight: () => app.movePatch(0, 1),
    ArrowUp: () => app.movePatch(-1, 0),
    ArrowDown: () => app.movePatch(1, 0),
    t: () => app.nextToken(),
    Escape: () => (tour.element.hidden ? app.set({ token: "" }) : tour.go(null)),
    x: () => app.set({ direction: nextOf(Object.keys(DIRECTIONS), app.state.direction) }),
    "[": () => app.moveStep(-1),
    "]": () => app.moveStep(1),
    m: () => app.mute("head"),
    l: () => app.mute("layer"),
    o: () => app.mute("others"),
    h: () => app.brushKept(),
    u: () => app.undo(),
    r: () => app.reset(),
    "?": () => help.showModal(),
  };
  Object.keys(VIEWS).forEach((view, index) => (actions[index + 1] = () => app.set({ view })));
  document.addEventListener("keydown", (event) => {
    // Some keyboards need Alt for brackets.
    const isCommand = event.altKey && !"[]".includes(event.key);
    if (event.ctrlKey || event.metaKey || isCommand || event.defaultPrevented || help.open) return;
    const { target } = event;
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (target.matches("select") || !(key in actions)) return;
    if (key.startsWith("Arrow") && target.matches("input")) return; // the slider's own keys
    event.preventDefault();
    actions[key]();
  });
}
