"""Data sets that torchvision downloads and verifies: arrays as tensors, image files as paths.

CIFAR has a module of its own, `vit.data.cifar`, because its files are verified one by one.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision.datasets import SVHN, FashionMNIST, Flowers102, Food101, OxfordIIITPet

from vit.data.installed import require_package
from vit.data.layout import refuse_to_download
from vit.settings import shorten

Pictures = Tensor | tuple[Path, ...]


@dataclass(frozen=True)
class _Set:
    """How torchvision's data set is made and read.

    Attributes:
        make: torchvision's class.
        train: Arguments of each part of the training images.
        test: Arguments of each part of the test images.
        read: Returns pictures and labels of a part.
        place: What is in root, as a hint for files put there by hand.
        needs: Whether reading needs scipy.
    """

    make: Callable[..., Any]
    train: tuple[dict[str, Any], ...]
    test: tuple[dict[str, Any], ...]
    read: Callable[[Any], tuple[Pictures, Any]]
    place: str
    needs_scipy: bool = False


SETS = {
    "fashion_mnist": _Set(
        FashionMNIST,
        train=({"train": True},),
        test=({"train": False},),
        read=lambda part: (part.data[:, None], part.targets),
        place="FashionMNIST/raw/",
    ),
    "svhn": _Set(
        SVHN,
        train=({"split": "train"},),
        test=({"split": "test"},),
        read=lambda part: (torch.from_numpy(part.data).contiguous(), part.labels),
        place="train_32x32.mat and test_32x32.mat",
        needs_scipy=True,
    ),
    # As is usual, both of the small parts, 1,020 images each, are for training; 6,149 for testing.
    "flowers102": _Set(
        Flowers102,
        train=({"split": "train"}, {"split": "val"}),
        test=({"split": "test"},),
        read=lambda part: (tuple(part._image_files), part._labels),
        place="flowers-102/",
        needs_scipy=True,
    ),
    "food101": _Set(
        Food101,
        train=({"split": "train"},),
        test=({"split": "test"},),
        read=lambda part: (tuple(part._image_files), part._labels),
        place="food-101/",
    ),
    "oxford_iiit_pet": _Set(
        OxfordIIITPet,
        train=({"split": "trainval"},),
        test=({"split": "test"},),
        read=lambda part: (tuple(part._images), part._labels),
        place="oxford-iiit-pet/",
    ),
}


def read_torchvision(
    name: str, root: Path, train: bool, download: bool
) -> tuple[Pictures, Tensor, tuple[str, ...]]:
    """Read or list the training or test images, downloading them if they are missing.

    Args:
        name: A key of `SETS`.
        root: Folder for the downloaded files.
        train: Whether to read the training images rather than the test images.
        download: Whether to download what is missing from root.

    Returns:
        Images (N, channels, H, W) uint8 or N image files, labels (N,) int64 and the class names.

    Raises:
        ValueError: The data is missing or damaged and could not be downloaded, or scipy is not
            installed.
    """
    known = SETS[name]
    if known.needs_scipy:
        require_package(name, "scipy", "scipy")
    parts = [_made(name, root, kind, download) for kind in (known.train if train else known.test)]
    read = [known.read(part) for part in parts]
    labels = torch.cat([torch.as_tensor(labels, dtype=torch.int64) for _, labels in read])
    # SVHN's classes are the digits themselves.
    classes = tuple(getattr(parts[0], "classes", map(str, range(10))))
    if isinstance(read[0][0], Tensor):
        return read[0][0], labels, classes
    paths = tuple(path for paths, _ in read for path in paths)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise ValueError(
            f"data.root: {name} in {root} is incomplete: {len(missing):,} of {len(paths):,} images "
            f"are missing, such as {missing[0]}; delete {root / known.place} to unpack it again"
        )
    return paths, labels, classes


def _made(name: str, root: Path, kind: dict[str, Any], download: bool) -> Any:
    """Make torchvision's data set, downloading it if it is missing.

    Raises:
        ValueError: It is missing or damaged and could not be downloaded.
    """
    make = SETS[name].make
    with contextlib.suppress(RuntimeError):  # missing or, for some data sets, damaged
        return make(root, **kind)
    if not download:
        raise _no_data(name, root, "data.download=false, so it was not downloaded")
    refuse_to_download(name, root)
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    print(f"{name} is not in {root}, or damaged: downloading it", flush=True)
    try:
        return make(root, **kind, download=True)
    except (OSError, HTTPException, RuntimeError) as error:
        with contextlib.suppress(OSError):
            for folder in missing:  # torchvision creates them before the download
                folder.rmdir()
        raise _no_data(name, root, shorten(error, 300)) from None


def _no_data(name: str, root: Path, problem: str) -> ValueError:
    return ValueError(
        f"data.root: {name} is not in {root}, or damaged ({problem}). Put {SETS[name].place} into "
        f"{root.resolve()}, or point --data.root at the folder that contains it; `make demo` needs "
        "no download."
    )
