"""Data sets: images, in memory or in their files, with labels and class names; subsets and splits.

Shapes: N images, B batch, C classes, H height, W width.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vit.data.config import DataConfig, DataName
from vit.data.folder import drop_unreadable
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset, describe_counts, held_out, held_out_beside
from vit.data.source import TarMember, read_source
from vit.data.stream import Decoder, ImageFile, ImageFiles
from vit.hardware import free_memory, local_processes
from vit.seeding import generator

FindUnreadable = Callable[[ImageFiles], Sequence[int]]  # indices of files that cannot be read
FRACTION_OF_FREE = 0.25  # of the free memory, for images, unless data.memory_gb is given


@dataclass(frozen=True)
class ImageSet:
    """Images with labels.

    Attributes:
        images: (N, channels, H, W) uint8, or files that are decoded when they are needed.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        masks: (N, H, W) bool, True on the object, or None if the data set has no masks.
        fingerprint: Identifies the user's files that the set was made from, see
            `vit.data.source.Source`; "" for published data sets.
        split: Whether data.test_fraction decides which of these files are for testing.
        origins: The image files, or indices in a published data set; () means 0 to N - 1.
        folder: The folder that names of files are relative to.
    """

    images: Tensor | ImageFiles
    labels: Tensor
    classes: tuple[str, ...]
    masks: Tensor | None = None
    fingerprint: str = ""
    split: bool = False
    origins: tuple[ImageFile | int, ...] = ()
    folder: str = ""

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
            origins=tuple((self.origins or range(len(self)))[i] for i in indices.tolist()),
        )

    def name(self, index: int) -> str:
        """Return what an image is called: its file, relative to the folder, or "no. 17"."""
        origin = self.origins[index] if self.origins else index
        if isinstance(origin, int):
            return f"no. {origin}"
        path = origin if isinstance(origin, str) else f"{origin.shard}{os.sep}{origin.name}"
        return path.removeprefix(f"{self.folder}{os.sep}")

    def entry(self, index: int) -> dict[str, Any]:
        """Return what a table or a JSON file calls an image: its index, and its file if any."""
        return {"index": index} | ({"file": self.name(index)} if self.fingerprint else {})

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
    on_bad_image: Literal["error", "skip"] = "error",
    preprocess: Preprocess | None = None,
) -> ImageSet:
    """Load the training or test images of a data set.

    Args:
        name: Name of the data set, see `vit.data.config.DataConfig`.
        root: Folder for downloaded data, or the folder of images or shards with train/ and test/;
            not used by "shapes".
        train: Whether to load the training images rather than the test images.
        download: Whether to download what is missing from root.
        count: Number of shapes to draw; None draws 10,000 training and 2,000 test images. Other
            data sets are always loaded completely.
        on_bad_image: "error", or "skip" to leave out unreadable files of an image folder.
        preprocess: Resizes the images; None is that of the data set.

    Returns:
        The images, in the data set's order; training images from files are shuffled with a
        fixed seed.

    Raises:
        ValueError: The name is unknown, the data is missing and could not be downloaded, or an
            image cannot be read.
    """
    data = DataConfig(
        name=name, root=str(root) or ".", download=download, on_bad_image=on_bad_image
    )
    images = open_images(data, train, preprocess, count=count)
    return images.resized(preprocess or Preprocess.from_config(data)).in_memory()


def open_images(
    data: DataConfig,
    train: bool,
    preprocess: Preprocess | None = None,
    decoder: Decoder | None = None,
    count: int | None = None,
    find_unreadable: FindUnreadable = ImageFiles.unreadable,
    report: bool = True,
) -> ImageSet:
    """Find the training or test images of a data set; those in files are not decoded yet.

    Images that are not in files have the data set's size, see `ImageSet.resized`.

    With `data.on_bad_image` "skip", all files are decoded once to find those that cannot be read.

    Args:
        data: The data set.
        train: Whether to find the training images rather than the test images.
        preprocess: Resizes images from files; None is that of the data set.
        decoder: Decodes files; None decodes them in this process.
        count: Number of shapes to draw, as for `load`.
        find_unreadable: Returns the indices of the files that cannot be read; used with "skip".
        report: Whether to print which files these are.

    Returns:
        The images, in the order in which `load` returns them.

    Raises:
        ValueError: The data is missing and could not be downloaded, or no image of a class can be
            read.
    """
    source = read_source(data, train, count)
    if isinstance(source.pictures, Tensor):
        return ImageSet(source.pictures, source.labels, source.classes, source.masks)
    paths = tuple(file if isinstance(file, TarMember) else str(file) for file in source.pictures)
    root = Path(data.root).expanduser()
    files = ImageFiles(paths, preprocess or Preprocess.from_config(data), decoder or Decoder())
    images = ImageSet(
        files, source.labels, source.classes, source.masks, source.fingerprint, source.split,
        paths, str(root.parent if data.name == "table" else root),
    )  # fmt: skip
    if data.on_bad_image == "skip":
        unreadable = find_unreadable(files)
        kept = drop_unreadable(paths, images.labels, images.classes, unreadable, report)
        images = images.select(kept)
    if not train:
        return images
    # Shuffled, so that the first few already cover all classes.
    return images.select(torch.randperm(len(images), generator=generator(0, "folder")))


def load_test_images(
    data: DataConfig,
    preprocess: Preprocess | None = None,
    decoder: Decoder | None = None,
    report: bool = False,
) -> ImageSet:
    """Load the test images of a data set into memory, or leave them in their files if too large.

    Args:
        data: The data set.
        preprocess: Resizes the images; None is that of the data set.
        decoder: Decodes files; None decodes them in this process.
        report: Whether to print which files are left out by `data.on_bad_image`; the start of
            training has printed it.

    Raises:
        ValueError: The data is missing and could not be downloaded, or an image that was to be
            read into memory cannot be read.
    """
    preprocess = preprocess or Preprocess.from_config(data)
    test = open_images(data, False, preprocess, decoder, report=report).resized(preprocess)
    return test.in_memory() if fit_into_memory((test,), data.memory_gb) else test


def fit_into_memory(sets: Sequence[ImageSet], memory_gb: float | None) -> bool:
    """Tell whether the decoded images of some sets fit into the memory that is for them.

    Args:
        sets: The sets; those that are in memory already count as nothing.
        memory_gb: Memory for images, in GB; None is a quarter of the free memory, divided by the
            number of processes that train together on this machine.
    """
    processes = local_processes()
    limit = FRACTION_OF_FREE * free_memory() / processes if memory_gb is None else 1e9 * memory_gb
    return sum(s.images.nbytes for s in sets if isinstance(s.images, ImageFiles)) <= limit


def choose_probes(images: ImageSet, count: int, seed: int) -> ImageSet:
    """Choose images to draw, balanced over the classes; all of them if there are fewer.

    Returns:
        The images, in memory.
    """
    chosen = balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    return images.select(chosen).in_memory()


def hold_out(images: ImageSet, size: float | None, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split a set into training images and held-out images, stratified by class.

    Args:
        images: The set.
        size: Number or fraction of the held-out images; None suits the set, see
            `vit.data.sampling.held_out`.
        seed: Seed of the split.

    Raises:
        ValueError: A class would be left without training images.
    """
    held = held_out(images.labels, images.classes, size, seed)
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
    find_unreadable: FindUnreadable = ImageFiles.unreadable,
) -> tuple[ImageSet, ImageSet]:
    """Load the training images of a data set and hold some of them out.

    Images in files are decoded into memory if they fit into `data.memory_gb`. Otherwise they stay
    in their files, and like the test images they are decoded once to check that they can be read.

    Args:
        data: The data set, and how many images to train on and to hold out.
        seed: Seed of the split.
        preprocess: Resizes the images; None is that of the data set.
        stored: Resizes the training images instead, see `Preprocess.stored`.
        decoder: Decodes files; None decodes them in this process.
        check: Whether to decode images that are not kept in memory.
        find_unreadable: As for `open_images`, among the training images.

    Returns:
        The training images and the held-out images.

    Raises:
        ValueError: The data is missing or cannot be read, there are fewer images than requested,
            or a class would be left without training images.
    """
    preprocess = preprocess or Preprocess.from_config(data)
    val_size, count = data.val_size, None
    if data.spec.drawn and data.train_size is not None:  # as many are drawn as needed
        val_size = held_out_beside(data.train_size, val_size)
        count = data.train_size + val_size
    everything = open_images(data, True, preprocess, decoder, count, find_unreadable)
    training, held = hold_out(everything, val_size, seed)
    if data.train_size is not None:
        training = _first(training, data.train_size)
    training, held = training.resized(stored or preprocess), held.resized(preprocess)
    unchecked = []
    if check and not data.spec.test_included:  # also downloads them; skip decodes them
        unchecked = [open_images(data, False, preprocess, decoder)]
    if isinstance(training.images, Tensor):
        return training, held
    if fit_into_memory((training, held), data.memory_gb):
        training, held = training.in_memory(), held.in_memory()
    else:
        unchecked += [training, held]
    if check and data.on_bad_image == "error":
        for images in unchecked:
            images.check()
    return training, held


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
