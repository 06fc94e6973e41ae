"""The 15 corruptions of ImageNet-C (arXiv 1903.12261), for any image size and number of channels.

Each function takes an image (C, H, W) of 0 to 1, a generator of random numbers, and the parameters
of its entry in `vit.data.severities`. All but frost, which is drawn rather than cut out of photos,
follow the published generators. SciPy is an optional package.

Shapes: B images, C channels, H height, W width.
"""

import io
import math
import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from scipy import ndimage
from torch import Tensor

from vit.data.severities import CORRUPTIONS
from vit.seeding import fold_in

Array: TypeAlias = np.ndarray
Random: TypeAlias = np.random.Generator
SMALL, LARGE = 32, 224  # pixels of the images that parameters are published for


def corrupt(images: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt images (B, C, H, W) uint8 with a severity of 1 to 5; the result is on the CPU.

    The random numbers for each image depend on its pixels, the kind and the seed.
    """
    values, changed = parameters(kind, severity, min(images.shape[2:])), []
    for image in images.cpu().contiguous().numpy():
        rng = np.random.default_rng(fold_in(seed, kind, zlib.crc32(image)))
        changed.append(_to_bytes(_truncate(globals()[kind](image / 255, rng, *values))))
    return torch.from_numpy(np.stack(changed))


def parameters(kind: str, severity: int, size: int) -> list[float]:
    """Return the parameters of a kind for images whose shorter side has `size` pixels.

    Those for 32 and 224 pixels are interpolated in the logarithm of the size, and constant beyond.
    """
    sizes, entry = np.log([SMALL, LARGE]), CORRUPTIONS[kind]
    pairs = np.stack([entry.at_32, entry.at_224], axis=-1)[:, severity - 1]
    return [float(np.interp(math.log(size), sizes, pair)) for pair in pairs]


def gaussian_noise(x: Array, rng: Random, deviation: float) -> Array:
    """Add normal noise to each value."""
    return x + rng.normal(scale=deviation, size=x.shape)


def shot_noise(x: Array, rng: Random, photons: float) -> Array:
    """Count photons; a white pixel has `photons` of them on average."""
    return rng.poisson(photons * x) / photons


def impulse_noise(x: Array, rng: Random, fraction: float) -> Array:
    """Set a fraction of the values to 0 or 1."""
    drawn = rng.random(x.shape)
    return np.where(drawn < fraction, drawn < fraction / 2, x)


def defocus_blur(x: Array, rng: Random, radius: float, deviation: float) -> Array:
    """Convolve with a disk that is itself blurred."""
    reach, blurred = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    rows, columns = np.ogrid[-reach : reach + 1, -reach : reach + 1]
    disk = (rows**2 + columns**2 <= radius**2).astype(float)
    disk = ndimage.gaussian_filter(disk / disk.sum(), deviation, mode="mirror", radius=blurred)
    return ndimage.convolve(x, disk[None], mode="mirror")


def glass_blur(x: Array, rng: Random, deviation: float, reach: float, rounds: float) -> Array:
    """Blur, copy neighbours into pixels (the published loop means to swap them), and blur again."""
    (height, width), reach, deviations = x.shape[1:], round(reach), (0, deviation, deviation)
    x = _truncate(ndimage.gaussian_filter(x, deviations, mode="nearest"))
    numbers = np.arange(height * width).reshape(height, width)
    inside = numbers[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1]
    for _ in range(round(rounds)):
        across, down = rng.integers(-reach, reach, (2, *inside.shape))
        origins = numbers.flatten().tolist()  # the pixels whose values these have
        neighbours = (inside + down * width + across).flatten().tolist()
        pairs = zip(inside.flatten().tolist(), neighbours, strict=True)
        for number, neighbour in reversed([*pairs]):
            origins[number] = origins[neighbour]
        x = x.reshape(len(x), -1)[:, origins].reshape(x.shape)
    return ndimage.gaussian_filter(x, deviations, mode="nearest")


def motion_blur(x: Array, rng: Random, radius: float, deviation: float) -> Array:
    """Blur in a direction within 45° of the horizontal."""
    return _motion(x, radius, deviation, rng.uniform(-45, 45))


def _motion(x: Array, radius: float, deviation: float, degrees: float) -> Array:
    """Blur with half a Gaussian in a direction, as ImageMagick does."""
    reach, angle = 2 * math.ceil(radius), math.radians(degrees)
    steps = np.arange(reach + 1)
    weights = np.exp(-((steps / deviation) ** 2) / 2)
    direction = math.sin(angle), math.cos(angle)
    rows, columns = (reach + np.ceil(steps * part - 0.5).astype(int) for part in direction)
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach)), "edge")
    shifted = sliding_window_view(padded, x.shape[1:], (1, 2))[:, rows, columns]
    return _truncate(np.tensordot(weights / weights.sum(), shifted, (0, 1)))


def zoom_blur(x: Array, rng: Random, count: float, largest: float) -> Array:
    """Average the image with enlarged ones."""
    # The published factors are a little above these numbers, which decides how some are rounded.
    factors = np.linspace(1, largest + 1e-9, round(count))
    return (x + sum(_zoom(x, factor) for factor in factors)) / (len(factors) + 1)


def _zoom(x: Array, factor: float) -> Array:
    """Enlarge the centre of an image, as scipy.ndimage.zoom does, which takes longer."""
    size = x.shape[1:]
    kept = [math.ceil(round(n / factor, 9)) for n in size]
    enlarged = [round(factor * n) for n in kept]
    part = torch.from_numpy(_centre(x, kept))[None]
    x = F.interpolate(part, enlarged, mode="bilinear", align_corners=True)[0].numpy()
    return _centre(x, size)


def _centre(x: Array, size: Sequence[int]) -> Array:
    top, left = ((n - part) // 2 for n, part in zip(x.shape[1:], size, strict=True))
    return x[:, top : top + size[0], left : left + size[1]]


def snow(x: Array, rng: Random, *values: float) -> Array:
    """Whiten the image and add flakes: noise that is enlarged, cut off and blurred by motion."""
    mean, deviation, zoom, threshold, radius, blur, kept = values
    flakes = _zoom(rng.normal(mean, deviation, (1, *x.shape[1:])), zoom)
    flakes = _truncate(np.where(flakes < threshold, 0, flakes))
    flakes = _motion(flakes, radius, blur, rng.uniform(-135, -45))
    luma = [0.299, 0.587, 0.114] if len(x) == 3 else np.full(len(x), 1 / len(x))
    white = np.maximum(x, 1.5 * np.tensordot(luma, x, 1) + 0.5)
    return kept * x + (1 - kept) * white + flakes + flakes[:, ::-1, ::-1]


def frost(x: Array, rng: Random, kept: float, ice: float) -> Array:
    """Lay a fractal with stars of six needles over the image, bluish if it has three channels."""
    length, degrees = max(1, min(x.shape[1:]) / 10), rng.uniform(0, 60)
    stars = (rng.random((1, *x.shape[1:])) < 0.05 / length).astype(float)
    turned = [_motion(stars, 2 * length, length, degrees + 60 * turn) for turn in range(6)]
    needles = _zoom(np.max(turned, axis=0) * length, max(1, length / 10))
    layer = np.minimum(0.9 * _plasma(x.shape[1:], rng, 1.5) + 0.7 * needles, 1)
    colour = [0.85, 0.95, 1] if len(x) == 3 else np.ones(len(x))
    return kept * x + ice * layer * np.reshape(colour, (-1, 1, 1))


def fog(x: Array, rng: Random, amount: float, decay: float) -> Array:
    """Add a fractal, and scale the image to its former maximum."""
    return (x + amount * _plasma(x.shape[1:], rng, decay)) * x.max() / (x.max() + amount)


def _plasma(size: Sequence[int], rng: Random, decay: float) -> Array:
    """Draw a fractal of a height and width, 0 to 1, with the diamond-square algorithm."""
    field: Array = np.zeros((1, 1))
    amplitude = 1.0
    diagonal = np.array([[1, 0, 1], [0, 0, 0], [1, 0, 1]]) / 4
    straight = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]]) / 4
    while len(field) < max(size):
        field = np.kron(field, [[1, 0], [0, 0]])  # its values become corners of squares
        odd = np.add.outer(*2 * [np.arange(len(field)) % 2])
        noise = amplitude**2 * rng.uniform(-1, 1, field.shape)
        for new, neighbours in ((odd == 2, diagonal), (odd == 1, straight)):  # centres, then edges
            field += new * (ndimage.convolve(field, neighbours, mode="wrap") + noise)
        amplitude /= decay
    field = (field - field.min()) / max(np.ptp(field), 1e-30)
    return field[: size[0], : size[1]]


def brightness(x: Array, rng: Random, amount: float) -> Array:
    """Increase the value of hue, saturation and value."""
    value = x.max(axis=0)
    raised = np.minimum(value + amount, 1)
    return np.where(value > 0, x * raised / value.clip(1e-9), raised)


def contrast(x: Array, rng: Random, factor: float) -> Array:
    """Move each value towards the mean of its channel."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return mean + factor * (x - mean)


def elastic(x: Array, rng: Random, length: float, deviation: float, shift: float) -> Array:
    """Move three points, then each pixel by a smooth field; in fractions of the shorter side."""
    size, side = x.shape[1:], min(x.shape[1:])
    corners = max(1, side // 3) * np.array([[1, 1], [-1, 1], [-1, -1]])
    points = np.array(size) // 2 + corners  # rows and columns
    moved = points + shift * side * rng.uniform(-1, 1, (3, 2))
    back = np.linalg.solve(np.c_[moved, np.ones(3)], points)
    places = np.indices(size)
    x = _sample(x, np.tensordot(back.T, [*places, np.ones(size)], 1), "mirror")
    field = rng.uniform(-1, 1, (2, *size))
    field = ndimage.gaussian_filter(field, (0, *2 * [deviation * side]), truncate=3)
    return _sample(x, places + length * side * field, "reflect")


def _sample(x: Array, places: Array, mode: str) -> Array:
    """Interpolate each channel at rows and columns (2, H, W)."""
    return np.stack([ndimage.map_coordinates(c, places, order=1, mode=mode) for c in x])


def pixelate(x: Array, rng: Random, fraction: float) -> Array:
    """Shrink and enlarge with Pillow's box filter."""
    (height, width), box = x.shape[1:], Image.Resampling.BOX
    small = max(1, int(fraction * width)), max(1, int(fraction * height))
    images = (Image.fromarray(channel).resize(small, box) for channel in _to_bytes(x))
    return np.stack([np.asarray(image.resize((width, height), box)) for image in images]) / 255


def jpeg(x: Array, rng: Random, quality: float) -> Array:
    """Compress with Pillow, each channel on its own unless there are three."""
    changed = []
    for image in _to_bytes(x).transpose(1, 2, 0)[None] if len(x) == 3 else _to_bytes(x):
        Image.fromarray(image).save(file := io.BytesIO(), "JPEG", quality=round(quality))
        changed.append(np.asarray(Image.open(file)) / 255)
    return np.dstack(changed).transpose(2, 0, 1)


def _to_bytes(x: Array) -> Array:
    return np.rint(255 * x).astype(np.uint8)


def _truncate(x: Array) -> Array:
    """Cut values to 0 to 1, and down to a 255th; 1e-6 makes up for rounding errors."""
    return np.floor(255 * x.clip(0, 1) + 1e-6) / 255
