"""Labelled pictures as a data set provides them, in memory or as a list of files."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vit.data.tar_member import TarMember


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

    pictures: Tensor | tuple[Path, ...] | tuple[TarMember, ...]
    labels: Tensor
    classes: tuple[str, ...]
    masks: Tensor | None = None
    fingerprint: str = ""
    split: bool = False
