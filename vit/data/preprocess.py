"""How an image becomes the model's input; the same for training, testing and any photo.

Shapes: N images, C channels, H height, W width.
"""

import dataclasses
import functools
import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from vit import settings
from vit.data.config import DataConfig
from vit.data.photos import Photo, TarMember, to_bands
from vit.data.pixels import ArrayPreprocess, offset

# Training images that are cropped at random are stored larger by this factor, to keep detail.
STORED_SCALE = 256 / 224
MOST_PIXELS = 400_000_000  # of a photo that is resized
FILTERS = "^(nearest|box|bilinear|hamming|bicubic|lanczos)$"  # of Pillow
Side = Annotated[int, Field(ge=1, le=20_000)]  # pixels


@settings.group("", kw_only=False)
class Preprocess(ArrayPreprocess):
    """Resize, crop and normalize images for one model, as tensors.

    `vit.data.pixels.ArrayPreprocess` describes the attributes; invalid ones raise a ValueError.
    """

    image_size: tuple[Side, Side]
    mean: Annotated[tuple[settings.Fraction, ...], Field(min_length=1, max_length=1000)]
    std: tuple[Annotated[float, Field(ge=1e-6, le=1000)], ...]
    interpolation: Annotated[str, Field(pattern=FILTERS)] = "bicubic"
    fit: Literal["crop", "pad", "squash"] = "crop"
    crop_pct: settings.FractionAbove0 = 1.0

    def __post_init__(self) -> None:
        settings.require(len(self.std) == len(self.mean), "std", self.std, "as long as the mean")
        resized = math.prod(self.image_size) / self.crop_pct**2
        allowed = f"larger, so that {self.image_size} / crop_pct has {MOST_PIXELS:,} pixels at most"
        settings.require(resized <= MOST_PIXELS, "crop_pct", self.crop_pct, allowed)

    @classmethod
    def from_config(cls, data: DataConfig) -> "Preprocess":
        """Return the preprocessing of a data set with the image size, fit and channels given."""
        spec = data.spec
        return cls(spec.image_size, spec.mean, spec.std, fit=data.fit)

    def stored(self) -> "Preprocess":
        """Return the preprocessing of training images that will be cropped at random."""
        height, width = (round(STORED_SCALE * n) for n in self.image_size)
        return dataclasses.replace(self, image_size=(height, width))

    def view(
        self, height: int, width: int
    ) -> tuple[tuple[slice, slice], tuple[tuple[int, int], tuple[int, int]]]:
        """Return the rows and columns of a photo that the model sees, and the padding around them.

        The padding is in pixels of the photo: above, below; left, right.
        """
        cuts, size = self.plan(height, width)
        seen, padding = [], []
        sides = zip((height, width), cuts, size, self.image_size, strict=True)
        for side, cut, resized, target in sides:
            scale, first = (cut.stop - cut.start) / resized, offset(resized, target)
            start = cut.start + math.floor(first * scale + 0.5)
            stop = max(start + 1, cut.start + math.floor((first + target) * scale + 0.5))
            seen.append(slice(max(0, start), min(side, stop)))
            padding.append((max(0, -start), max(0, stop - side)))
        return (seen[0], seen[1]), (padding[0], padding[1])

    def resize(self, photo: Photo | TarMember, key: str = "photo") -> Tensor:
        """Read a photo of any size, see `to_bands`, resize, and crop or pad it: (C, H, W) uint8."""
        return torch.from_numpy(self.resize_bands(to_bands(photo, self.channels, key)))

    def resize_all(self, images: Tensor) -> Tensor:
        """Resize images (N, channels, height, width) uint8 as `resize` does: (N, C, H, W)."""
        shape = (self.channels, *self.image_size)
        if images.shape[1:] == shape:
            return images
        resized = torch.empty(len(images), *shape, dtype=torch.uint8)
        for number, image in enumerate(images):
            resized[number] = self.resize(image.permute(1, 2, 0).cpu().numpy())
        return resized.to(images.device)

    def resize_masks(self, masks: Tensor) -> Tensor:
        """Resize masks (N, height, width) like their images: (N, H, W) bool; padding is False."""
        plain = dataclasses.replace(self, mean=(0.0,), std=(1.0,), interpolation="nearest")
        return plain.resize_all(masks[:, None].to(torch.uint8))[:, 0].bool()

    def normalize(self, images: Tensor) -> Tensor:
        """Scale images (N, C, H, W) uint8 to float32 with mean 0 and standard deviation 1."""
        settings.require(
            images.dtype == torch.uint8, "images", images.dtype, "torch.uint8, from 0 to 255"
        )
        scale, shift = _scale_and_shift(self, images.device)
        return images.float().mul_(scale).sub_(shift)


@functools.cache  # so that a training step moves nothing from the host to the device
def _scale_and_shift(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    scale, shift = map(torch.from_numpy, preprocess.normalization())
    return scale.to(device), shift.to(device)
