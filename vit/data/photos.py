"""Finding photos, and reading them the way people see them: upright, in colour, on white."""

import io
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from vit.console import counted, note_once
from vit.data.layout import RAW_SUFFIXES, image_files, note_unused
from vit.data.pixels import FORMATS, Bands, Unusable, bands_of, open_image

Photo = str | Path | Image.Image | np.ndarray  # an array is (height, width, channels) uint8
NEEDS_HEIF = "HEIC needs a package; run pip install pillow-heif"
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
# Pillow warns of damaged EXIF data and the like; what makes a file unreadable is an error anyway.
warnings.filterwarnings("ignore", module=r"(PIL|pillow_heif)\b")


class TarMember(NamedTuple):
    """An image file in a tar file that is not compressed."""

    shard: str  # the tar file
    name: str
    offset: int  # of its content in the tar file, bytes
    size: int  # bytes

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"

    def open(self, count: int | None = None) -> io.BytesIO:
        """Read the file, or its first bytes."""
        with Path(self.shard).open("rb") as shard:  # opened each time: decoding takes far longer
            shard.seek(self.offset)
            return io.BytesIO(shard.read(min(self.size, count or 2**30)))  # no photo is larger


def find_photos(names: Iterable[str], key: str) -> list[Path]:
    """List image files, and the image files in folders and the folders below them.

    The order is as given, and sorted within a folder; each file is listed once. In folders, hidden
    files are ignored, and others that are not images are named in a note.
    """
    photos, links = dict[str, Path](), 0
    for path in map(Path, names):
        if path.is_dir():
            images, others = image_files(path)
            if not images:
                raise ValueError(f"{key}: {path} contains no image files")
            note_unused(path, others, "not images")
        else:
            images = [str(_require_file(path, key))]
        for image in sorted(images):
            links += photos.setdefault(os.path.realpath(image), Path(image)) != Path(image)
    if links:
        note_once(f"{counted(links, 'file', ',')} ignored, named twice or links to others")
    return list(photos.values())


def to_bands(photo: Photo | TarMember, channels: int, key: str) -> Bands:
    """Turn a photo into Pillow images, upright, in the channels of a model, on white.

    Grey and RGB are converted into each other as Pillow does. Any other number of channels must be
    the bands of the image as they are stored, e.g. RGBA, or the grey pages of a TIFF file. Values
    of 16 bits are divided by 257 if one is above 255.

    Args:
        photo: A file, a Pillow image, or an array (height, width) or (height, width, channels).
        channels: Number of colour channels, 1 is grey and 3 is RGB.
        key: The flag or config key that named the photo, for error messages.

    Returns:
        One image of mode RGB for three channels, otherwise an image of mode L for each channel.

    Raises:
        ValueError: The file is missing, damaged or too large (Image.MAX_IMAGE_PIXELS), the channels
            cannot be converted, or the array is not uint8 or has another shape.
    """
    if isinstance(photo, str | Path):
        photo = _require_file(Path(photo), key)
    try:
        match photo:
            case Path() | TarMember():
                name = str(photo)
                return _read(photo, channels)
            case Image.Image():
                name = "the image"
                return bands_of(photo, channels)
            case np.ndarray():
                name = "the array"
                return _bands_of_array(photo, channels)
    except Unusable as error:
        raise ValueError(f"{key}: {name} {error}") from None
    raise ValueError(
        f"{key}: a {type(photo).__name__} is not allowed; "
        "it must be a path, a Pillow image or an array, or a list of them"
    )


def to_photo(photo: Photo, channels: int = 3) -> np.ndarray:
    """Turn a photo into pixels as `to_bands` does: (height, width, channels) uint8."""
    return np.dstack([np.asarray(band) for band in to_bands(photo, channels, "photo")])


def _require_file(path: Path, key: str) -> Path:
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "file not found"
        raise ValueError(f"{key}: {path}: {problem}")
    return path


def _read(file: Path | TarMember, channels: int) -> Bands:
    """Read a file; what Pillow only warns of, an image above its limit, is an error here."""
    if file.name.lower().endswith(RAW_SUFFIXES):
        small = "of which only a small preview could be read"
        raise Unusable(f"is a camera's raw photo, {small}; convert it to JPEG or PNG")
    try:
        stream = file if isinstance(file, Path) else file.open()
        with open_image(stream) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise Image.DecompressionBombError
            return bands_of(image, channels)
    except (Unusable, MemoryError):
        raise
    except Image.DecompressionBombError:
        most = f"{(Image.MAX_IMAGE_PIXELS or 0) / 1e6:.0f} megapixels"
        problem = f"it has more than {most}, the largest that are read; save a smaller copy"
    except UnidentifiedImageError:
        problem = NEEDS_HEIF if _needs_heif(file) else "unknown format"
    except Exception as error:  # Pillow's decoders raise all kinds of errors
        problem = str(error)
    raise Unusable(f"cannot be read as an image: {problem}")


def _needs_heif(file: Path | TarMember) -> bool:
    """Tell whether a file, whatever its name, is a HEIC photo, for which the package is missing."""
    with file.open("rb") if isinstance(file, Path) else file.open(12) as stream:
        start = stream.read(12)
    return start[4:8] == b"ftyp" and start[8:] in HEIC_BRANDS and "HEIF" not in FORMATS


def _bands_of_array(array: np.ndarray, channels: int) -> Bands:
    pixels = array[..., None] if array.ndim == 2 else array
    known = pixels.ndim == 3 and pixels.shape[2] in {1, 3, channels}
    if array.dtype != np.uint8 or not known or array.size == 0:
        raise Unusable(
            f"of {array.dtype} with shape {array.shape} is not allowed; "
            f"it must be uint8 with shape (height, width) or (height, width, {channels})"
        )
    if pixels.shape[2] == 3:
        return bands_of(Image.fromarray(pixels), channels)
    bands = tuple(map(Image.fromarray, np.moveaxis(pixels, 2, 0)))
    return bands_of(bands[0], channels) if len(bands) == 1 else bands
