"""Published data sets: those that torchvision downloads, and scikit-learn's digits."""

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision import datasets as tv
from torchvision.datasets.utils import check_integrity, download_and_extract_archive

from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.layout import refuse_to_download
from vit.data.sampling import fraction_per_class
from vit.data.stream import ImageFiles
from vit.settings import shorten

DIGITS_TEST_FRACTION = 0.2
NEED_SCIPY = (tv.SVHN, tv.Flowers102)
BRIGHTEST = 16  # pixel values are 0 to 16: how many of 4 x 4 smaller pixels are ink


def read_torchvision(
    make: type[Any],
    parts: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]],
    read: Callable[[Any], tuple[Tensor | Sequence[Path], Any]],
    place: str,
    data: DataConfig,
    train: bool,
) -> ImageSet:
    """Read or list the training or test images, downloading them if they are missing.

    Args:
        make: torchvision's class.
        parts: Its arguments for each part of the training images, and of the test images.
        read: Returns images (N, channels, H, W) uint8 or N image files, and labels, of a part.
        place: What is in data.root, as a hint for files put there by hand.
        data: The data set.
        train: Whether to read the training images rather than the test images.

    Raises:
        ValueError: The data is missing or damaged and could not be downloaded, or scipy is not
            installed.
    """
    if make in NEED_SCIPY:
        _require_package(data.name, "scipy", "scipy")
    made = [_made(make, kind, place, data) for kind in parts[0 if train else 1]]
    found = [read(part) for part in made]
    labels = torch.cat([torch.as_tensor(labels, dtype=torch.int64) for _, labels in found])
    # SVHN's classes are the digits themselves.
    classes = tuple(getattr(made[0], "classes", map(str, range(10))))
    if isinstance(found[0][0], Tensor):
        return ImageSet(found[0][0], labels, classes)
    root = Path(data.root).expanduser()
    paths = tuple(str(path) for paths, _ in found for path in paths)
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise ValueError(
            f"data.root: {data.name} in {root} is incomplete: {len(missing):,} of {len(paths):,} "
            f"images are missing, such as {missing[0]}; delete {root / place} to unpack it again"
        )
    files = ImageFiles.from_config(paths, data)
    return ImageSet(files, labels, classes, origins=paths, folder=str(root))


def _made(make: type[Any], kind: dict[str, Any], place: str, data: DataConfig) -> Any:
    """Make torchvision's data set, unpacking or downloading it if it is missing or damaged."""
    name, root = data.name, Path(data.root).expanduser()

    def no_data(problem: str) -> ValueError:
        return ValueError(
            f"data.root: {name} is not in {root}, or damaged ({problem}). Put {place} into "
            f"{root.resolve()}, or point --data.root at the folder that contains it; `make demo` "
            "needs no download."
        )

    with contextlib.suppress(RuntimeError):  # missing or, for some data sets, damaged
        return make(root, **kind)
    archived = hasattr(make, "tgz_md5")
    intact = archived and check_integrity(root / make.filename, make.tgz_md5)
    if not intact:
        if not data.download:
            raise no_data("data.download=false, so it was not downloaded")
        refuse_to_download(name, root)
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    url = getattr(make, "url", "it")
    action = f"unpacking {root / make.filename}" if intact else f"downloading {url}"
    print(f"{name} is not in {root}, or damaged: {action}", flush=True)
    try:
        if archived:  # make() alone would keep a damaged file of class names
            download_and_extract_archive(make.url, root, filename=make.filename, md5=make.tgz_md5)
        return make(root, **kind, download=True)
    except (OSError, HTTPException, RuntimeError) as error:
        with contextlib.suppress(OSError):
            for folder in missing:  # torchvision creates them before the download
                folder.rmdir()
        raise no_data(f"{action}: {shorten(error, 300)}") from None


def _cifar(part: Any) -> tuple[Tensor, list[int]]:
    # Not a copy: torchvision's array is a view, with the channels last, of one with them first.
    return torch.from_numpy(part.data.transpose(0, 3, 1, 2)).contiguous(), part.targets


def _mnist(part: Any) -> tuple[Tensor, Tensor]:
    return part.data[:, None], part.targets


def _svhn(part: Any) -> tuple[Tensor, np.ndarray]:
    return torch.from_numpy(part.data).contiguous(), part.labels


def _files(part: Any) -> tuple[list[Path], list[int]]:
    return part._image_files, part._labels


BY_FLAG = [{"train": True}], [{"train": False}]
BY_NAME = [{"split": "train"}], [{"split": "test"}]
CIFAR = "cifar-{}-python.tar.gz or the unpacked cifar-{}/"
cifar10 = partial(
    read_torchvision, tv.CIFAR10, BY_FLAG, _cifar, CIFAR.format("10", "10-batches-py")
)
cifar100 = partial(
    read_torchvision, tv.CIFAR100, BY_FLAG, _cifar, CIFAR.format("100", "100-python")
)
fashion_mnist = partial(read_torchvision, tv.FashionMNIST, BY_FLAG, _mnist, "FashionMNIST/raw/")
svhn = partial(read_torchvision, tv.SVHN, BY_NAME, _svhn, "train_32x32.mat and test_32x32.mat")
# As is usual, both of the small parts, 1,020 images each, are for training; 6,149 for testing.
flowers102 = partial(
    read_torchvision,
    tv.Flowers102,
    ([{"split": "train"}, {"split": "val"}], [{"split": "test"}]),
    _files,
    "flowers-102/",
)
food101 = partial(read_torchvision, tv.Food101, BY_NAME, _files, "food-101/")
oxford_iiit_pet = partial(
    read_torchvision,
    tv.OxfordIIITPet,
    ([{"split": "trainval"}], [{"split": "test"}]),
    lambda part: (part._images, part._labels),
    "oxford-iiit-pet/",
)


def digits(data: DataConfig, train: bool) -> ImageSet:
    """Read the training images, or the test images: a fifth of each digit, always the same.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    _require_package("digits", "sklearn", "scikit-learn")
    from sklearn.datasets import load_digits  # imported late because it is optional

    raw = load_digits()
    images = torch.from_numpy(np.round(raw.images * 255 / BRIGHTEST).astype(np.uint8))[:, None]
    labels = torch.from_numpy(raw.target).long()
    chosen = torch.full((len(labels),), train)
    chosen[fraction_per_class(labels, DIGITS_TEST_FRACTION, 0, "digits")] = not train
    return ImageSet(images[chosen], labels[chosen], tuple(str(name) for name in raw.target_names))


def _require_package(data_name: str, module: str, package: str) -> None:
    """Refuse a data set whose module is not installed, and name the package to install."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(
            f"data.name: {data_name} needs {package}, which is not installed; "
            f"install it with `pip install {package}`"
        )
