// Canvases: many small maps painted as one image, and maps laid over a picture.

export const MARK = "#00d5ff"; // outlines the token in question; inferno has no blue like it
export const CHANGED = "#7cff6b"; // marks changed patches and muted heads; no map has this green

/** Give a canvas a size in CSS pixels; its context then draws in CSS pixels. */
export function resize(canvas, width, height) {
  const ratio = Math.ceil(window.devicePixelRatio); // device pixels to one CSS pixel
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** A canvas for small maps, which are painted without smoothing. */
export class Raster {
  constructor(canvas) {
    this.canvas = canvas;
  }

  /** Set the size in CSS pixels and clear it. */
  resize(width, height) {
    this.context = resize(this.canvas, width, height);
    this.context.imageSmoothingEnabled = false;
  }

  /** Paint maps of equal size: a pixel for each patch, into boxes [left, top, width, height]. */
  paint(maps, columns) {
    const rows = maps[0].colours.length / columns;
    const image = new ImageData(columns, rows * maps.length); // all maps, a pixel for each patch
    const pixels = new Uint32Array(image.data.buffer);
    maps.forEach(({ colours }, index) => pixels.set(colours, index * rows * columns));
    const small = new OffscreenCanvas(image.width, image.height);
    small.getContext("2d").putImageData(image, 0, 0);
    maps.forEach(({ box }, index) =>
      this.context.drawImage(small, 0, index * rows, columns, rows, ...box),
    );
  }
}

/** Return an image in colour and in grey: canvases of its own size. */
export function canvasesOf(pixels) {
  const { width, height, data } = pixels;
  const faded = data.slice();
  for (let at = 0; at < data.length; at += 4)
    faded.fill((data[at] + data[at + 1] + data[at + 2]) / 3, at, at + 3);
  const [colour, grey] = [pixels, new ImageData(faded, width, height)].map((image) => {
    const canvas = new OffscreenCanvas(width, height);
    canvas.getContext("2d", { willReadFrequently: true }).putImageData(image, 0, 0);
    return canvas;
  });
  return { colour, grey };
}

/** Return the size of a picture in whole pixels to a patch that fits into a box. */
export function fitPicture(record, boxWidth, boxHeight) {
  const [height, width] = record.details.image_size;
  const aspect = height / record.rows / (width / record.columns); // of a patch
  const side = Math.min(boxWidth / record.columns, boxHeight / record.rows / aspect);
  const patchWidth = Math.max(1, Math.floor(side));
  const patchHeight = Math.max(1, Math.round(patchWidth * aspect));
  return {
    patchWidth,
    patchHeight,
    width: patchWidth * record.columns,
    height: patchHeight * record.rows,
  };
}

/** Draw a picture and lay a colour over each patch, if there are any: by default over grey. */
export function drawOverlay(context, record, size, colourOf, base = record.grey) {
  context.imageSmoothingEnabled = size.width < record.grey.width;
  context.imageSmoothingQuality = "high";
  context.drawImage(colourOf ? base : record.colour, 0, 0, size.width, size.height);
  if (!colourOf) return;
  for (let patch = 0; patch < record.rows * record.columns; patch++) {
    context.fillStyle = colourOf(patch);
    context.fillRect(...patchBox(record, size, patch));
  }
}

/** Return the patch under the pointer, or null. */
export function patchAt({ rows, columns }, { patchWidth, patchHeight }, { offsetX, offsetY }) {
  const [column, row] = [offsetX / patchWidth, offsetY / patchHeight].map(Math.floor);
  const inside = row >= 0 && column >= 0 && row < rows && column < columns;
  return inside ? row * columns + column : null;
}

/** Return listeners that call a function with the patch under the pointer, or null. */
export const pointing = (record, size, point) => ({
  pointermove: (event) => point(patchAt(record, size, event)),
  pointerleave: () => point(null),
});

/** Return left, top, width and height of a patch. */
export function patchBox(record, { patchWidth, patchHeight }, patch) {
  const [row, column] = [Math.floor(patch / record.columns), patch % record.columns];
  return [column * patchWidth, row * patchHeight, patchWidth, patchHeight];
}

/** Outline a patch, visible on every colour. */
export function outline(context, [left, top, width, height], colour, thickness) {
  const lines = [
    ["#000", thickness + 2],
    [colour, thickness],
  ];
  for (const [style, line] of lines) {
    context.strokeStyle = style;
    context.lineWidth = line;
    context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
  }
}

/** Cross out what is muted or left out. */
export function crossOut(context, [left, top, width, height], thickness) {
  context.strokeStyle = CHANGED;
  context.lineWidth = thickness;
  context.beginPath();
  context.moveTo(left, top);
  context.lineTo(left + width, top + height);
  context.moveTo(left + width, top);
  context.lineTo(left, top + height);
  context.stroke();
}
