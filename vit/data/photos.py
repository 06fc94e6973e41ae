"""Reading photos the way people see them: upright, in colour, on white."""

import warnings
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, ImageSequence

Photo = str | Path | Image.Image | np.ndarray  # an array is (height, width, channels) uint8
DEEPEST = 65_535  # largest 16-bit value
STORED_BANDS = ("LA", "RGBA", "CMYK")  # modes of two and four channels, a letter for each


def read_photo(path: Path, key: str, channels: int = 3) -> np.ndarray:
    """Read an image file, upright, in the channels of a model and with transparent parts white.

    Grey and RGB are converted into each other as Pillow does. With any other number of channels,
    they are the pages of a TIFF file, all grey and of one size, or the bands of the image as they
    are stored, e.g. RGBA. 16-bit values are divided by 257.

    Args:
        path: The file.
        key: The flag or config key that named the file, for the error message.
        channels: Number of colour channels, 1 is grey and 3 is RGB.

    Returns:
        (height, width, channels) uint8.

    Raises:
        ValueError: The file does not exist, is not an image, is damaged, has channels that cannot
            be converted, or exceeds Pillow's limit against decompression bombs
            (Image.MAX_IMAGE_PIXELS).
    """
    if path.is_dir():
        raise ValueError(f"{key}: {path} is a folder; name image files")
    if not path.is_file():
        problem = "not a regular file" if path.exists() else "file not found"
        raise ValueError(f"{key}: {path}: {problem}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged EXIF data in a readable image
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                return _as_pixels(file, channels)
    except _WrongChannels as error:
        raise ValueError(f"{key}: {path} has {error}") from None
    except Exception as error:  # Pillow's decoders raise all kinds of errors
        raise ValueError(f"{key}: {path} cannot be read as an image: {error}") from None


def to_photo(image: Photo, channels: int = 3) -> np.ndarray:
    """Turn a path, a Pillow image or an array into pixels, as `read_photo` does.

    Raises:
        ValueError: The file cannot be read, or the array is not uint8, or its shape is not
            (height, width) or (height, width, channels).
    """
    if isinstance(image, str | Path):
        return read_photo(Path(image), "photo", channels)
    if isinstance(image, Image.Image):
        try:
            return _as_pixels(image, channels)
        except _WrongChannels as error:
            raise ValueError(f"photo: the image has {error}") from None
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f"photo: a {type(image).__name__} is not allowed; "
            "it must be a path, a Pillow image or an array, or a list of them"
        )
    grey = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 1)
    known = grey or (image.ndim == 3 and image.shape[2] in {channels, 3})
    if image.dtype != np.uint8 or not known or image.size == 0:
        raise ValueError(
            f"photo: an array of {image.dtype} with shape {image.shape} is not allowed; "
            f"it must be uint8 with shape (height, width) or (height, width, {channels})"
        )
    try:
        return convert_channels(image[..., None] if image.ndim == 2 else image, channels)
    except _WrongChannels as error:
        raise ValueError(f"photo: the array has {error}") from None


def convert_channels(photo: np.ndarray, channels: int) -> np.ndarray:
    """Turn grey into RGB or RGB into grey, as Pillow does.

    Args:
        photo: (height, width, any) uint8.
        channels: The channels wanted.

    Returns:
        (height, width, channels) uint8; the photo itself if it has them.

    Raises:
        ValueError: There is no such conversion.
    """
    own = photo.shape[2]
    if own == channels:
        return photo
    if (own, channels) == (1, 3):
        return np.repeat(photo, 3, axis=2)
    if (own, channels) == (3, 1):
        return np.asarray(Image.fromarray(photo).convert("L"))[..., None]
    raise _WrongChannels(own, channels)


class _WrongChannels(ValueError):
    """An image whose channels a model does not take."""

    def __init__(self, own: int, channels: int) -> None:
        what = "1 channel" if own == 1 else f"{own} channels"
        super().__init__(
            f"{what}, but the model takes {channels} (data.channels); only grey and RGB, 1 and 3, "
            "are converted into each other"
        )


def _as_pixels(image: Image.Image, channels: int) -> np.ndarray:
    if 0 in image.size:
        raise ValueError("photo: the image has no pixels")
    pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
    if pages > 1 and _is_grey(image):
        if pages != channels:
            raise _WrongChannels(pages, channels)
        found = [_page_pixels(page) for page in ImageSequence.Iterator(image)]
        if len({page.shape for page in found}) > 1 or found[0].shape[2] > 1:
            raise ValueError("its pages differ in size or colour, so they are not channels")
        return np.concatenate(found, axis=2)
    if channels not in (1, 3) and image.mode in STORED_BANDS and len(image.mode) == channels:
        return np.asarray(ImageOps.exif_transpose(image))
    return convert_channels(_page_pixels(image), channels)


def _is_grey(image: Image.Image) -> bool:
    return image.mode in ("1", "L") or image.mode.startswith("I")


def _page_pixels(image: Image.Image) -> np.ndarray:
    """Return (height, width, 1 or 3) uint8: grey where the file has one channel."""
    if image.mode == "F":
        raise ValueError("photo: floating-point pixels are not supported; convert to 8 or 16 bits")
    upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    photo = image if upright else ImageOps.exif_transpose(image)  # which always makes a copy
    if photo.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
        grey = np.asarray(photo).astype(np.int64)
        if grey.min() < 0 or grey.max() > DEEPEST:
            raise ValueError("photo: 32-bit pixels are not supported; convert to 8 or 16 bits")
        return (grey // 257).astype(np.uint8)[..., None]
    if _is_grey(photo) and not photo.has_transparency_data:
        return np.asarray(photo.convert("L"))[..., None]
    if not photo.has_transparency_data:
        return np.asarray(photo if photo.mode == "RGB" else photo.convert("RGB"))
    photo = photo.convert("RGBA")
    white = Image.new("RGBA", photo.size, "white")
    return np.asarray(Image.alpha_composite(white, photo).convert("RGB"))
