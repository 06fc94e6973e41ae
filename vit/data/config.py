"""Settings of the images: the data set and its augmentation; imported without torch."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from vit.registry import DATASETS, DatasetSpec
from vit.settings import (
    Count,
    CountOrFraction,
    Fraction,
    FractionAbove0,
    ImageSize,
    NonNegative,
    PathName,
    Switch,
    check,
    settings,
)

STRONGEST = 30  # magnitude of RandAugment

if TYPE_CHECKING:  # a type checker does not look into the registry
    DataName = str
else:
    DataName = Literal[*DATASETS]


@settings("data")
class DataConfig:
    """The data set.

    Attributes:
        name: data set: folder, shards or table are your own images, see root; shapes (drawn on the
            fly) and digits (needs scikit-learn) need no download
        root: folder where data sets are stored or downloaded to; with name=folder, the folder that
            contains train/<class>/ and test/<class>/, or the classes' folders themselves; with
            name=shards, the folder that contains train/*.tar and test/*.tar, or the tar files
            (docs/data.md); with name=table, a CSV file with columns path, label and, optionally,
            split
        test_fraction: with name=folder, shards or table, fraction of each class that is set aside
            as test images, where these name none; null is 0.2 there
        download: download the data set if it is not in root
        image_size: height and width of the model's input in pixels, one number or two (rows and
            columns), multiples of model.patch_size; null means the data set's own, 32 x 32 for
            folder, shards and table
        fit: how an image of another shape becomes image_size: crop cuts off what is left of its
            longer side, pad shrinks all of it and fills the rest with the mean colour, squash
            stretches it
        channels: colour channels of the model's input: 1 is grey, 3 is RGB; null means the data
            set's own, 3 for image files
        on_bad_image: with image files, how to treat an image file that cannot be read: error stops,
            skip lists it and leaves it out
        memory_gb: memory for images read from files, in GB (10^9 bytes); if they need more, they
            are decoded from their files in every epoch; null means a quarter of the free memory
        workers: number of processes that decode image files; 0 decodes them in the main process;
            null means one per usable core, less one, but none for fewer than 200 files
        val_size: number of training images held out for the validation curves, or a fraction of
            each class, at least one image; 0 holds out none; null is 1000 of a set of at least
            10000 images, else 0.1
        train_size: number of training images to use, after the validation images are held out; null
            uses all of them
        balance: how to treat classes of different sizes: none; sampler draws every class equally
            often, repeating the images of small ones; loss weights the cross entropy of a class by
            its inverse frequency, N / (C n_c) for n_c of N images and C classes
    """

    name: DataName = "cifar10"
    root: PathName = "data"
    download: Switch = True
    image_size: ImageSize = None
    fit: Literal["crop", "pad", "squash"] = "crop"
    channels: Annotated[int, Field(ge=1, le=1000)] | None = None
    on_bad_image: Literal["error", "skip"] = "error"
    memory_gb: NonNegative | None = None
    workers: Annotated[int, Field(ge=0, le=1000)] | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    val_size: CountOrFraction | None = None
    train_size: Count | None = None
    balance: Literal["none", "sampler", "loss"] = "none"

    def __post_init__(self) -> None:
        allowed = f"null with data.name={self.name}, whose test images are fixed"
        check(self, "test_fraction", self.test_fraction is None or self.spec.own_files, allowed)
        size = self.val_size
        is_size = size is None or size < 1 or isinstance(size, int)
        check(self, "val_size", is_size, "a fraction less than 1, or a whole number")

    @property
    def spec(self) -> DatasetSpec:
        """The data set with the image size and the channels of this config.

        Other channels than the data set's own have other statistics: RGB as grey, or grey as RGB,
        the average over the registered channels; any other number 0.5 and 0.25 in each.
        """
        spec = DATASETS[self.name]
        channels, mean, std = self.channels or spec.channels, spec.mean, spec.std
        if {channels, spec.channels} == {1, 3}:
            mean, std = ((round(sum(v) / len(v), 4),) * channels for v in (mean, std))
        elif channels != spec.channels:
            mean, std = (0.5,) * channels, (0.25,) * channels
        image_size = self.image_size or spec.image_size
        return dataclasses.replace(spec, image_size=image_size, mean=mean, std=std)


@settings("augment")
class AugmentConfig:
    """Augmentation of the training images, drawn for each image separately.

    Attributes:
        crop: random crop: padded shifts the image by up to crop_padding pixels, for small images;
            resized cuts out a rectangle of random area and shape and resizes it, for photographs
            (arXiv 1409.4842)
        crop_padding: with crop=padded, pixels of reflected padding on each side
        crop_scale: with crop=resized, smallest and largest fraction of the image's area; aspect
            ratios are 3/4 to 4/3
        flip: flip images horizontally with probability 0.5
        rand_ops: number of RandAugment operations per image (arXiv 1909.13719); 0 disables it
        rand_magnitude: magnitude of the RandAugment operations
        erasing: probability of replacing a random rectangle with noise (arXiv 1708.04896)
        mixup: alpha of mixup (arXiv 1710.09412); 0 disables it
        cutmix: alpha of CutMix (arXiv 1905.04899); 0 disables it; with both, each image gets one of
            mixup and CutMix
        mix_share: fraction of the training steps, counted from the start, that use mixup and CutMix
    """

    crop: Literal["padded", "resized"] = "padded"
    crop_padding: Annotated[int, Field(ge=0, le=10_000)] = 2
    crop_scale: tuple[FractionAbove0, FractionAbove0] = (0.08, 1.0)
    flip: Switch = True
    rand_ops: Annotated[int, Field(ge=0, le=100)] = 0
    rand_magnitude: Annotated[float, Field(ge=0, le=STRONGEST)] = 9.0
    erasing: Fraction = 0.0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    mix_share: Fraction = 1.0

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        check(self, "crop_scale", low <= high, "the smallest fraction first, then the largest")

    @property
    def changes_images(self) -> bool:
        """Whether an image or its target ever differs from one epoch to the next."""
        crops = self.crop == "resized" or self.crop_padding
        return bool(crops or self.flip or self.rand_ops or self.erasing or self.mixes)

    @property
    def mixes(self) -> bool:
        """Whether images are ever mixed with others of the batch."""
        return bool(self.mix_share and (self.mixup or self.cutmix))
