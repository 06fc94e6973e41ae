"""CIFAR-10 and CIFAR-100: torchvision fetches, unpacks and reads them, and checks their sums."""

import contextlib
from http.client import HTTPException
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, download_url, extract_archive

SOURCES = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def read_cifar(
    name: str, root: Path, train: bool, download: bool
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read the training or the test images, unpacking or fetching them where they are not whole.

    Args:
        name: "cifar10" or "cifar100".
        root: Folder that holds, or will hold, the archive and what is in it.
        train: Training images, or else test images.
        download: Whether to fetch what root does not hold.

    Returns:
        Images (N, 3, H, W) uint8, labels (N,) int64 and the class names.

    Raises:
        ValueError: The data is not there or damaged, and could not be fetched.
    """
    dataset = SOURCES[name]
    try:
        raw = dataset(root, train=train)
    except RuntimeError:  # not there, or not whole
        raw = _restored(dataset, root, train, download)
    images = torch.from_numpy(raw.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(raw.targets), tuple(raw.classes)


def _restored(dataset: type[CIFAR10], root: Path, train: bool, download: bool) -> CIFAR10:
    """Unpack a data set from its archive, which is fetched first where it is not whole; read it.

    Raises:
        ValueError: That is not possible.
    """
    archive, problem = root / dataset.filename, _problem(dataset, root)
    whole = check_integrity(archive, dataset.tgz_md5)
    if not whole and not download:
        what = "data.download=false, so nothing was fetched"
        raise _no_data(dataset, root, f"{problem} ({what})") from None
    source = archive if whole else dataset.url
    print(f"{problem}: {'unpacking' if whole else 'downloading'} {source}", flush=True)
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        if not whole:
            _fetch(dataset, root)
        extract_archive(archive, root)
        return dataset(root, train=train)
    except (OSError, HTTPException, RuntimeError) as error:
        with contextlib.suppress(OSError):
            if not check_integrity(archive, dataset.tgz_md5):
                archive.unlink(missing_ok=True)  # half of it, where the connection broke off
            for folder in missing:  # torchvision makes them before it has anything to put there
                folder.rmdir()
        raise _no_data(dataset, root, f"{problem} (tried {source}: {error})") from None


def _fetch(dataset: type[CIFAR10], root: Path) -> None:
    """Download the archive, once more if it arrives damaged.

    Raises:
        OSError: The server or the disk failed.
        HTTPException: The server does not speak HTTP.
        RuntimeError: It arrived damaged twice.
    """
    for _ in range(2):
        try:
            download_url(dataset.url, root, dataset.filename, dataset.tgz_md5)
        except RuntimeError:  # its sum is wrong
            print(f"{dataset.filename} arrived damaged", flush=True)
        else:
            return
    raise RuntimeError(f"{dataset.filename} arrived damaged twice, and is not kept")


def _problem(dataset: type[CIFAR10], root: Path) -> str:
    """Say which files of a data set are damaged or missing."""
    folder, archive = root / dataset.base_folder, root / dataset.filename
    sums = {}
    if folder.exists():
        meta = (dataset.meta["filename"], dataset.meta["md5"])
        for file, md5 in (*dataset.train_list, *dataset.test_list, meta):
            sums[folder / file] = md5
    if archive.exists():
        sums[archive] = dataset.tgz_md5
    bad = [
        f"{path} is {'damaged' if path.exists() else 'missing'}"
        for path, md5 in sums.items()
        if not check_integrity(path, md5)
    ]
    return ", ".join(bad) or f"{dataset.__name__} is not in {root}"


def _no_data(dataset: type[CIFAR10], root: Path, what: str) -> ValueError:
    archive, folder = dataset.filename, dataset.base_folder
    return ValueError(
        f"{what}. Put {archive} or the unpacked {folder}/ into {root.resolve()}, or point "
        f"--data.root at the folder that holds it; `make demo` needs no download."
    )
