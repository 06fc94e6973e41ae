"""How an image becomes the model's input; the same for training, testing and any photo.

Shapes: N images, C channels, H height, W width.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vit.config import DataConfig
from vit.data.photos import Photo, to_bands
from vit.data.tar_member import TarMember

# Training images that are cropped at random are stored larger by this factor, which keeps detail.
STORED_SCALE = 256 / 224
# A longer photo is cut to this aspect ratio before it is resized, or a line of pixels would become
# an image larger than memory.
LONGEST = 100


@dataclass(frozen=True)
class Preprocess:
    """Resize, crop and normalize images for one model.

    Attributes:
        image_size: H and W of the images the model takes, in pixels.
        mean: Mean of each channel of the training images, 0 to 1.
        std: Standard deviation of each channel of the training images, 0 to 1.
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

    @classmethod
    def from_config(cls, data: DataConfig) -> "Preprocess":
        """Return the preprocessing of a data set with the image size, fit and channels given."""
        spec = data.spec
        return cls(spec.image_size, spec.mean, spec.std, fit=data.fit)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Preprocess":
        """Rebuild an object from `to_dict`, also after a round trip through JSON."""
        lists = {key: tuple(values[key]) for key in ("image_size", "mean", "std")}
        return cls(**{**values, **lists})

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return dataclasses.asdict(self)

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)

    def stored(self) -> "Preprocess":
        """Return the preprocessing of training images that will be cropped and resized at random.

        They are larger by 256 / 224, so that a crop keeps more of the photo's detail.
        """
        height, width = (round(STORED_SCALE * n) for n in self.image_size)
        return dataclasses.replace(self, image_size=(height, width))

    def crop(self, height: int, width: int) -> tuple[slice, slice]:
        """Return the rows and columns of a photo that the model sees."""
        rows, columns = (
            slice(max(0, start), min(n, stop))
            for n, (start, stop) in zip((height, width), self._seen(height, width), strict=True)
        )
        return rows, columns

    def padding(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return what the model sees around a photo, in pixels of it: above, below; left, right."""
        vertical, horizontal = (
            (max(0, -start), max(0, stop - n))
            for n, (start, stop) in zip((height, width), self._seen(height, width), strict=True)
        )
        return vertical, horizontal

    @property
    def fill(self) -> tuple[int, ...]:
        """The colour of padding: the mean of each channel, 0 to 255; about 0 when normalized."""
        return tuple(round(255 * mean) for mean in self.mean)

    def resize(self, photo: Photo | TarMember, key: str = "photo") -> Tensor:
        """Resize a photo to the model's image size, and crop or pad it; see `fit`.

        Args:
            photo: A file, a member of a tar file, a Pillow image or an array (height, width,
                channels) uint8, of any size; its channels are converted as
                `vit.data.photos.to_bands` does.
            key: The flag or config key that named the photo, for the error message.

        Returns:
            (C, H, W) uint8.

        Raises:
            ValueError: The photo cannot be read, or its channels cannot be converted.
        """
        bands = to_bands(photo, self.channels, key)
        (rows, columns), size = self._plan(bands[0].height, bands[0].width)
        cut = (columns.start, rows.start, columns.stop, rows.stop)
        filter_ = Image.Resampling[self.interpolation.upper()]
        top, left = (_offset(n, to) for n, to in zip(size, self.image_size, strict=True))
        fills = [self.fill] if self.channels == 3 else [(value,) for value in self.fill]
        planes: list[np.ndarray] = []
        for image, fill in zip(bands, fills, strict=True):
            if cut != (0, 0, *image.size):
                image = image.crop(cut)
            if image.size != size[::-1]:
                image = image.resize(size[::-1], filter_)
            if size != self.image_size:
                canvas = Image.new(image.mode, self.image_size[::-1], fill)
                canvas.paste(image, (-left, -top))
                image = canvas
            planes += map(np.asarray, image.split())  # faster than moving the last axis of RGB
        return torch.from_numpy(np.stack(planes))

    def resize_all(self, images: Tensor) -> Tensor:
        """Resize images of one size as `resize` does; the same tensor if nothing has to change.

        Args:
            images: (N, channels, height, width) uint8.

        Returns:
            (N, C, H, W) uint8.

        Raises:
            ValueError: The channels cannot be converted.
        """
        if images.shape[1:] == (self.channels, *self.image_size):
            return images
        resized = torch.empty(len(images), self.channels, *self.image_size, dtype=torch.uint8)
        for number, image in enumerate(images):
            resized[number] = self.resize(image.permute(1, 2, 0).numpy())
        return resized

    def resize_masks(self, masks: Tensor) -> Tensor:
        """Resize masks like their images, each pixel taking the nearest value; padding is False.

        Args:
            masks: (N, height, width) bool.

        Returns:
            (N, H, W) bool.
        """
        plain = dataclasses.replace(self, mean=(0.0,), std=(1.0,), interpolation="nearest")
        return plain.resize_all(masks[:, None].to(torch.uint8))[:, 0].bool()

    def normalize(self, images: Tensor) -> Tensor:
        """Scale images (N, C, H, W) uint8 to float32 with mean 0 and standard deviation 1."""
        scale, shift = _scale_and_shift(self, images.device)
        return images.float().mul_(scale).sub_(shift)

    def _plan(self, height: int, width: int) -> tuple[tuple[slice, slice], tuple[int, int]]:
        """Return the rows and columns of a photo that are resized, and the size they get.

        The size is what torchvision's Resize computes for one side: for a crop, the smallest n for
        which Resize(n) covers the frame, for padding the largest for which Resize(None, max_size=n)
        fits inside. For a square frame, n is its side.
        """
        tall, wide = (math.floor(n / self.crop_pct) for n in self.image_size)
        if self.fit == "squash":
            return (slice(0, height), slice(0, width)), (tall, wide)
        turned = width < height
        short, long = sorted((height, width))
        over, along = (wide, tall) if turned else (tall, wide)  # of the frame, in this order
        if self.fit == "pad":
            cut = 0
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

    def _seen(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return where the model's input starts and stops in a photo, rows and columns.

        With padding it reaches beyond the photo.
        """
        cuts, size = self._plan(height, width)
        edges = []
        for cut, resized, target in zip(cuts, size, self.image_size, strict=True):
            scale, offset = (cut.stop - cut.start) / resized, _offset(resized, target)
            start = cut.start + math.floor(offset * scale + 0.5)
            stop = cut.start + math.floor((offset + target) * scale + 0.5)
            edges.append((start, max(start + 1, stop)))
        return edges[0], edges[1]


def _offset(size: int, target: int) -> int:
    """Return where the central `target` pixels of `size` start, as torchvision rounds it.

    It is negative if there are fewer than `target`.
    """
    return round((size - target) / 2) if size >= target else -((target - size) // 2)


@functools.cache  # so that a training step moves nothing from the host to the device
def _scale_and_shift(preprocess: Preprocess, device: torch.device) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocess.mean, preprocess.std))
    return (1 / (255 * std)).to(device), (mean / std).to(device)
