// A photo as a model gets it, with the arithmetic of vit/data/pixels.py and of Pillow's resize.

const BITS = 22; // of the fraction in Pillow's weights of pixels
const LARGEST = 1e8; // pixels
const LONGEST = 100; // aspect ratio; a longer photo is cut first

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

function cubic(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? -0.5 * (((x - 5) * x + 8) * x - 4) : 0;
}

/** How far each filter reaches, and its values, of distances in pixels. */
const FILTERS = {
  box: [0.5, (x) => (x > -0.5 && x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(0, 1 - Math.abs(x))],
  hamming: [1, (x) => (Math.abs(x) < 1 ? sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)) : 0)],
  bicubic: [2, (x) => cubic(Math.abs(x))],
  lanczos: [3, (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};

/** Prepare an image file as `predict` does: upright, on white, resized, cropped or padded; RGBA. */
export async function prepare(blob, spec) {
  const bitmap = await open(blob);
  const { cut, size } = plan({ width: bitmap.width, height: bitmap.height }, spec);
  const context = contextOf(cut.width, cut.height);
  context.fillStyle = "white";
  context.fillRect(0, 0, cut.width, cut.height);
  context.drawImage(
    bitmap,
    (cut.width - bitmap.width + 1) >> 1,
    (cut.height - bitmap.height + 1) >> 1,
  );
  bitmap.close();
  let image = context.getImageData(0, 0, cut.width, cut.height);
  if (spec.channels === 1) turnGrey(image.data);
  // Pillow resizes columns first where that takes away more than twice as many pixels as rows.
  const columnsFirst =
    cut.height > size.height && cut.height - size.height > 2 * (cut.width - size.width);
  const axes = ["width", "height"];
  for (const axis of columnsFirst ? axes.reverse() : axes)
    image = resize(image, axis, size[axis], spec.interpolation);
  return frame(image, spec);
}

/** Read an image file as an ImageBitmap, to be closed. */
export async function open(blob) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none" }).catch(() => {
    throw new Error("This browser cannot read the file as an image.");
  });
  if (bitmap.width * bitmap.height <= LARGEST) return bitmap;
  bitmap.close();
  throw new Error(`The image has more than ${LARGEST / 1e6} million pixels.`);
}

/** Return a canvas in software: a graphics card has other roundings. */
function contextOf(width, height) {
  return new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
}

/** Return the size of the part of a photo that is resized, and the size it gets, as in Python. */
function plan(photo, { image_size: [tall, wide], fit, crop_pct }) {
  const { floor, ceil, min, max } = Math;
  const around = { height: floor(tall / crop_pct), width: floor(wide / crop_pct) };
  if (fit === "squash") return { cut: photo, size: around };
  const [short, long] = photo.width < photo.height ? ["width", "height"] : ["height", "width"];
  const side = photo[short];
  if (fit === "pad") {
    const longer = min(around[long], floor(((around[short] + 1) * photo[long] - 1) / side));
    const shorter = max(1, floor((longer * side) / photo[long]));
    return { cut: photo, size: { [short]: shorter, [long]: longer } };
  }
  const kept = min(photo[long], LONGEST * side * ceil(around[long] / around[short]));
  const shorter = max(around[short], ceil((around[long] * side) / kept));
  const size = { [short]: shorter, [long]: floor((shorter * kept) / side) };
  return { cut: { [short]: side, [long]: kept }, size };
}

function turnGrey(data) {
  for (let at = 0; at < data.length; at += 4) {
    const grey = 19595 * data[at] + 38470 * data[at + 1] + 7471 * data[at + 2];
    data.fill((grey + 2 ** 15) >> 16, at, at + 3);
  }
}

/** Resize one axis of an image. */
function resize(image, axis, length, interpolation) {
  const resized = { width: image.width, height: image.height, [axis]: length };
  const { width, height } = resized;
  resized.data = new Uint8ClampedArray(4 * width * height).fill(255); // which clamps sums
  const step = axis === "width" ? 4 : 4 * image.width;
  const weights = weightsOf(image[axis], length, interpolation);
  for (let row = 0, to = 0; row < height; row++) {
    for (let column = 0; column < width; column++, to += 4) {
      const [index, line] = axis === "width" ? [column, row * image.width] : [row, column];
      const [first, taps] = weights[index];
      for (let channel = 0; channel < 3; channel++) {
        let sum = 2 ** (BITS - 1);
        let from = 4 * line + first * step + channel;
        for (let tap = 0; tap < taps.length; tap++, from += step)
          sum += taps[tap] * image.data[from];
        resized.data[to + channel] = sum >> BITS;
      }
    }
  }
  return resized;
}

/** Return, for each new pixel, its first old pixel and the weights of those from there on. */
function weightsOf(width, length, interpolation) {
  const scale = width / length;
  if (interpolation === "nearest") {
    const places = [scale / 2]; // sums, because their rounding errors decide ties
    while (places.length < length) places.push(places.at(-1) + scale);
    return places.map((place) => [Math.floor(place), [2 ** BITS]]);
  }
  const [reach, filter] = FILTERS[interpolation];
  const stretch = Math.max(1, scale);
  return Array.from({ length }, (_, index) => {
    const centre = (index + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach * stretch + 0.5));
    const end = Math.min(width, Math.trunc(centre + reach * stretch + 0.5));
    const values = Array.from({ length: end - first }, (_, tap) =>
      filter((first + tap - centre + 0.5) * (1 / stretch)),
    );
    const total = values.reduce((sum, value) => sum + value, 0);
    const fixed = (value) => Math.trunc((value / total) * 2 ** BITS + Math.sign(value) / 2);
    return [first, values.map(fixed)];
  });
}

/** Crop an image to its centre, or pad it with the mean colour. */
function frame({ data, width, height }, { image_size: [tall, wide], mean }) {
  const context = contextOf(wide, tall);
  const fill = [0, 1, 2].map((channel) => roundEven(255 * mean[channel % mean.length]));
  context.fillStyle = `rgb(${fill})`;
  context.fillRect(0, 0, wide, tall);
  context.putImageData(new ImageData(data, width), -offset(width, wide), -offset(height, tall));
  return context.getImageData(0, 0, wide, tall);
}

/** Return where the central `target` of `size` pixels start, below 0 if there are fewer. */
function offset(size, target) {
  return size >= target ? roundEven((size - target) / 2) : -Math.floor((target - size) / 2);
}

/** Round as Python does: halves to even numbers. */
function roundEven(number) {
  return number % 1 === 0.5 ? 2 * Math.round(number / 2) : Math.round(number);
}
