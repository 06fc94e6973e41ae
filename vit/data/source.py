"""Where images come from: a data set's pictures, labels and class names, not resized yet."""

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from vit.data.config import DataConfig
from vit.data.sampling import fraction_per_class

TEST_FRACTION = 0.2


class TarMember(NamedTuple):
    """An image file in a tar file that is not compressed.

    Attributes:
        shard: The tar file.
        name: Name of the member, for messages.
        offset: Where its content starts in the tar file, in bytes.
        size: Length of its content, in bytes.
    """

    shard: str
    name: str
    offset: int
    size: int

    def __str__(self) -> str:
        return f"{self.name} in {self.shard}"

    def open(self) -> io.BytesIO:
        """Read the content.

        The tar file is opened anew for each image: next to decoding, that takes no time, and no
        process has to count and close handles.

        Raises:
            OSError: The tar file is gone, or has become shorter.
        """
        with Path(self.shard).open("rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise OSError(f"{self.shard} has become shorter")
        return io.BytesIO(content)


@dataclass(frozen=True)
class Source:
    """Labelled pictures of one part of a data set, not resized yet.

    Attributes:
        pictures: (N, channels, H, W) uint8, or N image files of any size, which may be members of
            tar files.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        masks: (N, H, W) bool, True on the object, or None if the data set has no masks.
        fingerprint: SHA-256 of the files and labels that are listed, or, if the parts were made by
            data.test_fraction, of this fraction and all parts together. Members of tar files count
            by the names and sizes of the tar files. "" for published data sets.
        split: Whether the parts were made by data.test_fraction.
    """

    pictures: Tensor | tuple[Path | TarMember, ...]
    labels: Tensor
    classes: tuple[str, ...]
    masks: Tensor | None = None
    fingerprint: str = ""
    split: bool = False


def read_source(data: DataConfig, train: bool, count: int | None = None) -> Source:
    """Find the training or test images of a data set; files are listed but not read.

    Args:
        data: Which data set, and the folder it is in.
        train: Whether to find the training images rather than the test images.
        count: Number of shapes to draw; None draws 10,000 training and 2,000 test images. Other
            data sets are always complete.

    Returns:
        The pictures, in the data set's order.

    Raises:
        ValueError: The data is missing and could not be downloaded.
    """
    reader = resolve_name(f"vit.data.{data.spec.reader}")
    return reader(data, train, count) if data.spec.drawn else reader(data, train)


# The rest is for readers of a user's files: vit.data.folder, table and shards.


def list_files(folder: Path, paths: Iterable[Path], labels: Tensor) -> bytes:
    """List files and their labels for a fingerprint, relative to a folder that may be moved."""
    pairs = zip(paths, labels.tolist(), strict=True)
    lines = (f"{os.path.relpath(path, folder)}\0{label}\n" for path, label in pairs)
    return "".join(lines).encode(errors="surrogateescape")


def files_of_part(
    files: Sequence[Path | TarMember],
    labels: Tensor,
    classes: Sequence[str],
    listed: bytes,
) -> Source:
    """Return the source of files that the user has marked for training or for testing.

    Args:
        files: The N files.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        listed: What the fingerprint depends on.
    """
    return Source(tuple(files), labels, tuple(classes), fingerprint=_fingerprint(None, listed))


def split_files(
    files: Sequence[Path | TarMember],
    labels: Tensor,
    classes: Sequence[str],
    listed: bytes,
    train: bool,
    test_fraction: float | None,
) -> Source:
    """Split files of which none are marked for testing; every run splits them alike.

    Args:
        files: The N files.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        listed: What the fingerprint depends on, besides the fraction.
        train: Whether to return the training images rather than the test images.
        test_fraction: Fraction of each class that is used as test images; None is 0.2.
    """
    fraction = test_fraction or TEST_FRACTION
    chosen = torch.full((len(labels),), train)
    chosen[fraction_per_class(labels, fraction, 0, "data.test_fraction")] = not train
    pictures = tuple(files[n] for n in chosen.nonzero().squeeze(1).tolist())
    fingerprint = _fingerprint(fraction, listed)
    return Source(pictures, labels[chosen], tuple(classes), fingerprint=fingerprint, split=True)


def _fingerprint(fraction: float | None, listed: bytes) -> str:
    return hashlib.sha256(f"{fraction}\n".encode() + listed).hexdigest()


def require_classes(place: Path, classes: Sequence[str]) -> None:
    """Check that there are at least two classes.

    Raises:
        ValueError: There are less than two classes.
    """
    if len(classes) < 2:
        raise ValueError(
            f"data.root: {place} has a single class, {classes[0]}; a classifier needs at least two"
        )
