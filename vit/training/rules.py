"""Rules about a config that involve the data set or the number of processes."""

import math

from vit.config import Config
from vit.data.specs import OWN_FILES, spec_of
from vit.settings import divisors, require


def check_sizes(config: Config) -> None:
    """Check that model and augmentation fit the images of the data set.

    `ModelConfig` and `AugmentConfig` cannot check this themselves: the image size belongs to the
    data set.

    Raises:
        ValueError: The patch size does not divide the image size or is not supported by the stem,
            the crop padding is not smaller than the image, or the data set has other channels.
    """
    require(
        config.data.channels in (None, 1, 3) or config.data.name in OWN_FILES,
        "data.channels",
        config.data.channels,
        f"1 or 3 with data.name={config.data.name}",
    )
    height, width = spec_of(config.data).image_size
    patch_size, padding = config.model.patch_size, config.augment.crop_padding
    size = f"{height}" if height == width else f"{height}x{width}"
    common = math.gcd(height, width)
    if config.data.image_size is not None:
        nearest = [patch_size * max(1, round(n / patch_size)) for n in (height, width)]
        require(
            common % patch_size == 0,
            "data.image_size",
            size,
            f"a multiple of model.patch_size={patch_size}, e.g. "
            + " ".join(map(str, nearest[:1] if height == width else nearest)),
        )
    require(
        common % patch_size == 0,
        "model.patch_size",
        patch_size,
        f"a divisor of the image size, {size}: {divisors(common)}",
    )
    require(
        config.model.stem == "linear" or patch_size.bit_count() == 1,
        "model.patch_size",
        patch_size,
        "a power of two with model.stem=conv",
    )
    limit = min(height, width) - 1
    require(
        config.augment.crop == "resized" or padding <= limit,
        "augment.crop_padding",
        padding,
        f"0 to {limit} pixels with images of {size} pixels",
    )


def check_batch(config: Config, processes: int) -> None:
    """Check that a batch can be divided among the processes and `train.accumulate` parts.

    Raises:
        ValueError: It cannot, or a part has too few images for batch norm.
    """
    train = config.train
    parts = train.accumulate * processes
    if train.batch_size % parts:
        raise ValueError(
            f"train.batch_size: {train.batch_size} cannot be divided among {processes} processes "
            f"with train.accumulate={train.accumulate}; it must be a multiple of {parts}"
        )
    if config.model.stem == "conv" and train.batch_size == parts:
        raise ValueError(
            f"train.batch_size: {train.batch_size} in {parts} parts (train.accumulate, "
            "processes) is one image at a time; the batch norm of model.stem=conv needs two"
        )
