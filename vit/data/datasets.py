"""Loading data sets: training, held-out and test images, in memory or in their files."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.console import note, note_once, warn
from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.layout import join
from vit.data.photos import NEEDS_HEIF
from vit.data.pixels import DEEPEST, open_image
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset, describe_counts, held_out, together
from vit.data.stream import UNREADABLE, ImageFiles, first_copies
from vit.hardware import free_memory, local_processes
from vit.seeding import generator
from vit.settings import require

CPU = torch.device("cpu")
FRACTION_OF_FREE = 0.25  # of the free memory, for images, unless data.memory_gb is given


def open_images(data: DataConfig, train: bool) -> ImageSet:
    """Find the training or test images of a data set; those in files are not decoded yet.

    They have the data set's order and size; training images in files are shuffled with a fixed
    seed. With `data.on_bad_image` "skip", all files are decoded once to find unreadable ones.

    Raises:
        ValueError: The data or a package for it is missing, or no image of a class can be read.
    """
    return _readable(_find_images(data, train), data, "training" if train else "test")


def _find_images(data: DataConfig, train: bool) -> ImageSet:
    """Find images as `open_images` does, also those that cannot be read."""
    reader = resolve_name(f"vit.data.{data.spec.reader}")
    try:
        images: ImageSet = reader(data, train)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"data.name: {data.name} needs a package that is not installed ({error.name}); install "
            "it with `pip install scipy scikit-learn`"
        ) from None
    if isinstance(images.images, Tensor) or not train:
        return images
    # Shuffled, so that the first few already cover all classes.
    return images.select(torch.randperm(len(images), generator=generator(0, "folder")))


def _readable(images: ImageSet, data: DataConfig, part: str) -> ImageSet:
    """Leave out and name the unreadable images of a part, with `data.on_bad_image` "skip"."""
    if isinstance(images.images, Tensor) or data.on_bad_image == "error":
        return images
    if not (unreadable := dict(images.images.problems())):
        return images
    names = join(sorted(images.name(index) for index in unreadable))
    if any(NEEDS_HEIF in problem for problem in unreadable.values()):
        names += f"; {NEEDS_HEIF}"
    count = f"{len(unreadable):,} of {len(images):,} images in {images.folder}"
    note_once(f"skipped {count} that cannot be read: {names}")
    kept, _ = images.divide(torch.tensor([*unreadable]))
    if 0 in (counts := kept.class_counts()):
        raise ValueError(
            f"data.root: no {part} image of class {kept.classes[counts.index(0)]} in "
            f"{images.folder} can be read ({names}); replace or delete them, or the class"
        )
    return kept


def load_test_images(data: DataConfig, preprocess: Preprocess | None = None) -> ImageSet:
    """Load the test images of a data set into memory, or leave them in their files if too large.

    They are resized as by `preprocess`; None means the data set's size.

    Raises:
        ValueError: As for `open_images`; or an image cannot be read.
    """
    test = open_images(data, train=False).resized(preprocess or Preprocess.from_config(data))
    return test.in_memory() if fit_into_memory((test,), data.memory_gb) else test


def fit_into_memory(
    sets: Iterable[ImageSet], memory_gb: float | None, device: torch.device = CPU
) -> bool:
    """Return whether the decoded images of some sets fit into `memory_gb`, in GB (10^9 bytes).

    None is a quarter of the free memory of this machine, divided by the number of processes that
    train on it, or of the accelerator that the images move to, if less. Sets in memory don't count.
    """
    free = free_memory() / local_processes()
    if ask := getattr(torch.get_device_module(device), "mem_get_info", None):
        free = min(free, ask(device)[0])
    limit = FRACTION_OF_FREE * free if memory_gb is None else 1e9 * memory_gb
    return sum(s.images.nbytes for s in sets if isinstance(s.images, ImageFiles)) <= limit


def load_training(
    data: DataConfig,
    seed: int,
    preprocess: Preprocess | None = None,
    stored: Preprocess | None = None,
    check: bool = True,
    device: torch.device = CPU,
) -> tuple[ImageSet, ImageSet]:
    """Load the training images and the held-out images of a data set; the seed decides the split.

    Images in files are decoded into memory if they fit into `data.memory_gb`. Otherwise they stay
    in their files, and like the test images they are decoded once to check that they can be read.

    Args:
        preprocess: Resizes the images; None is the data set's.
        stored: Resizes the training images instead, see `Preprocess.stored`.
        check: Whether to decode images that are not kept in memory.
        device: Where images in memory will be moved.

    Raises:
        ValueError: As for `open_images`; an image cannot be read, there are fewer than requested,
            or a class would be left without training images.
    """
    preprocess = preprocess or Preprocess.from_config(data)
    training, held = split_training(data, seed)
    training, held = training.resized(stored or preprocess), held.resized(preprocess)
    test = list[ImageSet]()
    if check and not data.spec.drawn:  # also downloads them; skip decodes them
        test = [open_images(data, train=False)]
        if training.fingerprint:
            report_copies([training, held, *test])
            _note_first(training)
    if fit_into_memory((training, held), data.memory_gb, device):
        try:
            training, held = training.in_memory(), held.in_memory()
        except ValueError:
            _require_readable([training, held, *test])  # names the unreadable files of all sets
            raise
    if check and data.on_bad_image == "error":
        _require_readable([training, held, *test])
    return training, held


def _require_readable(sets: Sequence[ImageSet]) -> None:
    """Decode images in files without keeping them; ValueError names those that cannot be read."""
    problems = []  # names of files and their problems
    for images in sets:
        if isinstance(images.images, ImageFiles):
            problems += [(images.name(index), text) for index, text in images.images.problems()]
    if problems:
        problems.sort(key=lambda problem: NEEDS_HEIF not in problem[1])  # what helps comes first
        names, (first, *others) = zip(*problems, strict=True)
        listed = f"; {len(names):,} files cannot be read: {join(names)}"
        raise ValueError(f"{first}{listed if others else ''}; {UNREADABLE}")


def report_copies(sets: Sequence[ImageSet]) -> None:
    """Report copies of images, also across classes and in the test images, the last of the sets."""
    names = [images.name(index) for images in sets for index in range(len(images))]
    labels = torch.cat([images.labels for images in sets])
    first = first_copies([origin for images in sets for origin in images.origins])
    copies = (first != torch.arange(len(first))).nonzero().squeeze(1)
    text = f"{len(copies):,} of {len(first):,} images in {sets[0].folder} are copies of others"
    trained = len(first) - len(sets[-1])
    if seen := int((first[trained:] < trained).sum()):
        text += f", and {seen:,} of the {len(sets[-1]):,} test images are training images, too"
    if mixed := copies[labels[copies] != labels[first[copies]]].tolist():
        pairs = join([f"{names[index]} = {names[first[index]]}" for index in mixed])
        text += f"; pictures in two classes: {pairs}"
    if len(copies):
        (warn if seen or mixed else note)(text)


def _note_first(images: ImageSet) -> None:
    """Note what is lost in files like the first: further pages, or dark values of 16 bits."""
    file: Any = images.origins[0]
    with contextlib.suppress(Exception), open_image(getattr(file, "open", lambda: file)()) as photo:
        pages, channels = getattr(photo, "n_frames", 1), images.images.shape[1]
        if photo.format == "TIFF" and pages > 1 and (pages != channels or channels == 3):
            bands = f"--data.channels {pages} reads them as bands"
            hint = "save them as one RGB image to use all" if pages == 3 else bands
            note(f"{images.name(0)} has {pages} pages, of which the first is read; {hint}")
        deep, largest = photo.mode.startswith("I"), int(np.asarray(photo).max())
        if 255 < largest < 2**14 if deep else photo.mode == "RGB" and largest < 64:
            values = f"with values up to {largest:,} of {DEEPEST if deep else 255:,}"
            hint = "if it has 10 to 14 bits, scale images to 16 bits"
            note(f"{images.name(0)} is nearly black, {values}; {hint}")


def split_training(data: DataConfig, seed: int) -> tuple[ImageSet, ImageSet]:
    """Divide a data set into training images and held-out images.

    Files are decoded only with `data.on_bad_image` "skip". Arguments and errors as for
    `load_training`.
    """
    images, size, val_size = _find_images(data, train=True), data.train_size, data.val_size
    if data.spec.drawn and size is not None:  # no more than these were drawn
        val_size = len(images) - size
    if (is_held := images.held) is not None:
        allowed = f"null, because {data.root} says which images are held out"
        require(val_size is None, "data.val_size", val_size, allowed)
    else:
        first = first_copies(images.origins if images.fingerprint else range(len(images)))
        choose = partial(held_out, classes=images.classes, size=val_size, seed=seed)
        is_held = torch.zeros(len(images), dtype=torch.bool)
        is_held[together(images.labels, first, choose)] = True
    # Left out last, so that the split does not depend on what can be read.
    images = _readable(replace(images, held=is_held), data, "training")
    assert images.held is not None
    training, held = images.divide(images.held.nonzero().squeeze(1))
    if images.fingerprint and min(training.class_counts()) == 0:
        described = describe_counts(training.classes, training.class_counts())
        raise ValueError(
            f"data.root: a class in {data.root} has no training image that can be read and is not "
            f"held out ({described})"
        )
    if size is None:
        return training, held
    allowed = f"at most {len(training)}, the number of training images"
    require(size <= len(training), "data.train_size", size, allowed)
    training = training.select(torch.arange(size))
    counts = training.class_counts()
    if min(counts) == 0:
        raise ValueError(
            f"data.train_size: {size} leaves a class without training images "
            f"({describe_counts(training.classes, counts)}); use more"
        )
    return training, held


def choose_images(
    images: ImageSet, count: int, seed: int, purpose: str = "track.probes"
) -> ImageSet:
    """Load a random choice of images into memory, balanced over the classes; all if too few."""
    return images.select(balanced_subset(images.labels, count, seed, purpose)).in_memory()
