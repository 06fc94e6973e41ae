"""Sets of labelled images, in memory or in their files.

Shapes: N images, B batch, C classes, H height, W width.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vit.console import counted, note_once, printable, shorten, sides
from vit.data.config import DataConfig
from vit.data.layout import join
from vit.data.preprocess import Preprocess
from vit.data.sampling import fraction_per_class, together
from vit.data.stream import ImageFile, ImageFiles, first_copies
from vit.hardware import free_memory, local_processes
from vit.settings import require

TEST_FRACTION = 0.2


@dataclass(frozen=True)
class ImageSet:
    """Images with labels. Decoding files raises a ValueError that names one that cannot be read."""

    images: Tensor | ImageFiles  # (N, channels, H, W) uint8, or decoded when they are needed
    labels: Tensor  # (N,) int64, 0 to C - 1
    classes: tuple[str, ...]  # the C class names
    masks: Tensor | None = None  # (N, H, W) bool, True on the object
    origins: tuple[ImageFile | int, ...] = ()  # files, or indices in a published set; () is 0 to N
    folder: str = ""  # to which the names of files are relative
    fingerprint: str = ""  # of the user's files, see `user_files`; "" for published data sets
    split: bool = False  # whether data.test_fraction decides which of these files are for testing
    held: Tensor | None = None  # (N,) bool, training images that the user holds out; None if none

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        """The device of the images, also of those that are still to be decoded."""
        return self.images.device

    def select(self, indices: Tensor) -> "ImageSet":
        """Return the images at `indices` (n,), in that order; files stay files."""
        all_origins = self.origins or range(len(self))
        origins = tuple(all_origins[index] for index in indices.tolist())
        images, labels = self.images[indices], self.labels[indices]
        masks = None if self.masks is None else self.masks[indices]
        held = None if self.held is None else self.held[indices]
        return dataclasses.replace(
            self, images=images, labels=labels, masks=masks, origins=origins, held=held
        )

    def divide(self, indices: Tensor) -> tuple["ImageSet", "ImageSet"]:
        """Return the images at other indices, in their order, and the images at `indices` (n,)."""
        others = torch.ones(len(self), dtype=torch.bool)
        others[indices] = False
        return self.select(others.nonzero().squeeze(1)), self.select(indices)

    def name(self, index: int) -> str:
        """Return the name of an image: its file, relative to the folder, or "no. 17"."""
        origin = self.origins[index] if self.origins else index
        if isinstance(origin, int):
            return f"no. {origin}"
        path = origin if isinstance(origin, str) else f"{origin.shard}{os.sep}{origin.name}"
        return path.removeprefix(f"{self.folder}{os.sep}").replace(os.sep, "/")

    def entry(self, index: int) -> dict[str, Any]:
        """Return what identifies an image in tables and JSON: its index, and its file if any."""
        return {"index": index} | ({"file": self.name(index)} if self.fingerprint else {})

    def to(self, device: torch.device) -> "ImageSet":
        """Return the set with its images and labels on a device."""
        images, labels = self.images.to(device), self.labels.to(device)
        return dataclasses.replace(self, images=images, labels=labels)

    def resized(self, preprocess: Preprocess) -> "ImageSet":
        """Return the set with images and masks of a model's size."""
        if isinstance(self.images, ImageFiles):
            files = dataclasses.replace(self.images, preprocess=preprocess)
            return dataclasses.replace(self, images=files)
        size = preprocess.image_size
        need = len(self) * preprocess.channels * math.prod(size)
        if self.images.shape[2:] != size and need > free_memory() / local_processes():
            raise ValueError(
                f"data.image_size: {len(self):,} images of {sides(size)} pixels take "
                f"{need / 1e9:.1f} GB for each process, more than is free; use a smaller size, "
                "fewer images or processes, or image files, which are decoded when needed"
            )
        images = preprocess.resize_all(self.images)
        masks = None if self.masks is None else preprocess.resize_masks(self.masks)
        return dataclasses.replace(self, images=images, masks=masks)

    def pixels(self) -> Tensor:
        """Return all images as (N, channels, H, W) uint8; meant for sets that fit into memory."""
        return self.images if isinstance(self.images, Tensor) else self.images.read()

    def in_memory(self) -> "ImageSet":
        """Return the set with all images decoded."""
        return dataclasses.replace(self, images=self.pixels())

    def batches(self, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images (B, channels, H, W) and labels (B,) at each row of indices (steps, B)."""
        rows = indices.to(self.device)
        if isinstance(self.images, Tensor):
            images: Iterable[Tensor] = (self.images[row] for row in rows)
        else:
            images = self.images.batches(indices)
        yield from zip(images, (self.labels[row] for row in rows), strict=True)

    def class_counts(self) -> list[int]:
        """Count the images of each class."""
        return self.labels.bincount(minlength=len(self.classes)).tolist()


def _relative(path: str, folder: Path) -> str:
    """Return a path relative to a folder, with slashes; the path itself if on another drive."""
    with contextlib.suppress(ValueError):
        path = os.path.relpath(path, folder)
    return path.replace(os.sep, "/")


def _check_names(classes: Sequence[str], folder: Path) -> None:
    """Check that class names are UTF-8 and differ; a note names those that differ in case only."""
    spelled = dict[str, str]()
    for name in classes:
        if name.encode(errors="replace").decode() != name:
            raise ValueError(f"data.root: class {printable(name)} is not UTF-8; rename it")
        composed = unicodedata.normalize("NFC", name)
        other = spelled.setdefault(composed.casefold(), name)
        if other != name and composed == unicodedata.normalize("NFC", other):
            raise ValueError(
                f"data.root: two classes in {folder} are called {name}, with accents encoded in "
                "different ways (Unicode NFC and NFD); merge them"
            )
        if other != name:
            note_once(f"{folder}: the classes {other} and {name} differ in case only")


class UserFile(NamedTuple):
    """An image file of a user, as a folder, a table or shards list it."""

    file: ImageFile
    label: str  # its class
    held: bool = False  # whether the user holds out this training image


def user_files(
    data: DataConfig,
    train: bool,
    split: bool,
    folder: Path,
    files: Sequence[UserFile],
    classes: Sequence[str],
    listed: bytes | None = None,
) -> ImageSet:
    """Return a user's files as a set, after checks that all layouts share.

    Args:
        split: Whether to return only the part of the files that `data.test_fraction` decides on.
        listed: Identifies files and labels in the fingerprint; None is their names in the folder.

    Raises:
        ValueError: There are too few classes, or images of a class, or `data.test_fraction` is
            given although the files are not split.
    """
    allowed = f"null, because {data.root} says which images are for testing"
    fraction = data.test_fraction
    # Images of another folder may be tested with, whatever decided on those of the training folder.
    require(split or not train or fraction is None, "data.test_fraction", fraction, allowed)
    if len(classes) < (2 if train or split else 1):
        raise ValueError(
            f"data.root: {folder} has {len(classes)} classes ({join(classes)}); a classifier needs "
            "at least two"
        )
    _check_names(classes, folder)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = torch.tensor([numbers[entry.label] for entry in files], dtype=torch.int64)
    counts = labels.bincount(minlength=len(classes)).tolist()
    least, part = (2, "") if split else (1, "training " if train else "test ")
    few = [
        f"class {shorten(name)} has {counted(count, f'{part}image')}"
        for name, count in zip(classes, counts, strict=True)
        if count < least
    ]
    if few:
        raise ValueError(
            f"data.root: {join(few)} in {folder}; each class needs at least {least}: add images, "
            "or delete the class"
        )
    paths = tuple(entry.file for entry in files)
    if listed is None:
        pairs = zip(paths, labels.tolist(), strict=True)
        lines = (f"{_relative(str(path), folder)}\0{label}\n" for path, label in pairs)
        listed = "".join(lines).encode(errors="surrogateescape")
    fraction = (fraction or TEST_FRACTION) if split else None
    first = first_copies(paths)
    if len(first.unique()) < len(first):  # older versions did not look for copies
        listed += first.numpy().tobytes()
    fingerprint = hashlib.sha256(f"{fraction}\n".encode() + listed).hexdigest()
    held = torch.tensor([entry.held for entry in files])
    images = ImageSet(
        ImageFiles(paths, Preprocess.from_config(data), data.workers), labels, tuple(classes),
        origins=paths, folder=str(folder), fingerprint=fingerprint, split=split,
        held=held if held.any() else None,
    )  # fmt: skip
    if fraction is None:
        return images
    choose = partial(fraction_per_class, fraction=fraction, seed=0, purpose="data.test_fraction")
    return images.divide(together(labels, first, choose))[0 if train else 1]
