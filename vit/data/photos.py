"""Reading photos the way people see them: upright, in colour, on white."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, ImageSequence, UnidentifiedImageError

from vit.data.tar_member import TarMember

Photo = str | Path | Image.Image | np.ndarray  # an array is (height, width, channels) uint8
Bands = tuple[Image.Image, ...]  # for 3 channels an RGB image, otherwise a grey one for each
DEEPEST = 65_535  # largest 16-bit value
STORED_BANDS = ("LA", "RGBA", "CMYK")  # modes of two and four channels, a letter for each


def to_bands(photo: Photo | TarMember, channels: int = 3, key: str = "photo") -> Bands:
    """Turn a photo into Pillow images, upright, in the channels of a model, on white.

    Grey and RGB are converted into each other as Pillow does. With any other number of channels,
    they are the pages of a TIFF file, all grey and of one size, or the bands of the image as they
    are stored, e.g. RGBA. 16-bit values are divided by 257.

    Args:
        photo: A file, a member of a tar file, a Pillow image, or an array (height, width) or
            (height, width, channels).
        channels: Number of colour channels, 1 is grey and 3 is RGB.
        key: The flag or config key that named the photo, for the error message.

    Returns:
        One image of mode RGB for three channels, otherwise an image of mode L for each channel.

    Raises:
        ValueError: The file does not exist, is not an image, is damaged or exceeds Pillow's limit
            against decompression bombs (Image.MAX_IMAGE_PIXELS); the channels cannot be converted;
            or the array is not uint8 or has another shape.
    """
    if isinstance(photo, str):
        photo = Path(photo)
    if isinstance(photo, Path | TarMember):
        return _read(photo, channels, key)
    if isinstance(photo, Image.Image):
        try:
            return _bands_of_image(photo, channels)
        except _Unusable as error:
            raise ValueError(f"{key}: the image {error}") from None
    if not isinstance(photo, np.ndarray):
        raise ValueError(
            f"{key}: a {type(photo).__name__} is not allowed; "
            "it must be a path, a Pillow image or an array, or a list of them"
        )
    grey = photo.ndim == 2 or (photo.ndim == 3 and photo.shape[2] == 1)
    known = grey or (photo.ndim == 3 and photo.shape[2] in {channels, 3})
    if photo.dtype != np.uint8 or not known or photo.size == 0:
        raise ValueError(
            f"{key}: an array of {photo.dtype} with shape {photo.shape} is not allowed; "
            f"it must be uint8 with shape (height, width) or (height, width, {channels})"
        )
    try:
        return _bands_of_array(photo[..., None] if photo.ndim == 2 else photo, channels)
    except _Unusable as error:
        raise ValueError(f"{key}: the array {error}") from None


def to_photo(photo: Photo, channels: int = 3, key: str = "photo") -> np.ndarray:
    """Turn a photo into pixels as `to_bands` does: (height, width, channels) uint8."""
    bands = to_bands(photo, channels, key)
    return np.concatenate([np.atleast_3d(np.asarray(band)) for band in bands], axis=2)


@contextmanager
def pillow_warnings() -> Iterator[None]:
    """Ignore what Pillow warns of in readable images; refuse images that may be bombs.

    Warnings belong to the process, so threads that read files must run within one such context.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF data
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


class _Unusable(ValueError):
    """An image that a model cannot take; the message continues a sentence that begins with it."""


def _wrong_channels(own: int, channels: int) -> _Unusable:
    what = "1 channel" if own == 1 else f"{own} channels"
    return _Unusable(
        f"has {what}, but the model takes {channels} (data.channels); only grey and RGB, 1 and 3, "
        "are converted into each other"
    )


def _read(file: Path | TarMember, channels: int, key: str) -> Bands:
    if isinstance(file, Path):
        _require_file(file, key)
    try:
        with (
            pillow_warnings(),
            Image.open(file if isinstance(file, Path) else file.open()) as image,
        ):
            return _bands_of_image(image, channels)
    except _Unusable as error:
        raise ValueError(f"{key}: {file} {error}") from None
    except UnidentifiedImageError:
        raise ValueError(f"{key}: {file} cannot be read as an image: unknown format") from None
    except Exception as error:  # Pillow's decoders raise all kinds of errors
        raise ValueError(f"{key}: {file} cannot be read as an image: {error}") from None


def _require_file(path: Path, key: str) -> None:
    if path.is_dir():
        raise ValueError(f"{key}: {path} is a folder; name image files")
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "file not found"
        raise ValueError(f"{key}: {path}: {problem}")


def _bands_of_image(image: Image.Image, channels: int) -> Bands:
    if 0 in image.size:
        raise _Unusable("has no pixels")
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if pages > 1 and _is_grey(image):
        if pages != channels:
            raise _wrong_channels(pages, channels)
        found = tuple(_page(page) for page in ImageSequence.Iterator(image))
        if any(page.mode != "L" or page.size != found[0].size for page in found):
            raise _Unusable("has pages that differ in size or colour, so they are not channels")
        return found
    if channels not in (1, 3) and image.mode in STORED_BANDS and len(image.mode) == channels:
        return ImageOps.exif_transpose(image).split()
    return (_convert(_page(image), channels),)


def _bands_of_array(array: np.ndarray, channels: int) -> Bands:
    own = array.shape[2]
    if own in (1, 3):
        image = Image.fromarray(array if own == 3 else array[..., 0])
        return (_convert(image, channels),)
    return tuple(Image.fromarray(array[..., band]) for band in range(own))


def _convert(image: Image.Image, channels: int) -> Image.Image:
    """Turn an image of mode L or RGB into the one that has the channels wanted."""
    own = len(image.getbands())
    if own == channels:
        return image
    if channels not in (1, 3):
        raise _wrong_channels(own, channels)
    return image.convert("RGB" if channels == 3 else "L")


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L") or image.mode.startswith("I")


def _page(image: Image.Image) -> Image.Image:
    """Return an image, or the current page of a file, loaded: mode L where it is grey, else RGB."""
    if image.mode == "F":
        raise _Unusable("has floating-point pixels, which are not supported; convert it to 8 bits")
    upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    photo = image if upright else ImageOps.exif_transpose(image)  # which always makes a copy
    if photo.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
        grey = np.asarray(photo).astype(np.int64)
        if grey.min() < 0 or grey.max() > DEEPEST:
            raise _Unusable("has 32-bit pixels, which are not supported; convert it to 16 bits")
        return Image.fromarray((grey // 257).astype(np.uint8))
    if photo.has_transparency_data:
        photo = photo.convert("RGBA")
        white = Image.new("RGBA", photo.size, "white")
        return Image.alpha_composite(white, photo).convert("RGB")
    if _is_grey(photo):
        return photo.convert("L")  # a copy: the next page takes the place of this one
    if photo.mode != "RGB":
        return photo.convert("RGB")
    photo.load()
    return photo
