"""Data sets as tensors: uint8 images, labels and class names; subsets and splits of them."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from vit.config import DataConfig, DataName
from vit.data.folder import read_files
from vit.data.preprocess import Preprocess
from vit.data.sources import read_source
from vit.data.splits import balanced_subset, describe_counts, held_out, held_out_beside
from vit.seeding import generator


@dataclass(frozen=True)
class ImageSet:
    """Images with labels.

    Attributes:
        images: (N, channels, H, W) uint8.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        masks: (N, H, W) bool, True on the object, or None if the data set has no masks.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> "ImageSet":
        """Return the images at `indices` (n,), in that order."""
        return dataclasses.replace(
            self,
            images=self.images[indices],
            labels=self.labels[indices],
            masks=None if self.masks is None else self.masks[indices],
        )

    def to(self, device: torch.device) -> "ImageSet":
        """Return the set with its images and labels on a device."""
        return dataclasses.replace(
            self, images=self.images.to(device), labels=self.labels.to(device)
        )

    def class_counts(self) -> list[int]:
        """Count the images of each class."""
        return torch.bincount(self.labels, minlength=len(self.classes)).tolist()


def load(
    name: DataName,
    root: str | Path,
    train: bool,
    download: bool = True,
    count: int | None = None,
    on_bad_image: Literal["error", "skip"] = "error",
) -> ImageSet:
    """Load the training or test images of a data set.

    Args:
        name: Name of the data set, see `vit.config.DataConfig`.
        root: Folder for downloaded data, or the image folder with train/ and test/; not used by
            "shapes".
        train: Whether to load the training images rather than the test images.
        download: Whether to download what is missing from root.
        count: Number of shapes to draw; None draws 10,000 training and 2,000 test images. Other
            data sets are always loaded completely.
        on_bad_image: "error", or "skip" to leave out unreadable files of an image folder.

    Returns:
        The images, in the data set's own order; training images from files are shuffled with a
        fixed seed.

    Raises:
        ValueError: The name is unknown, the data is missing and could not be downloaded, or an
            image cannot be read.
    """
    data = DataConfig(
        name=name, root=str(root) or ".", download=download, on_bad_image=on_bad_image
    )
    return _load(data, train, count)


def load_test_images(data: DataConfig) -> ImageSet:
    """Load the test images of a data set, as `load` does."""
    return _load(data, train=False)


def _load(data: DataConfig, train: bool, count: int | None = None) -> ImageSet:
    source = read_source(data, train, count)
    if isinstance(source.pictures, Tensor):
        return ImageSet(source.pictures, source.labels, source.classes, source.masks)
    images, labels, classes = read_files(
        (source.pictures, source.labels, source.classes),
        data.on_bad_image,
        Preprocess.for_dataset(data.name),
    )
    if not train:
        return ImageSet(images, labels, classes)
    # Shuffled, so that the first few already cover all classes.
    order = torch.randperm(len(labels), generator=generator(0, "folder"))
    return ImageSet(images[order], labels[order], classes)


def choose_probes(images: ImageSet, count: int, seed: int) -> ImageSet:
    """Choose images to draw, balanced over the classes; all of them if there are fewer."""
    return images.select(
        balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    )


def hold_out(images: ImageSet, size: float | None, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split a set into training images and held-out images, stratified by class.

    Args:
        images: The set.
        size: Number or fraction of the held-out images; None suits the set, see
            `vit.data.splits.held_out`.
        seed: Seed of the split.

    Raises:
        ValueError: A class would be left without training images.
    """
    held = held_out(images.labels, images.classes, size, seed)
    kept = torch.ones(len(images), dtype=torch.bool)
    kept[held] = False
    return images.select(kept.nonzero().squeeze(1)), images.select(held)


def load_training(data: DataConfig, seed: int) -> tuple[ImageSet, ImageSet]:
    """Load the training images of a data set and hold some of them out.

    Args:
        data: The data set, and how many images to train on and to hold out.
        seed: Seed of the split.

    Returns:
        The training images and the held-out images.

    Raises:
        ValueError: The data is missing or cannot be read, there are fewer images than requested,
            or a class would be left without training images.
    """
    train_size, val_size, count = data.train_size, data.val_size, None
    if data.name == "shapes" and train_size is not None:  # as many are drawn as needed
        val_size = held_out_beside(train_size, val_size)
        count = train_size + val_size
    everything = _load(data, True, count)
    if data.name in ("folder", "table"):  # an unreadable test image stops a run before training
        load_test_images(data)
    training, held = hold_out(everything, val_size, seed)
    if train_size is None:
        return training, held
    if train_size > len(training):
        raise ValueError(
            f"data.train_size: {train_size} is not allowed; it must be at most {len(training)}, "
            "the number of training images"
        )
    training = training.select(torch.arange(train_size))
    counts = training.class_counts()
    if min(counts) == 0:
        raise ValueError(
            f"data.train_size: {train_size} leaves a class without training images "
            f"({describe_counts(training.classes, counts)}); use more"
        )
    return training, held
