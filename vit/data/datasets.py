"""Loading data sets: training, held-out and test images, in memory or in their files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from vit.console import note
from vit.data.config import DataConfig, DataName
from vit.data.images import ImageSet
from vit.data.layout import some
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset, describe_counts, held_out, held_out_beside
from vit.data.stream import ImageFiles
from vit.hardware import free_memory, local_processes
from vit.seeding import generator

FindUnreadable = Callable[[ImageFiles], Sequence[int]]  # indices of files that cannot be read
FRACTION_OF_FREE = 0.25  # of the free memory, for images, unless data.memory_gb is given


def open_images(
    data: DataConfig,
    train: bool,
    count: int | None = None,
    find_unreadable: FindUnreadable = ImageFiles.unreadable,
) -> ImageSet:
    """Find the training or test images of a data set; those in files are not decoded yet.

    With `data.on_bad_image` "skip", all files are decoded once to find those that cannot be read.

    Args:
        data: The data set.
        train: Whether to find the training images rather than the test images.
        count: Number of shapes to draw; None draws 10,000 training and 2,000 test images. Other
            data sets are always complete.
        find_unreadable: Returns the indices of the files that cannot be read; used with "skip".

    Returns:
        The images, in the data set's order, but training images in files are shuffled with a fixed
        seed. Those in memory have the data set's size, see `ImageSet.resized`.

    Raises:
        ValueError: The data is missing and could not be downloaded, or no image of a class can be
            read.
    """
    reader = resolve_name(f"vit.data.{data.spec.reader}")
    images: ImageSet = reader(data, train, count) if data.spec.drawn else reader(data, train)
    if isinstance(images.images, Tensor):
        return images
    if data.on_bad_image == "skip":
        images = _drop(images, find_unreadable(images.images))
    if not train:
        return images
    # Shuffled, so that the first few already cover all classes.
    return images.select(torch.randperm(len(images), generator=generator(0, "folder")))


def _drop(images: ImageSet, unreadable: Sequence[int]) -> ImageSet:
    """Leave out the images that cannot be read, and say which they are."""
    if not unreadable:
        return images
    names = some([images.name(index) for index in unreadable])
    count = f"{len(unreadable):,} of {len(images):,} images in {images.folder}"
    note(f"skipped {count} that cannot be read: {names}")
    kept, _ = images.divide(torch.tensor(unreadable))
    for name, number in zip(kept.classes, kept.class_counts(), strict=True):
        if number == 0:
            raise ValueError(
                f"data.root: no image of class {name} in {images.folder} can be read ({names}); "
                "replace them, or delete the class"
            )
    return kept


def load(
    name: DataName, root: str | Path, train: bool, count: int | None = None, **settings: Any
) -> ImageSet:
    """Load the training or test images of a data set into memory.

    Args:
        name: Name of the data set, see `vit.data.config.DataConfig`.
        root: Its folder; not used by "shapes".
        train: Whether to load the training images rather than the test images.
        count: Number of shapes to draw, as for `open_images`.
        settings: Other fields of `DataConfig`.

    Raises:
        ValueError: A setting is not allowed, the data is missing and could not be downloaded, or an
            image cannot be read.
    """
    data = DataConfig(name=name, root=str(root) or ".", **settings)
    images = open_images(data, train, count)
    return images.resized(Preprocess.from_config(data)).in_memory()


def load_test_images(data: DataConfig, preprocess: Preprocess | None = None) -> ImageSet:
    """Load the test images of a data set into memory, or leave them in their files if too large.

    Args:
        data: The data set.
        preprocess: Resizes the images; None is that of the data set.

    Raises:
        ValueError: The data is missing and could not be downloaded, or an image that was to be
            read into memory cannot be read.
    """
    test = open_images(data, train=False).resized(preprocess or Preprocess.from_config(data))
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


def load_training(
    data: DataConfig,
    seed: int,
    preprocess: Preprocess | None = None,
    stored: Preprocess | None = None,
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
        check: Whether to decode images that are not kept in memory.
        find_unreadable: As for `open_images`, among the training images.

    Returns:
        The training images and the held-out images.

    Raises:
        ValueError: The data is missing or cannot be read, there are fewer images than requested,
            or a class would be left without training images.
    """
    preprocess = preprocess or Preprocess.from_config(data)
    training, held = split_training(data, seed, find_unreadable)
    training, held = training.resized(stored or preprocess), held.resized(preprocess)
    unchecked = []
    if check and not data.spec.test_included:  # also downloads them; skip decodes them
        unchecked = [open_images(data, train=False).resized(preprocess)]
    if fit_into_memory((training, held), data.memory_gb):
        training, held = training.in_memory(), held.in_memory()
    else:
        unchecked += [training, held]
    if check and data.on_bad_image == "error":
        for images in unchecked:
            if isinstance(images.images, ImageFiles):
                images.images.check()
    return training, held


def split_training(
    data: DataConfig, seed: int, find_unreadable: FindUnreadable = ImageFiles.unreadable
) -> tuple[ImageSet, ImageSet]:
    """Divide a data set into training images and held-out images; files are not decoded.

    Arguments and errors as for `load_training`.
    """
    val_size, count = data.val_size, None
    if data.spec.drawn and data.train_size is not None:  # as many are drawn as needed
        val_size = held_out_beside(data.train_size, val_size)
        count = data.train_size + val_size
    training, held = hold_out(open_images(data, True, count, find_unreadable), val_size, seed)
    return (training if data.train_size is None else _first(training, data.train_size)), held


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
    return images.divide(held_out(images.labels, images.classes, size, seed))


def _first(training: ImageSet, count: int) -> ImageSet:
    """Return the first training images, which must contain every class."""
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


def choose_probes(images: ImageSet, count: int, seed: int) -> ImageSet:
    """Load images to draw into memory, balanced over the classes; all if there are fewer."""
    chosen = balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    return images.select(chosen).in_memory()
