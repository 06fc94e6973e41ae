"""The archives of CIFAR-10 and CIFAR-100: downloaded, verified and unpacked with torchvision."""

import contextlib
from http.client import HTTPException
from pathlib import Path

from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import check_integrity, download_url, extract_archive

from vit.data.layout import refuse_to_download

SOURCES = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def restore(name: str, root: Path, download: bool) -> None:
    """Unpack the archive of a data set, downloading it first if it is missing or damaged.

    Args:
        name: "cifar10" or "cifar100".
        root: Folder for the archive and its unpacked contents.
        download: Whether to download the archive.

    Raises:
        ValueError: The archive could not be downloaded or unpacked.
    """
    dataset = SOURCES[name]
    archive, problem = root / dataset.filename, _problem(dataset, root)
    whole = check_integrity(archive, dataset.tgz_md5)
    if not whole and not download:
        what = "data.download=false, so nothing was downloaded"
        raise _no_data(dataset, root, f"{problem} ({what})") from None
    if not whole:
        refuse_to_download(dataset.__name__.lower(), root)
    source = archive if whole else dataset.url
    print(f"{problem}: {'unpacking' if whole else 'downloading'} {source}", flush=True)
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        if not whole:
            _fetch(dataset, root)
        extract_archive(archive, root)
        dataset(root)  # raises RuntimeError if a file is still missing or damaged
    except (OSError, HTTPException, RuntimeError) as error:
        with contextlib.suppress(OSError):
            if not check_integrity(archive, dataset.tgz_md5):
                archive.unlink(missing_ok=True)  # incomplete, if the connection was lost
            for folder in missing:  # torchvision creates them before the download
                folder.rmdir()
        raise _no_data(dataset, root, f"{problem} (tried {source}: {error})") from None


def _fetch(dataset: type[CIFAR10], root: Path) -> None:
    """Download the archive; try once more if it arrives damaged.

    Raises:
        OSError: The connection or the disk failed.
        HTTPException: The server's response is not valid HTTP.
        RuntimeError: The archive arrived damaged twice.
    """
    for _ in range(2):
        try:
            download_url(dataset.url, root, dataset.filename, dataset.tgz_md5)
        except RuntimeError:  # wrong checksum
            print(f"{dataset.filename} arrived damaged", flush=True)
        else:
            return
    raise RuntimeError(f"{dataset.filename} arrived damaged twice and was deleted")


def _problem(dataset: type[CIFAR10], root: Path) -> str:
    """Describe which files of a data set are damaged or missing."""
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
        f"--data.root at the folder that contains it; `make demo` needs no download."
    )
