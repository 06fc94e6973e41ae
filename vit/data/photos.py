"""Reading photos from files, as a person sees them: upright, in colour, on white."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps


def read_photo(path: Path, key: str) -> np.ndarray:
    """Read an image file upright and in colour, with transparent parts white.

    Args:
        path: The file.
        key: The flag or config key that named the file, for the error message.

    Returns:
        (height, width, 3) uint8.

    Raises:
        ValueError: The file does not exist, is not an image, is damaged, or exceeds Pillow's limit
            against decompression bombs (Image.MAX_IMAGE_PIXELS).
    """
    if not path.is_file():
        raise ValueError(f"{key}: {path}: file not found")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged EXIF data in a readable image
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                photo = ImageOps.exif_transpose(file)
                if photo.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255
                    grey = np.asarray(photo)
                    grey = grey // 257 if grey.max() > 255 else grey
                    photo = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
                photo = photo.convert("RGBA")
    except Exception as error:  # Pillow's decoders raise all kinds of errors
        raise ValueError(f"{key}: {path} cannot be read as an image: {error}") from None
    white = Image.new("RGBA", photo.size, "white")
    return np.asarray(Image.alpha_composite(white, photo).convert("RGB"))
