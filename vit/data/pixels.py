"""How an image file becomes the input of a model. Only Pillow and NumPy are needed.

An exported model comes with a copy of this file as preprocess.py, which ends with `load` for that
model: it returns the array that the model gets here, bit for bit.

Shapes: C channels, H height, W width.
"""

import contextlib
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageSequence

FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "PPM", "TIFF", "JPEG2000", "TGA", "AVIF"]
with contextlib.suppress(ImportError):  # with this package, Pillow reads HEIC files
    import pillow_heif  # type: ignore[import-not-found]

    pillow_heif.register_heif_opener()
    FORMATS.insert(0, "HEIF")  # for Pillow, an unknown name is a KeyError
# No other format: Pillow runs Ghostscript for EPS, whatever the name of the file.
open_image = functools.partial(Image.open, formats=FORMATS)
Bands = tuple[Image.Image, ...]  # for 3 channels an RGB image, otherwise a grey one for each
DEEPEST = 65_535  # largest 16-bit value
STORED_BANDS = ("LA", "RGBA", "CMYK")  # modes of two and four channels, a letter for each
# What turns an image upright, by its EXIF tag Orientation.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM, 5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_90,
}  # fmt: skip
# A longer photo is cut to this aspect ratio first, or a line of pixels would exceed the memory.
LONGEST = 100


class Unusable(ValueError):
    """An image that a model cannot take; the message continues a sentence that begins with it."""


@dataclass(frozen=True)
class ArrayPreprocess:
    """Resize, crop and normalize images for one model.

    Attributes:
        image_size: H and W of the images the model takes, in pixels.
        mean, std: Mean and standard deviation of each channel of the training images, 0 to 1.
        interpolation: How photos are resized, one of Pillow's filters in lower case.
        fit: What happens to an image of another aspect ratio. "crop" resizes it to cover
            `image_size` and cuts out the centre, as torchvision's Resize and CenterCrop do; "pad"
            resizes it to fit inside, as Resize and Pad do, and fills the rest with the mean colour;
            "squash" changes its aspect ratio, as Resize with a height and width does.
        crop_pct: Fraction of each side that the central crop keeps after resizing, above 0, up to
            1; as in timm, whose weights are evaluated with 0.875 to 1.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    fit: str = "crop"
    crop_pct: float = 1.0

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)

    @property
    def fill(self) -> tuple[int, ...]:
        """The colour of padding: the mean of each channel, 0 to 255; about 0 when normalized."""
        return tuple(round(255 * mean) for mean in self.mean)

    def load(self, path: str | Path) -> np.ndarray:
        """Read an image file as the input of the model: (1, C, H, W) float32, normalized."""
        with open_image(path) as image:
            pixels = self.resize_bands(bands_of(image, self.channels))
        scale, shift = self.normalization()
        return pixels[None] * scale - shift

    def normalization(self) -> tuple[np.ndarray, np.ndarray]:
        """Return scale and shift, (C, 1, 1) float32: the input is pixels * scale - shift."""
        mean, std = (np.array(v, np.float32)[:, None, None] for v in (self.mean, self.std))
        return 1 / (255 * std), mean / std

    def resize_bands(self, bands: Bands) -> np.ndarray:
        """Resize the bands of an image, and crop or pad them: (C, H, W) uint8."""
        (rows, columns), size = self.plan(bands[0].height, bands[0].width)
        cut = (columns.start, rows.start, columns.stop, rows.stop)
        filter_ = Image.Resampling[self.interpolation.upper()]
        top, left = (offset(n, to) for n, to in zip(size, self.image_size, strict=True))
        fills = [self.fill] if self.channels == 3 else [(value,) for value in self.fill]
        planes: list[np.ndarray] = []
        for image, fill in zip(bands, fills, strict=True):
            if cut != (0, 0, *image.size):
                image = image.crop(cut)
            image = image.resize(size[::-1], filter_)
            if size != self.image_size:
                canvas = Image.new(image.mode, self.image_size[::-1], fill)
                canvas.paste(image, (-left, -top))
                image = canvas
            planes += map(np.asarray, image.split())  # faster than moving the last axis of RGB
        return np.stack(planes)

    def plan(self, height: int, width: int) -> tuple[tuple[slice, slice], tuple[int, int]]:
        """Return the rows and columns of a photo that are resized, and the size they get.

        The size is torchvision's: for a crop that of Resize(n) with the smallest n that covers the
        frame, for padding that of Resize(None, max_size=n) with the largest n that fits inside.
        """
        tall, wide = (math.floor(n / self.crop_pct) for n in self.image_size)
        if self.fit == "squash":
            return (slice(0, height), slice(0, width)), (tall, wide)
        turned, cut = width < height, 0
        short, long = sorted((height, width))
        over, along = (wide, tall) if turned else (tall, wide)  # of the frame, in this order
        if self.fit == "pad":
            longer = min(along, ((over + 1) * long - 1) // short)
            shorter = max(1, longer * short // long)
        else:
            cut = max(0, long - LONGEST * short * -(-along // over))
            long -= cut
            shorter = max(over, -(-along * short // long))
            longer = shorter * long // short
        middle = slice(cut // 2, cut // 2 + long)
        if turned:
            return (middle, slice(0, width)), (longer, shorter)
        return (slice(0, height), middle), (shorter, longer)


def offset(size: int, target: int) -> int:
    """Return where the central `target` of `size` pixels start, below 0 if there are fewer."""
    return round((size - target) / 2) if size >= target else -((target - size) // 2)


def bands_of(image: Image.Image, channels: int) -> Bands:
    """Turn an image into what is resized: upright, in the channels of a model, on white.

    Raises:
        Unusable: The channels cannot be converted, or the pixels have more than 16 bits.
    """
    if 0 in image.size:
        raise Unusable("has no pixels")
    file: Any = image
    if image.format == "TIFF":
        file.filename = ""  # else Pillow maps grey files into memory, and scrambles turned ones
    # Otherwise the other pages, which may be masks that Pillow cannot read, do not matter.
    is_stack = channels not in (1, 3) and image.format == "TIFF"
    if is_stack and channels == getattr(image, "n_frames", 1):
        pages = [_upright(page.copy()) for page in ImageSequence.Iterator(image)]
        if len({page.size for page in pages}) > 1:
            raise Unusable("has pages of different sizes, which cannot be its bands")
        largest = max(map(_largest, pages))  # of all, so that all are scaled alike
        return tuple(_in_8_bits(page, largest).convert("L") for page in pages)
    photo = _upright(image)
    if channels not in (1, 3) and photo.mode in STORED_BANDS and len(photo.mode) == channels:
        return photo.split()
    photo = _in_8_bits(photo, _largest(photo))
    if channels in (1, 3):
        mode = "RGB" if channels == 3 else "L"
        return (photo if photo.mode == mode else photo.convert(mode),)
    raise Unusable(
        f"has {'1 channel' if photo.mode == 'L' else '3 channels'}, but the model takes {channels} "
        "(data.channels); only grey and RGB, 1 and 3, are converted into each other"
    )


def _upright(image: Image.Image) -> Image.Image:
    """Return the image, or the first of a file, loaded and turned as its EXIF data says."""
    if image.mode == "F":
        raise Unusable("has floating-point pixels, which are not supported; convert it to 8 bits")
    image.load()  # first, as it turns a TIFF
    turn = None
    with contextlib.suppress(Exception):  # of damaged EXIF data, which do not matter
        turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image if turn is None else image.transpose(turn)


def _largest(photo: Image.Image) -> int:
    """Return the largest value of a grey image of 16 bits, which Pillow would clip at 255; or 0."""
    if not photo.mode.startswith("I"):
        return 0
    grey = np.asarray(photo)
    if grey.min() < 0 or grey.max() > DEEPEST:
        problem = f"has values below 0 or above {DEEPEST:,}, which are not supported"
        raise Unusable(f"{problem}; convert it to 16 bits")
    return int(grey.max())


def _in_8_bits(photo: Image.Image, largest: int) -> Image.Image:
    """Return a photo on white: mode L where it is grey, else RGB."""
    if photo.mode.startswith("I"):
        grey = np.asarray(photo)
        # Values up to 255 are taken for 8 bits; a division would leave nothing but black.
        return Image.fromarray((grey // 257 if largest > 255 else grey).astype(np.uint8))
    if photo.has_transparency_data:
        photo = photo.convert("RGBA")
        white = Image.new("RGBA", photo.size, "white")
        return Image.alpha_composite(white, photo).convert("RGB")
    mode = "L" if photo.mode in ("1", "L") else "RGB"
    return photo if photo.mode == mode else photo.convert(mode)
