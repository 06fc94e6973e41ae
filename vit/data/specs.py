"""The data sets with the image size and the channels of a config.

This module does not import torch, so the command line can check a config against a data set before
anything slow is imported.
"""

from dataclasses import replace

from vit.config import DataConfig
from vit.registry import DATASETS, DatasetSpec

OWN_FILES = tuple(name for name, spec in DATASETS.items() if spec.own_files)


def spec_of(data: DataConfig) -> DatasetSpec:
    """Return the properties of a data set with the image size and the channels of a config.

    Other channels than the data set's own have other statistics: RGB as grey, or grey as RGB, the
    average over the registered channels; any other number 0.5 and 0.25 in each.
    """
    own = DATASETS[data.name]
    image_size = data.image_size or own.image_size
    channels = data.channels or own.channels
    if channels == own.channels:
        return replace(own, image_size=image_size)
    if {channels, own.channels} == {1, 3}:
        mean, std = (round(sum(values) / len(values), 4) for values in (own.mean, own.std))
    else:
        mean, std = 0.5, 0.25
    return replace(
        own, image_size=image_size, mean=(mean,) * channels, std=(std,) * channels
    )
