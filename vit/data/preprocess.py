"""How an image becomes the model's input; the same for training, testing and any photo.

Shapes: N images, C channels, H height, W width.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from vit.data.specs import DATASETS


@dataclass(frozen=True)
class Preprocess:
    """Crop, resize and normalize images for one model.

    Attributes:
        image_size: H and W of the images the model takes, in pixels.
        mean: Mean of each channel of the training images, 0 to 1.
        std: Standard deviation of each channel of the training images, 0 to 1.
        interpolation: How photos are resized, one of Pillow's filters in lower case.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"

    @classmethod
    def for_dataset(cls, name: str) -> "Preprocess":
        """Return the preprocessing of a registered data set."""
        spec = DATASETS[name]
        return cls(spec.image_size, spec.mean, spec.std)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """Rebuild an object from `to_dict`, also after a round trip through JSON."""
        rows, columns = values["image_size"]
        mean, std = tuple(values["mean"]), tuple(values["std"])
        return cls((rows, columns), mean, std, values["interpolation"])

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)

    def crop(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of the largest central crop with the model's aspect ratio."""
        rows = min(height, width * self.image_size[0] // self.image_size[1])
        columns = min(width, height * self.image_size[1] // self.image_size[0])
        top, left = (height - rows) // 2, (width - columns) // 2
        return slice(top, top + rows), slice(left, left + columns)

    def resize(self, photo: np.ndarray) -> Tensor:
        """Crop a photo at its centre and resize it to the model's image size.

        Args:
            photo: (height, width, 3) uint8, of any size.

        Returns:
            (C, H, W) uint8.
        """
        image = Image.fromarray(photo[self.crop(*photo.shape[:2])])
        image = image.convert("L" if self.channels == 1 else "RGB")
        rows, columns = self.image_size
        return pil_to_tensor(
            image.resize((columns, rows), Image.Resampling[self.interpolation.upper()])
        )

    def normalize(self, images: Tensor) -> Tensor:
        """Scale images (N, C, H, W) uint8 to float32 with mean 0 and standard deviation 1."""
        scale, shift = _scale_and_shift(self, images.device)
        return images.float().mul_(scale).sub_(shift)


@functools.cache  # so that a training step moves nothing from the host to the device
def _scale_and_shift(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    return (1 / (255 * std)).to(device), (mean / std).to(device)
