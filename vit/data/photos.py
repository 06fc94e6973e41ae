"""Picture files of one's own: read as a person sees them, and made the size a model takes."""

import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from vit.config import IMAGE_SIZE


def read_photo(path: Path, key: str) -> np.ndarray:
    """Read a picture file upright and in colour, transparent parts white.

    Args:
        path: The file.
        key: Where in the config the file came from, for the error.

    Returns:
        (height, width, 3) uint8.

    Raises:
        ValueError: The file is not there, is no picture, is damaged, or is of a size that Pillow
            takes for an attack (Image.MAX_IMAGE_PIXELS).
    """
    if not path.is_file():
        raise ValueError(f"{key}: {path} is no file; it must be a picture file that is there")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # damaged notes (EXIF) in a picture that can be seen
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                photo = ImageOps.exif_transpose(file)
                if photo.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
                    grey = np.asarray(photo)
                    grey = grey // 257 if grey.max() > 255 else grey
                    photo = Image.fromarray(grey.clip(0, 255).astype(np.uint8))
                photo = photo.convert("RGBA")
    except Exception as error:  # at damaged files Pillow raises whatever its decoders stumble over
        raise ValueError(f"{key}: {path} cannot be read as a picture: {error}") from None
    white = Image.new("RGBA", photo.size, "white")
    return np.asarray(Image.alpha_composite(white, photo).convert("RGB"))


def central_square(height: int, width: int) -> tuple[slice, slice]:
    """Return the rows and columns of the largest square in the middle."""
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return slice(top, top + side), slice(left, left + side)


def as_image(photo: np.ndarray) -> Tensor:
    """Cut a picture (height, width, 3) uint8 to its central square and resize it.

    Returns:
        (3, IMAGE_SIZE, IMAGE_SIZE) uint8, what a model is given.
    """
    square = Image.fromarray(photo[central_square(*photo.shape[:2])])
    return pil_to_tensor(square.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC))
