// What the tour says, see tour.js; each text has at most 40 words.

export const language = "en";
export const name = "English";
export const start = "Start";
export const back = "Back";
export const next = "Next";
export const close = "End the tour";
export const decline = "No, thanks";
export const offer = "New here? Seven steps show how this model looks at a picture.";
export const left = "You can look around freely now. Back and Next continue the tour.";
export const noLens = "No layer-by-layer predictions were recorded.";

export const steps = [
  [
    "Patches",
    ({ rows, columns, best, probability }) =>
      `The model cuts the picture into ${rows} × ${columns} patches, numbered (row, column) from (0, 0), and turns each into a token, a list of numbers. From these it answers: ${best}, ${probability}. What happens in between?`,
  ],
  [
    "A patch looks around",
    ({ patch, layer, head, share, other }) =>
      `By attention, each token gathers from the others. In layer ${layer}, head ${head} lets patch (${patch}), outlined, take ${share} from patch (${other}) alone. Bright means more. Click other patches to see where they look.`,
  ],
  [
    "Heads differ",
    ({ sharp, layer, head, share }) =>
      `Each map is a head, asked about the same patch. Layer ${sharp.layer}, head ${sharp.head} took ${sharp.share} from one other patch; layer ${layer}, head ${head}, now large, at most ${share}. Below each map is its entropy, 1 for even attention.`,
  ],
  [
    "Layers add up",
    ({ patch, value }) =>
      `Each row is a layer, and gathers from what the rows above have gathered. Rollout multiplies their attention: of all patches, the classifier reads most from (${patch}), ${value} times as much as on average.`,
  ],
  [
    "The decision forms",
    ({ early, earlyProbability, last, best, probability }) =>
      `Read after layer 0, the tokens say ${early}, ${earlyProbability}; after layer ${last}, ${best}, ${probability}. Each coloured map shows the class as which the patches are read.`,
  ],
  [
    "Hide what it used",
    ({ count, isTraced, best, before, after, now }) =>
      `The ${count} patches that count most, ${isTraced ? "traced back from the answer through the whole model" : "in the rollout of attention"}, are hidden, and the model answers again. ${best}: ${before} before, ${after} now. It says ${now}: grey squares are a shape, too. Undo restores them.`,
  ],
  [
    "Your turn",
    ({ count }) =>
      `Drop, paste or choose a photo; it stays in this page. The model knows ${count} classes and takes it for one of them. Click a head and press M to mute it; hide patches with a brush.`,
  ],
];
