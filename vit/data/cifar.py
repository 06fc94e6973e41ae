"""CIFAR-10 and CIFAR-100: read from their files, each of which is verified first.

torchvision reads them too, but importing it and copying its array take two seconds. It downloads
and unpacks what is missing, see `vit.data.cifar_archive`.
"""

import hashlib
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vit.config import DataConfig
from vit.data.listing import Source
from vit.hardware import usable_cores


@dataclass(frozen=True)
class CifarFiles:
    """The files of a data set, all of them pickles.

    Attributes:
        folder: Folder inside the archive.
        train: MD5 sums of the files with training images.
        test: MD5 sums of the files with test images.
        meta: The file with the class names, and its MD5 sum.
        labels: Key of the labels.
        classes: Key of the class names.
    """

    folder: str
    train: dict[str, str]
    test: dict[str, str]
    meta: tuple[str, str]
    labels: str
    classes: str


FILES = {
    "cifar10": CifarFiles(
        folder="cifar-10-batches-py",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        meta=("batches.meta", "5ff9c542aee3614f3951f8cda6e48888"),
        labels="labels",
        classes="label_names",
    ),
    "cifar100": CifarFiles(
        folder="cifar-100-python",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta=("meta", "7973b15100ade9c7d40fb424638fde48"),
        labels="fine_labels",
        classes="fine_label_names",
    ),
}


def read_cifar(data: DataConfig, train: bool) -> Source:
    """Read the training or test images; unpack or download the files if any is missing or damaged.

    Raises:
        ValueError: The data is missing or damaged and could not be downloaded.
    """
    files, root = FILES[data.name], Path(data.root).expanduser()
    found = _read_files(files, root, train)
    if found is None:
        # Imported late, because it imports torchvision.
        from vit.data.cifar_archive import restore

        restore(data.name, root, data.download)
        found = _read_files(files, root, train)
        assert found is not None
    return found


def _read_files(files: CifarFiles, root: Path, train: bool) -> Source | None:
    """Read a data set, or return None if any of its files is missing or damaged."""
    folder, (meta, meta_sum) = root / files.folder, files.meta
    needed = files.train if train else files.test
    sums = {**files.train, **files.test, meta: meta_sum}

    def read(file: str) -> dict[str, Any] | None:
        path = folder / file
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.md5(content, usedforsecurity=False).hexdigest() != sums[file]:
            return None
        return pickle.loads(content, encoding="latin1") if file in (*needed, meta) else {}

    with ThreadPoolExecutor(usable_cores()) as pool:  # hashing takes several of them
        found = dict(zip(sums, pool.map(read, sums), strict=True))
    batches = [found[file] for file in needed]
    names = found[meta]
    if None in found.values() or names is None:
        return None
    images = torch.cat([torch.from_numpy(batch["data"]) for batch in batches if batch])
    labels = [label for batch in batches if batch for label in batch[files.labels]]
    images = images.view(-1, 3, 32, 32)
    return Source(images, torch.tensor(labels), tuple(names[files.classes]))
