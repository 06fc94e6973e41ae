// What the tour says, see tour.js; each text has at most 40 words.

export const language = "en";
export const name = "English";
export const start = "Start";
export const back = "Back";
export const next = "Next";
export const close = "End the tour";
export const offer = "New here? Seven steps show how this model looks at a picture.";
export const missing = (why) => `This step needs more than this page has. ${why}`;
export const noLens = "No layer-by-layer predictions were recorded.";

export const steps = [
  [
    "Patches",
    ({ rows, columns, best, probability }) =>
      `The model cuts the picture into ${rows} × ${columns} patches and turns each into a token, a list of numbers. From these it answers: ${best}, ${probability}. What happens in between?`,
  ],
  [
    "A patch looks around",
    ({ patch, layer, head, share, other }) =>
      `By attention, each token gathers from the others. In layer ${layer}, head ${head} lets patch (${patch}), outlined, take ${share} from patch (${other}) alone. Bright means more. Click other patches to see where they look.`,
  ],
  [
    "Heads differ",
    ({ patch, most, least }) =>
      `Each map is a head, asked about patch (${patch}). By entropy, the first look at few patches, the last at all. From a single other patch, heads take between ${least} and ${most}. Click one to see it large.`,
  ],
  [
    "Layers add up",
    ({ patch, value }) =>
      `Each layer gathers from what the layers above it in the list have gathered. Rollout multiplies their attention: of all patches, the answer comes most from (${patch}), ${value} times as much as on average.`,
  ],
  [
    "The decision forms",
    ({ early, earlyProbability, last, best, probability }) =>
      `Read after layer 0, the tokens mean ${early}, ${earlyProbability}; after layer ${last}, ${best}, ${probability}. Each coloured map shows the class as which the patches are read.`,
  ],
  [
    "Hide what it used",
    ({ count, map, best, before, after, now }) =>
      `The ${count} patches that count most (${map}) are now hidden, and the model has answered again, in your browser. ${best}: ${before} before, ${after} now. It says ${now}. Undo brings the patches back.`,
  ],
  [
    "Your turn",
    () =>
      `Drop or paste a photo, or choose one with “Photo …”; it stays in this page. Click a head and press M to mute it. Choose a brush and paint over patches. What does the model need?`,
  ],
];
