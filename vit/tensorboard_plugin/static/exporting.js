// Saving what is shown: the numbers as JSON, and the address.

import { addressOf } from "./host.js";
import { range, tokenName } from "./maths.js";
import { FUSED, stateParameters } from "./state.js";

/** Save what is painted as a JSON file; return what to say. */
export function saveNumbers(app) {
  if (self.origin === "null" && location.protocol !== "file:") {
    // Such as Jupyter's view of a file, which allows no downloads.
    return "The page that shows this allows no downloads; open the file itself.";
  }
  const text = JSON.stringify({ address: address(app), panes: app.numbers() }, null, 1);
  const { run, image, step } = shownBy(app);
  const name = `attention_${run}_${image}_step_${step}`.replace(/[^\w.-]+/g, "_").slice(0, 120);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `${name}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  return "Numbers saved.";
}

/** Copy an address that shows the same; return what to say. */
export async function copyLink(app) {
  try {
    // Only a secure page has it: not a TensorBoard on another machine, without HTTPS.
    await navigator.clipboard.writeText(address(app));
  } catch {
    return "The browser does not allow it; copy the address of the page.";
  }
  return "Link copied.";
}

function address(app) {
  return addressOf(stateParameters(shownBy(app)));
}

/** Return the state with the steps that are shown: the nearest to those that it names. */
function shownBy({ state, panes }) {
  const [step = state.step, step2 = state.step2] = panes.map((pane) => pane.chosenStep());
  return { ...state, step, step2: state.run2 ? step2 : state.step2 };
}

/** Return what a pane shows as plain numbers. */
export function numbersOf(record, { state, token, attention, similar }, shown) {
  return {
    run: record.run,
    image: record.tag,
    file: record.details.name,
    step: record.step,
    grid: [record.rows, record.columns],
    tokens: range(record.tokens).map((token) => tokenName(token, record)),
    view: state.view,
    token: tokenName(token, record),
    direction: state.direction,
    layer: state.layer,
    head: state.head,
    unit: shown.scale.unit.long,
    contrast: shown.scale.contrast,
    range: [shown.scale.low, shown.scale.high],
    values: plain(shown.values),
    ...ofView(record, state, attention, similar),
    ...changeOf(record),
    classes: record.details.classes,
    label: record.details.label,
    top: record.details.top,
  };
}

function ofView(
  { details },
  { view, direction, statistics, compared, averaged },
  attention,
  similar,
) {
  if (view === "maps") return { maps: details.maps };
  if (view === "lens") return { lens: details.lens };
  if (view === "features")
    return {
      compared: compared.map(({ record: { run, tag, step } }) => ({ run, tag, step })),
      cosines: similar.map((one) => one?.map((values) => values && plain(values))),
    };
  if (attention === null) return {};
  return {
    heads: attention.heads.map((layer) => layer.map(plain)),
    ...Object.fromEntries(FUSED.map((name) => [name, attention[name].map(plain)])),
    statistics,
    ...(direction === "offset" ? { averaged: averaged.map(({ tag }) => tag) } : {}),
  };
}

function changeOf({ change }) {
  if (!change) return {};
  const { mute, patches } = change;
  const [before, after] = [change.before, change.after].map(({ logits }) => plain(logits));
  return { change: { mute, patches, before, after } };
}

function plain(values) {
  return values && Array.from(values, (value) => Number(value.toPrecision(7)));
}
