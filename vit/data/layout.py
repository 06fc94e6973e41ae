"""How a user's own images are laid out on disk.

This module does not import torch, so the command line can recognize a folder before anything slow
is imported.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vit.console import counted, note

# What torchvision's ImageFolder reads, and what phones and web pages have besides.
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
    ".gif", ".avif", ".heic", ".heif",
)  # fmt: skip
TABLE_SUFFIX = ".csv"
SHARD_SUFFIX, CLASSES_FILE = ".tar", "classes.txt"
CIFAR10 = ("cifar-10-batches-py", "cifar-10-python.tar.gz")  # the data set, unpacked or not
# Folders, and words in a table's column "split", for the images of each part. Images for validation
# are the test images where there are no others.
TRAIN, TEST, VALIDATION = "train", "test", ("val", "valid", "validation")
LISTED = 10  # at most so many names in a message


def is_visible(name: str) -> bool:
    """Say whether a file or folder is the user's, not the system's, such as .DS_Store."""
    return not name.startswith(".") and name != "__MACOSX"


def is_image(path: str) -> bool:
    """Say whether a visible file has the suffix of an image."""
    return path.lower().endswith(IMAGE_SUFFIXES)


def has_parts(root: Path) -> bool:
    """Say whether a folder has train/ or a folder of test images, rather than class folders."""
    return any((root / name).is_dir() for name in (TRAIN, TEST, *VALIDATION))


def find_parts(root: Path, example: str) -> list[Path]:
    """Return the folders of the training and the test images, or the root alone, to be split.

    test/ comes before val/, valid/ and validation/, which then are not used. train/ may be missing.

    Args:
        root: The folder of a user's images.
        example: What a folder of test images contains, for the error message.

    Raises:
        ValueError: There is train/, but no folder of test images.
    """
    if not has_parts(root):
        return [root]
    for name in (TEST, *VALIDATION):
        if (root / name).is_dir():
            return [root / TRAIN, root / name]
    raise ValueError(
        f"data.root: {root} has no test/ ({content(root)}); add test/{example} (or val/{example}), "
        f"or point --data.root at {root / TRAIN} to split it by data.test_fraction"
    )


def report_ignored(folder: Path, files: Iterable[str]) -> None:
    """Print how many of the files in a folder are not images by their suffix."""
    others = [Path(path) for path in files if not is_image(path)]
    if others:
        kinds = {path.suffix.lower() or path.name for path in others}
        note(
            f"ignored {counted(len(others), 'file', ',')} of other types in {folder} "
            f"({some(sorted(kinds))}); supported are {', '.join(IMAGE_SUFFIXES)}"
        )


def recognize(root: Path) -> str | None:
    """Return the value of data.name for images of the user's own, or None for anything else."""
    if root.suffix.lower() == TABLE_SUFFIX and root.is_file():
        return "table"
    part = next((root / name for name in (TRAIN, TEST) if (root / name).is_dir()), root)
    # Any tar file may lie in a folder, but not in train/ or beside a list of classes.
    if tar_files(part) and (part != root or (root / CLASSES_FILE).is_file()):
        return "shards"
    folders = visible_folders(part)
    # Downloaded data sets may lie beside a folder of images, but not beside class folders.
    return "folder" if len(folders) > 1 and all(map(_has_image, folders)) else None


def check_default_data(root: Path) -> None:
    """Check a root that was given without data.name: the default, CIFAR-10, must be there.

    Whoever mistypes the path of their own images should not train on CIFAR-10 instead.

    Raises:
        ValueError: root does not exist, or contains something else.
    """
    download = "add --data.name cifar10 to download CIFAR-10 into it"
    if not root.exists():
        raise ValueError(f"data.root: {root} does not exist; check the path, or {download}")
    refuse_loose_images(root)
    if not any((root / name).exists() for name in CIFAR10):
        raise ValueError(
            f"data.root: {root} contains neither CIFAR-10 nor images in a layout that is "
            f"recognized ({content(root)}); add --data.name folder, table or shards for images of "
            f"your own (docs/data.md describes them), or {download}"
        )


def refuse_loose_images(root: Path) -> None:
    """Check that a folder does not contain images beside each other, without classes.

    Raises:
        ValueError: It does.
    """
    if root.is_dir() and _has_image(root):
        raise ValueError(
            f"data.root: images lie directly in {root}; each class needs a folder of its own, such "
            f"as {root}/cat/1.jpg, or a table names the classes (docs/data.md)"
        )


def refuse_to_download(name: str, root: Path) -> None:
    """Check that nothing is downloaded into a user's own folder of images.

    Raises:
        ValueError: root contains the user's images.
    """
    kind = recognize(root)
    if kind is not None:
        raise ValueError(
            f"data.root: {root} contains images of your own, and {name} would be downloaded into "
            f"it; use --data.name {kind} to train on them, or another --data.root for {name}"
        )


def _has_image(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(is_visible(entry.name) and is_image(entry.name) for entry in entries)


def visible_folders(folder: Path) -> list[Path]:
    """List the folders in a folder, without hidden ones; none if there is no such folder."""
    return [path for path in folder.glob("*") if is_visible(path.name) and path.is_dir()]


def tar_files(folder: Path) -> list[Path]:
    """List the tar files in a folder, sorted, without hidden ones; none if there is no folder."""
    return sorted(path for path in folder.glob(f"*{SHARD_SUFFIX}") if is_visible(path.name))


def visible_files(folder: Path) -> list[str]:
    """List the files in a folder and the folders below it, without hidden ones.

    Like torchvision's, the list is sorted by folder, then by name. It is text, of which a million
    fit into memory.
    """

    def walk() -> Iterator[tuple[str, list[str]]]:
        for parent, folders, files in os.walk(folder, followlinks=True):
            folders[:] = filter(is_visible, folders)
            yield parent, sorted(filter(is_visible, files))

    return [f"{parent}{os.sep}{name}" for parent, names in sorted(walk()) for name in names]


def content(folder: Path) -> str:
    """Describe what a folder contains."""
    if not folder.is_dir():
        return "it is a file"
    return f"it contains {some(sorted(path.name for path in folder.iterdir())) or 'nothing'}"


def some(names: Sequence[str]) -> str:
    """Join the first few names and count the rest."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more:,} more" if more > 0 else "")
