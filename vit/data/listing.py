"""A list of image files with labels."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vit.data.tar_member import TarMember


@dataclass(frozen=True)
class FileList:
    """The image files of one part of a data set.

    Attributes:
        paths: The N files, or members of tar files.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        fingerprint: SHA-256 of the files and labels that are listed, or, if the parts were made by
            data.test_fraction, of this fraction and all parts together. Members of tar files count
            by the names and sizes of the tar files.
        split: Whether the parts were made by data.test_fraction.
    """

    paths: tuple[Path, ...] | tuple[TarMember, ...]
    labels: Tensor
    classes: tuple[str, ...]
    fingerprint: str
    split: bool
