// Saving what is shown: the panes as PNG, the numbers as JSON, the address.

import { addressOf } from "./host.js";
import { stateParameters } from "./state.js";

const ZOOM = 2; // pixels of the PNG to a CSS pixel

/** Save the panes as a PNG file. */
export async function savePicture(app) {
  app.main.classList.add("still"); // nothing sticks to the edge of the window
  const canvas = drawElement(app.main);
  app.main.classList.remove("still");
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  download(blob, `${fileName(app)}.png`);
  return "Picture saved.";
}

/** Save what is painted as a JSON file. */
export function saveNumbers(app) {
  const text = JSON.stringify({ address: address(app), panes: app.numbers() }, null, 1);
  download(new Blob([text], { type: "application/json" }), `${fileName(app)}.json`);
  return "Numbers saved.";
}

/** Copy an address that shows the same. */
export async function copyLink(app) {
  const text = address(app);
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else copyOldWay(text); // a TensorBoard on another machine, without HTTPS
  return "Link copied.";
}

function address(app) {
  return addressOf(stateParameters(app.state));
}

function copyOldWay(text) {
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("the browser does not allow it; copy the address of the page");
}

function fileName(app) {
  const { run, image, step } = app.state;
  return `attention_${run}_${image}_step_${step}`.replace(/[^\w.-]+/g, "_").slice(0, 120);
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Draw an element as it is on the page: backgrounds, canvases and lines of text. */
function drawElement(root) {
  const box = root.getBoundingClientRect();
  const canvas = document.createElement("canvas");
  canvas.width = ZOOM * root.scrollWidth;
  canvas.height = ZOOM * root.scrollHeight;
  const context = canvas.getContext("2d");
  context.scale(ZOOM, ZOOM);
  context.translate(root.scrollLeft - box.left, root.scrollTop - box.top);
  context.imageSmoothingEnabled = false;
  context.fillStyle = getComputedStyle(document.body).backgroundColor;
  context.fillRect(
    box.left - root.scrollLeft,
    box.top - root.scrollTop,
    root.scrollWidth,
    root.scrollHeight,
  );
  drawNode(context, root);
  return canvas;
}

function drawNode(context, node) {
  if (node.nodeType === Node.TEXT_NODE) return drawText(context, node);
  if (
    node.nodeType !== Node.ELEMENT_NODE ||
    node.matches("[data-noexport]") ||
    !node.checkVisibility({ visibilityProperty: true })
  )
    return undefined;
  const { left, top, width, height } = node.getBoundingClientRect();
  const { backgroundColor } = getComputedStyle(node);
  if (backgroundColor !== "rgba(0, 0, 0, 0)") {
    context.fillStyle = backgroundColor;
    context.fillRect(left, top, width, height);
  }
  if (node.matches("canvas") && width > 0 && height > 0)
    context.drawImage(node, left, top, width, height);
  for (const child of node.childNodes) drawNode(context, child);
  return undefined;
}

/** Draw a text word by word, because it may have several lines. */
function drawText(context, node) {
  const range = document.createRange();
  const style = getComputedStyle(node.parentElement);
  context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  context.fillStyle = style.color;
  context.textBaseline = "middle";
  let end = 0;
  for (const word of node.data.match(/\s*\S+|\s+$/g) ?? []) {
    range.setStart(node, end + word.search(/\S|$/));
    range.setEnd(node, (end += word.length));
    const { left, top, height } = range.getBoundingClientRect();
    context.fillText(word.trim(), left, top + height / 2);
  }
}
