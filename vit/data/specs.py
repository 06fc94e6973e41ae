"""The registered data sets: their image size, channels and pixel statistics.

This module does not import torch, so the command line can check a config against a data set before
anything slow is imported.
"""

from dataclasses import dataclass

from vit.config import DataConfig


@dataclass(frozen=True)
class DatasetSpec:
    """The properties of a data set that a model depends on.

    Attributes:
        image_size: Height and width of an image, in pixels.
        mean: Mean of each channel over the training images, 0 to 1.
        std: Standard deviation of each channel over the training images, 0 to 1.
    """

    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# tests/test_datasets.py recomputes the means and standard deviations of cifar10, cifar100, shapes
# and digits; those of fashion_mnist and svhn are the published ones of their training images. Image
# files of any size are normalized like ImageNet, so that a model file does not depend on the folder
# it was trained on, and weights that were trained on ImageNet fit. 64 pixels let a CPU train on
# photos from scratch.
DATASETS = {
    "cifar10": DatasetSpec((32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": DatasetSpec((32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "shapes": DatasetSpec((32, 32), (0.5003, 0.5005, 0.4999), (0.2818, 0.2822, 0.2817)),
    "folder": DatasetSpec((32, 32), *IMAGENET),
    "shards": DatasetSpec((32, 32), *IMAGENET),
    "table": DatasetSpec((32, 32), *IMAGENET),
    "digits": DatasetSpec((8, 8), (0.3045,), (0.3755,)),
    "fashion_mnist": DatasetSpec((28, 28), (0.2860,), (0.3530,)),
    "svhn": DatasetSpec((32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "flowers102": DatasetSpec((64, 64), *IMAGENET),
    "food101": DatasetSpec((64, 64), *IMAGENET),
    "oxford_iiit_pet": DatasetSpec((64, 64), *IMAGENET),
}

# Files of a user, which may have any number of channels; all other data sets are grey or RGB.
OWN_FILES: tuple[str, ...] = ("folder", "shards", "table")


def spec_of(data: DataConfig) -> DatasetSpec:
    """Return the properties of a data set with the image size and the channels of a config.

    Other channels than the data set's own have other statistics: RGB as grey, or grey as RGB, the
    average over the registered channels; any other number 0.5 and 0.25 in each.
    """
    own = DATASETS[data.name]
    image_size = data.image_size or own.image_size
    channels = data.channels or own.channels
    if channels == own.channels:
        return DatasetSpec(image_size, own.mean, own.std)
    if {channels, own.channels} == {1, 3}:
        mean, std = (round(sum(values) / len(values), 4) for values in (own.mean, own.std))
    else:
        mean, std = 0.5, 0.25
    return DatasetSpec(image_size, (mean,) * channels, (std,) * channels)
