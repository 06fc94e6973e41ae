"""Data sets as tensors: uint8 images, labels and class names; subsets and splits of them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit.config import DataConfig, DataName
from vit.data.folder import read_files
from vit.data.preprocess import Preprocess
from vit.data.sources import read_source
from vit.seeding import generator

MAX_LISTED = 20  # classes whose image counts are listed one by one


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
    on_bad_image: str = "error",
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
    data = DataConfig(name=name, root=str(root) or ".", download=download)
    source = read_source(data, train, count)
    if isinstance(source.pictures, Tensor):
        return ImageSet(source.pictures, source.labels, source.classes, source.masks)
    images, labels, classes = read_files(
        (source.pictures, source.labels, source.classes), on_bad_image, Preprocess.for_dataset(name)
    )
    if not train:
        return ImageSet(images, labels, classes)
    # Shuffled, so that the first few already cover all classes.
    order = torch.randperm(len(labels), generator=generator(0, "folder"))
    return ImageSet(images[order], labels[order], classes)


def balanced_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, with equal numbers per class as far as the classes allow.

    Args:
        labels: (N,) int64.
        count: Number of images to choose, 0 to N.
        seed: Seed of the run.
        purpose: What the images are for; different purposes give independent choices.

    Returns:
        (count,) int64, ascending indices into labels.

    Raises:
        ValueError: count is larger than N.
    """
    if count > len(labels):
        raise ValueError(f"{purpose}: {count} images requested, but there are only {len(labels)}")
    order, turn, _ = _random_turns(labels, seed, purpose)
    chosen = order[turn.argsort(stable=True)[:count]]
    return chosen.sort().values


def stratified_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, in proportion to the class sizes, leaving at least one per class.

    Each class gets its proportional number, rounded by the Webster method. For classes of equal
    size this is the same choice as `balanced_subset`.

    Args:
        labels: (N,) int64.
        count: Number of images to choose, 0 to N - C for C classes.
        seed: Seed of the run.
        purpose: What the images are for; different purposes give independent choices.

    Returns:
        (count,) int64, ascending indices into labels.
    """
    order, turn, size = _random_turns(labels, seed, purpose)
    assert count <= (turn < size - 1).sum()
    priority = (turn + 0.5) / size
    priority[turn == size - 1] = torch.inf  # the last image of a class stays
    chosen = order[priority.argsort(stable=True)[:count]]
    return chosen.sort().values


def _random_turns(labels: Tensor, seed: int, purpose: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffle images; number them within their classes.

    Returns:
        A permutation (N,), and for each image in that order its number within its class, from 0,
        and the size of its class.
    """
    order = torch.randperm(len(labels), generator=generator(seed, purpose))
    turn, size = torch.empty_like(labels), torch.empty_like(labels)
    for label in labels.unique():
        members = labels[order] == label
        size[members] = members.sum()
        turn[members] = torch.arange(int(members.sum()))
    return order, turn, size


def choose_probes(images: ImageSet, count: int, seed: int) -> ImageSet:
    """Choose images to draw, balanced over the classes; all of them if there are fewer."""
    return images.select(
        balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    )


def hold_out(images: ImageSet, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split a set into training images and `count` held-out images, stratified by class.

    Raises:
        ValueError: A class would be left without training images.
    """
    counts = images.class_counts()
    most = sum(max(n - 1, 0) for n in counts)
    if count > most:
        raise ValueError(
            f"data.val_size: {count} is not allowed; it must be at most {most}, because every "
            f"class keeps at least one training image "
            f"({describe_counts(images.classes, counts)})"
        )
    held = stratified_subset(images.labels, count, seed, "data.val_size")
    kept = torch.ones(len(images), dtype=torch.bool)
    kept[held] = False
    return images.select(kept.nonzero().squeeze(1)), images.select(held)


def load_training(
    name: DataName,
    root: str,
    download: bool,
    train_size: int | None,
    val_size: int,
    seed: int,
    on_bad_image: str = "error",
) -> tuple[ImageSet, ImageSet]:
    """Load the training images of a data set and hold some of them out.

    Args:
        name: Data set, as for `load`.
        root: Folder, as for `load`.
        download: Whether to download missing data, as for `load`.
        train_size: Number of training images after holding out; None uses all.
        val_size: Number of images to hold out.
        seed: Seed of the split.
        on_bad_image: "error" or "skip", as for `load`.

    Returns:
        The training images and the held-out images.

    Raises:
        ValueError: The data is missing or cannot be read, there are fewer images than requested,
            or a class would be left without training images.
    """
    count = None if train_size is None else train_size + val_size
    everything = load(
        name, root, train=True, download=download, count=count, on_bad_image=on_bad_image
    )
    if name == "folder":  # an unreadable test image stops a run before training, not after it
        load(name, root, train=False, on_bad_image=on_bad_image)
    training, held_out = hold_out(everything, val_size, seed)
    if train_size is None:
        return training, held_out
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
    return training, held_out


def describe_counts(classes: Sequence[str], counts: Sequence[int]) -> str:
    """List the number of images of each class, or summarize them if there are many classes."""
    low, high = min(counts), max(counts)
    if low == high:
        return f"{low:,} in each of {len(classes)} classes"
    if len(classes) > MAX_LISTED:
        return f"{low:,} to {high:,} in each of {len(classes)} classes"
    return ", ".join(f"{name} {n:,}" for name, n in zip(classes, counts, strict=True))
