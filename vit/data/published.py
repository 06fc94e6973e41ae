"""Published data sets: those that torchvision downloads, and scikit-learn's digits."""

import contextlib
import hashlib
import inspect
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from vit.console import say, shorten
from vit.data.config import DATASETS, DataConfig, DatasetSpec
from vit.data.images import TEST_FRACTION, ImageSet
from vit.data.layout import is_stored, recognize
from vit.data.preprocess import Preprocess
from vit.data.sampling import fraction_per_class
from vit.data.stream import ImageFiles

BRIGHTEST = 16  # of digits, whose values count the dark ones of 4 x 4 smaller pixels
# Of CIFAR-10: files of training and test images, and the hash of each with batches.meta.
CIFAR10_FILES = [f"data_batch_{n}" for n in range(1, 6)], ["test_batch"]
CIFAR10_SHA256 = (
    "41add04eadcc7bd3c69784e1cb1747d0b6ed34e760df98b1892d6f83603227ca",
    "31245028991cfe8dfe2ee8d7625aa439c280cf20876a88c5576bee33ea247ed2",
)


def read_cifar10(data: DataConfig, train: bool) -> ImageSet:
    """Read CIFAR-10 where it is unpacked; importing torchvision to do so would take a second."""
    part, folder = 0 if train else 1, Path(data.root) / "cifar-10-batches-py"
    paths = [folder / name for name in (*CIFAR10_FILES[part], "batches.meta")]
    contents = [path.read_bytes() for path in paths if path.is_file()]
    if hashlib.sha256(b"".join(contents)).hexdigest() != CIFAR10_SHA256[part]:
        return read_torchvision(data, train)
    *batches, names = (pickle.loads(content, encoding="latin1") for content in contents)
    images = np.concatenate([batch["data"] for batch in batches]).reshape(-1, 3, 32, 32)
    labels = torch.tensor([label for batch in batches for label in batch["labels"]])
    return ImageSet(torch.from_numpy(images), labels, tuple(names["label_names"]))


def read_torchvision(data: DataConfig, train: bool) -> ImageSet:
    """Read or list the training or test images, downloading them if they are missing."""
    from torchvision import datasets as tv

    spec, root = DATASETS[data.name], Path(data.root)
    dataset = getattr(tv, spec.torchvision)
    splits = spec.training_splits if train else ("test",)
    by_flag = "train" in inspect.signature(dataset).parameters
    parts = [{"train": train} if by_flag else {"split": split} for split in splits]
    problem = "data.download=false, so it was not downloaded"
    for download in (False, True)[: 1 + data.download]:
        if download:
            # In the default root, other images may lie beside published data sets.
            is_target = is_stored(data) or root == Path(DataConfig.root)
            if not is_target and (own := recognize(root)):
                raise ValueError(
                    f"data.root: {root} contains images of your own, so {data.name} is not "
                    f"downloaded there; set data.name to {own}, or data.root to another folder"
                )
            places = (at for top in root.glob(spec.files) for at in (top, *top.rglob("*")))
            for link in filter(Path.is_symlink, places):  # torchvision would write through it
                raise ValueError(f"data.root: {link} is a link; delete it to download {data.name}")
            say(f"{data.name} is not in {root}, or damaged: unpacking or downloading it")
        lock: Any = _download_lock(root) if download else contextlib.nullcontext()
        try:
            with lock:
                return _join([dataset(root, **part, download=download) for part in parts], data)
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # damaged files raise many types of errors
            if download:
                problem = f"downloading {getattr(dataset, 'url', 'it')}: {shorten(error, 100)}"
    raise ValueError(
        f"data.root: {data.name} is not in {root}, or damaged ({problem}). Put {spec.archive} into "
        f"{os.path.realpath(root)}, or point --data.root at the folder that contains it; `make "
        "demo` needs no download."
    )


@contextlib.contextmanager
def _download_lock(root: Path) -> Iterator[None]:
    """Let runs that start together download one after the other."""
    path = root / ".download.lock"
    with FileLock(path):
        try:
            yield
        finally:  # while the lock is held; Windows cannot, where filelock does
            with contextlib.suppress(PermissionError):
                path.unlink(missing_ok=True)


def _join(sets: Sequence[Any], data: DataConfig) -> ImageSet:
    """Join parts of a torchvision data set; ValueError if they are not as expected."""
    images, numbers = zip(*(_content(part, DATASETS[data.name]) for part in sets), strict=True)
    labels = torch.cat([torch.as_tensor(part, dtype=torch.int64) for part in numbers])
    # SVHN's classes are the digits themselves.
    classes = tuple(getattr(sets[0], "classes", map(str, range(10))))
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError("labels without a class")
    if isinstance(images[0], Tensor):
        return ImageSet(images[0], labels, classes)
    paths = tuple(str(path) for part in images for path in part)
    files = ImageFiles(paths, Preprocess.from_config(data), data.workers)
    return ImageSet(files, labels, classes, origins=paths, folder=str(Path(data.root)))


def _content(part: Any, spec: DatasetSpec) -> tuple[Tensor | Sequence[Path], Any]:
    """Return images (N, channels, H, W) or files of a torchvision data set, and the labels."""
    if not hasattr(part, "data"):
        return getattr(part, "_image_files", None) or part._images, part._labels
    images = torch.as_tensor(part.data).byte()
    if images.ndim == 3:  # grey
        images = images[:, None]
    elif images.shape[-1] == 3:
        images = images.movedim(-1, 1)
    labels = part.targets if hasattr(part, "targets") else part.labels
    if images.shape != (len(labels), spec.channels, *spec.image_size):
        raise ValueError(f"images of shape {[*images.shape]}")
    return images.contiguous(), labels  # CIFAR's are a view of an array whose channels come first


def digits(data: DataConfig, train: bool) -> ImageSet:
    """Read the training images, or the test images: a fifth of each digit, always the same."""
    from sklearn.datasets import load_digits  # imported late because it is optional

    raw = load_digits()
    images = torch.from_numpy(np.round(raw.images * 255 / BRIGHTEST).astype(np.uint8))[:, None]
    labels = torch.from_numpy(raw.target).long()
    chosen = torch.full((len(labels),), train)
    chosen[fraction_per_class(labels, TEST_FRACTION, 0, "digits")] = not train
    return ImageSet(images[chosen], labels[chosen], tuple(map(str, raw.target_names)))
