"""Published data sets: those that torchvision downloads, and scikit-learn's digits."""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.console import say, shorten
from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.sampling import fraction_per_class
from vit.data.stream import ImageFiles

DIGITS_TEST_FRACTION = 0.2
BRIGHTEST = 16  # of digits, whose values count the dark ones of 4 x 4 smaller pixels
# Of CIFAR-10: files of training and test images, and the hash of each with batches.meta.
CIFAR10_FILES = [f"data_batch_{n}" for n in range(1, 6)], ["test_batch"]
CIFAR10_SHA256 = (
    "41add04eadcc7bd3c69784e1cb1747d0b6ed34e760df98b1892d6f83603227ca",
    "31245028991cfe8dfe2ee8d7625aa439c280cf20876a88c5576bee33ea247ed2",
)


def read_cifar10(archive: str, data: DataConfig, train: bool) -> ImageSet:
    """Read CIFAR-10 where it is unpacked; importing torchvision to do so would take a second."""
    part, folder = 0 if train else 1, Path(data.root) / "cifar-10-batches-py"
    paths = [folder / name for name in (*CIFAR10_FILES[part], "batches.meta")]
    contents = [path.read_bytes() for path in paths if path.is_file()]
    if hashlib.sha256(b"".join(contents)).hexdigest() != CIFAR10_SHA256[part]:
        return read_torchvision("CIFAR10", BY_FLAG, _cifar, archive, data, train)
    *batches, names = (pickle.loads(content, encoding="latin1") for content in contents)
    images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = torch.tensor([label for batch in batches for label in batch["labels"]])
    return ImageSet(torch.from_numpy(images), labels, tuple(names["label_names"]))


def read_torchvision(
    name: str,
    parts: tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]],
    read: Callable[[Any], tuple[Tensor | Sequence[Path], Any]],
    archive: str,
    data: DataConfig,
    train: bool,
) -> ImageSet:
    """Read or list the training or test images, downloading them if they are missing.

    `parts` has the arguments of torchvision's class for each part of the training images, and of
    the test images. `read` returns the images (N, channels, H, W) uint8 or files of a part, and the
    labels. `archive` tells users who download files by hand what belongs into data.root.
    """
    from torchvision import datasets as tv

    dataset, root = getattr(tv, name), Path(data.root)
    problem = "data.download=false, so it was not downloaded"
    for download in (False, True)[: 1 + data.download]:
        if download:
            places = (at for top in root.glob(data.spec.files) for at in (top, *top.rglob("*")))
            for link in filter(Path.is_symlink, places):  # torchvision would write through it
                raise ValueError(f"data.root: {link} is a link; delete it to download {data.name}")
            say(f"{data.name} is not in {root}, or damaged: unpacking or downloading it")
        try:
            sets = [dataset(root, **part, download=download) for part in parts[0 if train else 1]]
            images, numbers = zip(*map(read, sets), strict=True)
            labels = torch.cat([torch.as_tensor(part, dtype=torch.int64) for part in numbers])
            # SVHN's classes are the digits themselves.
            classes = tuple(getattr(sets[0], "classes", map(str, range(10))))
            if not 0 <= labels.min() <= labels.max() < len(classes):
                raise ValueError("labels without a class")
            break
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # damaged files lead to all kinds
            if download:
                problem = f"downloading {getattr(dataset, 'url', 'it')}: {shorten(error, 100)}"
    else:
        raise ValueError(
            f"data.root: {data.name} is not in {root}, or damaged ({problem}). Put {archive} into "
            f"{root.resolve()}, or point --data.root at the folder that contains it; `make demo` "
            "needs no download."
        )
    if isinstance(images[0], Tensor):
        return ImageSet(images[0], labels, classes)
    paths = tuple(str(path) for part in images for path in part)
    files = ImageFiles(paths, Preprocess.from_config(data), data.workers)
    return ImageSet(files, labels, classes, origins=paths, folder=str(root))


def _cifar(part: Any) -> tuple[Tensor, list[int]]:
    # Copies nothing: torchvision's array is a view of one whose channels come first.
    return torch.from_numpy(part.data.transpose(0, 3, 1, 2)).contiguous(), part.targets


def _mnist(part: Any) -> tuple[Tensor, Tensor]:
    return part.data.byte().reshape(len(part.targets), 1, 28, 28), part.targets


def _svhn(part: Any) -> tuple[Tensor, np.ndarray]:
    return torch.from_numpy(part.data).contiguous(), part.labels


def _files(part: Any) -> tuple[Sequence[Path], list[int]]:
    return getattr(part, "_image_files", None) or part._images, part._labels


BY_FLAG = [{"train": True}], [{"train": False}]
BY_NAME = [{"split": "train"}], [{"split": "test"}]
# As is usual, both of the small parts of Flowers102, 1,020 images each, are for training.
FLOWERS = [{"split": "train"}, {"split": "val"}], [{"split": "test"}]
PETS = [{"split": "trainval"}], [{"split": "test"}]
CIFAR = "cifar-{}-python.tar.gz or the unpacked cifar-{}-{}/"
CIFAR10, CIFAR100 = CIFAR.format(10, 10, "batches-py"), CIFAR.format(100, 100, "python")
cifar10 = partial(read_cifar10, CIFAR10)
cifar100 = partial(read_torchvision, "CIFAR100", BY_FLAG, _cifar, CIFAR100)
fashion_mnist = partial(read_torchvision, "FashionMNIST", BY_FLAG, _mnist, "FashionMNIST/raw/")
svhn = partial(read_torchvision, "SVHN", BY_NAME, _svhn, "train_32x32.mat and test_32x32.mat")
flowers102 = partial(read_torchvision, "Flowers102", FLOWERS, _files, "flowers-102/")
food101 = partial(read_torchvision, "Food101", BY_NAME, _files, "food-101/")
oxford_iiit_pet = partial(read_torchvision, "OxfordIIITPet", PETS, _files, "oxford-iiit-pet/")


def digits(data: DataConfig, train: bool) -> ImageSet:
    """Read the training images, or the test images: a fifth of each digit, always the same."""
    from sklearn.datasets import load_digits  # imported late because it is optional

    raw = load_digits()
    images = torch.from_numpy(np.round(raw.images * 255 / BRIGHTEST).astype(np.uint8))[:, None]
    labels = torch.from_numpy(raw.target).long()
    chosen = torch.full((len(labels),), train)
    chosen[fraction_per_class(labels, DIGITS_TEST_FRACTION, 0, "digits")] = not train
    return ImageSet(images[chosen], labels[chosen], tuple(map(str, raw.target_names)))
