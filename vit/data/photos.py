"""Reading photos the way people see them: upright, in colour, on white."""

import warnings
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

Photo = str | Path | Image.Image | np.ndarray  # an array is (height, width, 3) uint8


def read_photo(path: Path, key: str) -> np.ndarray:
    """Read an image file, upright, in colour and with transparent parts white.

    Args:
        path: The file.
        key: The flag or config key that named the file, for the error message.

    Returns:
        (height, width, 3) uint8.

    Raises:
        ValueError: The file does not exist, is not an image, is damaged, or exceeds Pillow's limit
            against decompression bombs (Image.MAX_IMAGE_PIXELS).
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
                return _as_pixels(file)
    except Exception as error:  # Pillow's decoders raise all kinds of errors
        raise ValueError(f"{key}: {path} cannot be read as an image: {error}") from None


def to_photo(image: Photo) -> np.ndarray:
    """Turn a path, a Pillow image or an array into pixels, as `read_photo` does.

    Raises:
        ValueError: The file cannot be read, or the array is not (height, width, 3) uint8.
    """
    if isinstance(image, str | Path):
        return read_photo(Path(image), "photo")
    if isinstance(image, Image.Image):
        return _as_pixels(image)
    if not isinstance(image, np.ndarray):
        raise ValueError(
            f"photo: a {type(image).__name__} is not allowed; "
            "it must be a path, a Pillow image or an array, or a list of them"
        )
    grey = image.ndim == 2 or (image.ndim == 3 and image.shape[2] == 1)
    colour = image.ndim == 3 and image.shape[2] == 3
    if image.dtype != np.uint8 or not (grey or colour) or image.size == 0:
        raise ValueError(
            f"photo: an array of {image.dtype} with shape {image.shape} is not allowed; "
            "it must be uint8 with shape (height, width) or (height, width, 3)"
        )
    return image if colour else np.repeat(image.reshape(*image.shape[:2], 1), 3, axis=2)


def _as_pixels(image: Image.Image) -> np.ndarray:
    if 0 in image.size:
        raise ValueError("photo: the image has no pixels")
    if image.mode == "F":
        raise ValueError("photo: floating-point pixels are not supported; convert to 8 or 16 bits")
    upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
    photo = image if upright else ImageOps.exif_transpose(image)  # which always makes a copy
    if photo.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
        grey = np.asarray(photo)
        grey = grey // 257 if grey.max() > 255 else grey
        photo = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
    if not photo.has_transparency_data:
        return np.asarray(photo if photo.mode == "RGB" else photo.convert("RGB"))
    photo = photo.convert("RGBA")
    white = Image.new("RGBA", photo.size, "white")
    return np.asarray(Image.alpha_composite(white, photo).convert("RGB"))
