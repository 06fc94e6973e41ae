// What the tab shows of a log directory without attention.

import { make } from "./dom.js";

export function emptyState() {
  return make(
    "section",
    { class: "empty" },
    make("h2", {}, "No attention has been recorded in this log directory."),
    make(
      "p",
      {},
      "Training writes it at up to ten milestones, the first at step 0. " +
        "To make a small run in two minutes:",
    ),
    make("pre", {}, "python train.py --config shapes\ntensorboard --logdir runs"),
    make("p", {}, "For a run that is finished, or a model of timm:"),
    make("pre", {}, "python eval.py runs/quick maps"),
    make("p", {}, "From your own code, with any SummaryWriter:"),
    make("pre", {}, "from vit.tensorboard_plugin import add_attention"),
    make("p", { class: "quiet" }, "This page looks for new runs every few seconds."),
  );
}
