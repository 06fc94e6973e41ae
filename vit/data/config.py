"""Settings of the images: the data sets and their augmentation; imported without torch.

CONTRIBUTING.md shows how to add a data set.
"""

import dataclasses
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from vit import settings

STRONGEST = 30  # magnitude of RandAugment


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """A data set: how it is read, and what a model depends on."""

    image_size: tuple[int, int]  # height and width, in pixels
    mean: tuple[float, ...]  # of each channel, 0 to 1
    std: tuple[float, ...]  # standard deviation of each channel, 0 to 1
    # Function in `vit.data` that maps a `DataConfig` and `train` to an `ImageSet`.
    reader: str = "published:read_torchvision"
    own_files: bool = False  # of a user, with any number of channels; all others are grey or RGB
    drawn: bool = False  # from a seed: as many training images as needed, and nothing to read
    files: str = ""  # pattern of what is in data.root once the set is downloaded; "" for no files
    torchvision: str = ""  # name of the class that downloads it
    training_splits: tuple[str, ...] = ("train",)  # torchvision's names of what is for training
    archive: str = ""  # what users who download it by hand put into data.root

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Means and standard deviations of the training images. Image files of any size are normalized like
# ImageNet, so that a model does not depend on the folder it was trained on, and weights trained on
# ImageNet fit. 64 pixels let a CPU train on photos from scratch.
DATASETS = {
    "cifar10": DatasetSpec(
        (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), "published:read_cifar10",
        files="cifar-10-*", torchvision="CIFAR10",
        archive="cifar-10-python.tar.gz or the unpacked cifar-10-batches-py/",
    ),
    "cifar100": DatasetSpec(
        (32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
        files="cifar-100-*", torchvision="CIFAR100",
        archive="cifar-100-python.tar.gz or the unpacked cifar-100-python/",
    ),
    "shapes": DatasetSpec(
        (32, 32), (0.5003, 0.5005, 0.4999), (0.2818, 0.2822, 0.2817), "shapes:read_shapes",
        drawn=True,
    ),
    "folder": DatasetSpec((32, 32), *IMAGENET, "folder:list_folder", own_files=True),
    "shards": DatasetSpec((32, 32), *IMAGENET, "shards:list_shards", own_files=True),
    "table": DatasetSpec((32, 32), *IMAGENET, "table:list_table", own_files=True),
    "digits": DatasetSpec((8, 8), (0.3045,), (0.3755,), "published:digits"),
    "fashion_mnist": DatasetSpec(
        (28, 28), (0.2860,), (0.3530,), files="FashionMNIST", torchvision="FashionMNIST",
        archive="FashionMNIST/raw/",
    ),
    "svhn": DatasetSpec(
        (32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), files="*_32x32.mat",
        torchvision="SVHN", archive="train_32x32.mat and test_32x32.mat",
    ),
    # As is usual, both of the small parts of Flowers102, 1,020 images each, are for training.
    "flowers102": DatasetSpec(
        (64, 64), *IMAGENET, files="flowers-102*", torchvision="Flowers102",
        training_splits=("train", "val"), archive="flowers-102/",
    ),
    "food101": DatasetSpec(
        (64, 64), *IMAGENET, files="food-101*", torchvision="Food101", archive="food-101/"
    ),
    "oxford_iiit_pet": DatasetSpec(
        (64, 64), *IMAGENET, files="oxford-iiit-pet*", torchvision="OxfordIIITPet",
        training_splits=("trainval",), archive="oxford-iiit-pet/",
    ),
}  # fmt: skip

DataName: TypeAlias = Literal[*DATASETS]  # type: ignore[valid-type]


@settings.group("data")
class DataConfig:
    """The data set.

    Attributes:
        name: data set: folder, shards or table are your own images; shapes (drawn on the fly) and
            digits (needs scikit-learn) need no download
        root: folder where data sets are stored or downloaded to, or your images: folders of
            classes, a folder of tar files, or a CSV file (docs/data.md)
        test_fraction: fraction of each class of your own images that is set aside as test images,
            where they name none; null is 0.2 there
        download: download the data set if it is not in root
        image_size: height and width of the model's input in pixels, one number or two, multiples
            of model.patch_size; null means the data set's own, 32 x 32 for your own images
        fit: how an image of another shape becomes image_size: crop its longer side, pad its shorter
            side with the mean colour, or squash it
        channels: colour channels of the model's input: 1 is grey, 3 is RGB; null means the data
            set's own, 3 for image files
        on_bad_image: whether an unreadable image file is an error, or listed and left out (skip)
        memory_gb: memory for images read from files, in GB (10^9 bytes); if they need more, they
            are decoded in every epoch; null means a quarter of the free memory
        workers: number of processes that decode image files, or 0; null means one per usable core,
            less one while training, 1 to 16, but none for fewer than 200 files
        val_size: number of training images held out for the validation curves, or a fraction of
            each class; null is 1000 of a set of at least 10000 images, else 0.1
        train_size: number of training images to use of those not held out; null uses all
        balance: sampler draws classes of different sizes equally often; loss weights the cross
            entropy of a class by its inverse frequency
    """

    name: DataName = "cifar10"
    root: settings.PathName = "data"
    download: bool = True
    image_size: settings.ImageSize = None
    fit: Literal["crop", "pad", "squash"] = "crop"
    channels: Annotated[int, Field(ge=1, le=1000)] | None = None
    on_bad_image: Literal["error", "skip"] = "error"
    memory_gb: settings.NonNegative | None = None
    workers: Annotated[int, Field(ge=0, le=1000)] | None = None
    test_fraction: settings.Between0And1 | None = None
    val_size: settings.CountOrFraction | None = None
    train_size: settings.ImageCount | None = None
    balance: Literal["none", "sampler", "loss"] = "none"

    def __post_init__(self) -> None:
        known = self.test_fraction is None or self.spec.own_files
        settings.check(self, "test_fraction", known, f"null with data.name={self.name}")
        has_channels = self.channels in (None, 1, 3) or self.spec.own_files
        settings.check(self, "channels", has_channels, f"1 or 3 with data.name={self.name}")

    @property
    def spec(self) -> DatasetSpec:
        """The data set with the image size and the channels of this config.

        RGB as grey, and grey as RGB, has the average of the data set's statistics; other numbers of
        channels have mean 0.5 and standard deviation 0.25.
        """
        spec = DATASETS[self.name]
        channels, mean, std = self.channels or spec.channels, spec.mean, spec.std
        if {channels, spec.channels} == {1, 3}:
            mean, std = ((round(sum(v) / len(v), 4),) * channels for v in (mean, std))
        elif channels != spec.channels:
            mean, std = (0.5,) * channels, (0.25,) * channels
        image_size = self.image_size or spec.image_size
        return dataclasses.replace(spec, image_size=image_size, mean=mean, std=std)


@settings.group("augment")
class AugmentConfig:
    """Augmentation of the training images, drawn for each image separately.

    Attributes:
        crop: padded shifts the image by up to crop_padding pixels; resized cuts out a rectangle of
            random area and shape and resizes it, for photographs (arXiv 1409.4842)
        crop_padding: with crop=padded, pixels of reflected padding on each side
        crop_scale: with crop=resized, smallest and largest fraction of the image's area
        flip: flip images horizontally with probability 0.5
        rand_ops: number of RandAugment operations per image (arXiv 1909.13719); 0 disables it
        rand_magnitude: magnitude of the RandAugment operations
        erasing: probability of replacing a random rectangle with noise (arXiv 1708.04896)
        mixup: alpha of mixup (arXiv 1710.09412); 0 disables it
        cutmix: alpha of CutMix (arXiv 1905.04899); 0 disables it; with both, an image gets one
        mix_share: fraction of the training steps, counted from the start, that use mixup and CutMix
    """

    crop: Literal["padded", "resized"] = "padded"
    crop_padding: Annotated[int, Field(ge=0, le=10_000)] = 2
    crop_scale: tuple[settings.FractionAbove0, settings.FractionAbove0] = (0.08, 1.0)
    flip: bool = True
    rand_ops: Annotated[int, Field(ge=0, le=100)] = 0
    rand_magnitude: Annotated[float, Field(ge=0, le=STRONGEST)] = 9.0
    erasing: settings.Fraction = 0.0
    mixup: settings.NonNegative = 0.0
    cutmix: settings.NonNegative = 0.0
    mix_share: settings.Fraction = 1.0

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        settings.check(self, "crop_scale", low <= high, "the smallest fraction and the largest")

    @property
    def changes_images(self) -> bool:
        """Whether an image or its target ever differs from one epoch to the next."""
        crops = self.crop == "resized" or self.crop_padding
        return bool(crops or self.flip or self.rand_ops or self.erasing or self.mixes)

    @property
    def mixes(self) -> bool:
        """Whether images are ever mixed with others of the batch."""
        return bool(self.mix_share and (self.mixup or self.cutmix))
