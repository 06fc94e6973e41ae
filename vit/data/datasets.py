"""Data sets: images, in memory or in their files, with labels and class names; subsets and splits.

Shapes: N images, B batch, C classes, H height, W width.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import DataConfig, DataName
from vit.data.folder import drop_unreadable
from vit.data.preprocess import Preprocess
from vit.data.sources import read_source
from vit.data.stream import Decoder, ImageFiles
from vit.hardware import free_memory
from vit.seeding import generator

MAX_LISTED = 20  # classes whose image counts are listed one by one
FRACTION_OF_FREE = 0.25  # of the free memory, for images, unless data.memory_gb is given


@dataclass(frozen=True)
class ImageSet:
    """Images with labels.

    Attributes:
        images: (N, channels, H, W) uint8, or files that are decoded when they are needed.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        masks: (N, H, W) bool, True on the object, or None if the data set has no masks.
    """

    images: Tensor | ImageFiles
    labels: Tensor
    classes: tuple[str, ...]
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """Where the images are, or are moved to when they are decoded."""
        return self.images.device

    def select(self, indices: Tensor) -> "ImageSet":
        """Return the images at `indices` (n,), in that order; files stay files."""
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

    def resized(self, preprocess: Preprocess) -> "ImageSet":
        """Return the set with images and masks of a model's size; itself if nothing changes."""
        if isinstance(self.images, ImageFiles):
            files = dataclasses.replace(self.images, preprocess=preprocess)
            return dataclasses.replace(self, images=files)
        images = self.images.cpu()
        resized = preprocess.resize_all(images)
        if resized is images:
            return self
        masks = None if self.masks is None else preprocess.resize_masks(self.masks)
        return dataclasses.replace(self, images=resized.to(self.images.device), masks=masks)

    def pixels(self) -> Tensor:
        """Return all images as (N, channels, H, W) uint8; meant for sets that fit into memory.

        Raises:
            ValueError: A file cannot be read.
        """
        return self.images if isinstance(self.images, Tensor) else self.images.read()

    def in_memory(self) -> "ImageSet":
        """Return the set with all images decoded."""
        return dataclasses.replace(self, images=self.pixels())

    def check(self) -> None:
        """Decode all images that are in files, without keeping them.

        Raises:
            ValueError: A file cannot be read.
        """
        if isinstance(self.images, ImageFiles):
            self.images.check()

    def parts(self, size: int) -> Iterator[Tensor]:
        """Yield the images in their order, at most `size` at a time: (n, channels, H, W) uint8.

        Raises:
            ValueError: A file cannot be read any more.
        """
        if isinstance(self.images, Tensor):
            yield from self.images.split(size)
        else:
            yield from self.images.batches(torch.arange(len(self)).split(size))

    def batches(self, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the images and labels of batch after batch, on the set's device.

        Args:
            indices: (steps, B) int64.

        Yields:
            Images (B, channels, H, W) uint8 and labels (B,) int64.

        Raises:
            ValueError: A file cannot be read any more.
        """
        rows = indices.to(self.device)
        if isinstance(self.images, Tensor):
            for row in rows:
                yield self.images[row], self.labels[row]
        else:
            for row, images in zip(rows, self.images.batches(indices), strict=True):
                yield images, self.labels[row]

    def class_counts(self) -> list[int]:
        """Count the images of each class."""
        return torch.bincount(self.labels, minlength=len(self.classes)).tolist()


def load(
    name: DataName,
    root: str | Path,
    train: bool,
    download: bool = True,
    count: int | None = None,
    on_bad_image: Any = "error",
    preprocess: Preprocess | None = None,
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
        preprocess: Resizes the images; None is the data set's own.

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
    return open_images(data, train, preprocess, count=count).in_memory()


def open_images(
    data: DataConfig,
    train: bool,
    preprocess: Preprocess | None = None,
    decoder: Decoder | None = None,
    count: int | None = None,
) -> ImageSet:
    """Find the training or test images of a data set; those in files are not decoded yet.

    With `data.on_bad_image` "skip", all files are decoded once to find those that cannot be read.

    Args:
        data: The data set.
        train: Whether to find the training images rather than the test images.
        preprocess: Resizes the images; None is the data set's own.
        decoder: Decodes files; None decodes them in this process.
        count: Number of shapes to draw, as for `load`.

    Returns:
        The images, in the order in which `load` returns them.

    Raises:
        ValueError: The data is missing and could not be downloaded, or no image of a class can be
            read.
    """
    preprocess = preprocess or Preprocess.from_config(data)
    source = read_source(data.name, data.root, train, data.download, count)
    if isinstance(source.pictures, Tensor):
        images = ImageSet(source.pictures, source.labels, source.classes, source.masks)
        return images.resized(preprocess)
    paths = tuple(map(str, source.pictures))
    files = ImageFiles(paths, preprocess, decoder or Decoder())
    images = ImageSet(files, source.labels, source.classes, source.masks)
    if data.on_bad_image == "skip":
        kept = drop_unreadable(paths, images.labels, images.classes, files.unreadable())
        images = images.select(kept)
    if not train:
        return images
    # Shuffled, so that the first few already cover all classes.
    return images.select(torch.randperm(len(images), generator=generator(0, "folder")))


def load_test_images(
    data: DataConfig, preprocess: Preprocess | None = None, decoder: Decoder | None = None
) -> ImageSet:
    """Load the test images of a data set into memory, or leave them in their files if too large.

    Args:
        data: The data set.
        preprocess: Resizes the images; None is the data set's own.
        decoder: Decodes files; None decodes them in this process.

    Raises:
        ValueError: The data is missing and could not be downloaded, or an image that was to be
            read into memory cannot be read.
    """
    test = open_images(data, False, preprocess, decoder)
    return test.in_memory() if fit_into_memory((test,), data.memory_gb) else test


def fit_into_memory(sets: Sequence[ImageSet], memory_gb: float | None) -> bool:
    """Tell whether the decoded images of some sets fit into the memory that is for them.

    Args:
        sets: The sets; those that are in memory already count as nothing.
        memory_gb: Memory for images, in GB; None is a quarter of the free memory, divided by the
            number of torchrun's processes on this machine.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limit = FRACTION_OF_FREE * free_memory() / processes if memory_gb is None else 1e9 * memory_gb
    return sum(s.images.nbytes for s in sets if isinstance(s.images, ImageFiles)) <= limit


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
    """Choose images to draw, balanced over the classes; all of them if there are fewer.

    Returns:
        The images, in memory.
    """
    chosen = balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    return images.select(chosen).in_memory()


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
    data: DataConfig,
    seed: int,
    preprocess: Preprocess | None = None,
    stored: Preprocess | None = None,
    decoder: Decoder | None = None,
    check: bool = True,
) -> tuple[ImageSet, ImageSet]:
    """Load the training images of a data set and hold some of them out.

    Images in files are decoded into memory if they fit into `data.memory_gb`. Otherwise they stay
    in their files, and like the test images they are decoded once to check that they can be read.

    Args:
        data: The data set, and how many images to train on and to hold out.
        seed: Seed of the split.
        preprocess: Resizes the images; None is the data set's own.
        stored: Resizes the training images instead, see `Preprocess.stored`.
        decoder: Decodes files; None decodes them in this process.
        check: Whether to decode images that are not kept in memory.

    Returns:
        The training images and the held-out images.

    Raises:
        ValueError: The data is missing or cannot be read, there are fewer images than requested,
            or a class would be left without training images.
    """
    count = None if data.train_size is None else data.train_size + data.val_size
    everything = open_images(data, True, preprocess, decoder, count)
    training, held_out = hold_out(everything, data.val_size, seed)
    if stored not in (None, preprocess):
        larger = open_images(data, True, stored, decoder, count)
        training, _ = hold_out(larger, data.val_size, seed)
    if data.train_size is not None:
        training = _first(training, data.train_size)
    if isinstance(training.images, Tensor):
        return training, held_out
    unchecked = [open_images(data, False, preprocess, decoder)]
    if fit_into_memory((training, held_out), data.memory_gb):
        training, held_out = training.in_memory(), held_out.in_memory()
    else:
        unchecked += [training, held_out]
    if check and data.on_bad_image == "error":  # skip has checked them already
        for images in unchecked:
            images.check()
    return training, held_out


def _first(training: ImageSet, count: int) -> ImageSet:
    """Return the first training images.

    Raises:
        ValueError: There are fewer, or a class is missing among them.
    """
    if count > len(training):
        raise ValueError(
            f"data.train_size: {count} is not allowed; it must be at most {len(training)}, "
            "the number of training images"
        )
    training = training.select(torch.arange(count))
    counts = training.class_counts()
    if min(counts) == 0:
        raise ValueError(
            f"data.train_size: {count} leaves a class without training images "
            f"({describe_counts(training.classes, counts)}); use more"
        )
    return training


def describe_counts(classes: Sequence[str], counts: Sequence[int]) -> str:
    """List the number of images of each class, or summarize them if there are many classes."""
    low, high = min(counts), max(counts)
    if low == high:
        return f"{low:,} in each of {len(classes)} classes"
    if len(classes) > MAX_LISTED:
        return f"{low:,} to {high:,} in each of {len(classes)} classes"
    return ", ".join(f"{name} {n:,}" for name, n in zip(classes, counts, strict=True))
