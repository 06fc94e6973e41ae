"""Image folders in torchvision's layout: train/<class>/ and test/<class>/."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

LISTED = 10  # at most so many names in a message


def list_folder(root: Path, train: bool) -> tuple[tuple[Path, ...], Tensor, tuple[str, ...]]:
    """List the training or test images of an image folder.

    Args:
        root: Folder that contains train/ and test/; test/ is enough to list the test images.
        train: Whether to list the training images rather than the test images.

    Returns:
        The N files, sorted by path, labels (N,) int64 and the class names.

    Raises:
        ValueError: A folder, a class or its images are missing.
    """
    files = _find(root, train)
    if train:
        _require_same_classes(root, files.classes, _find(root, train=False).classes)
    _report_ignored(Path(files.root))
    for label, name in enumerate(files.classes):
        if label not in files.targets:
            raise _no_image(Path(files.root) / name)
    paths = tuple(Path(path) for path, _ in files.samples)
    return paths, torch.tensor(files.targets), tuple(files.classes)


def drop_unreadable(
    paths: Sequence[str], labels: Tensor, classes: Sequence[str], unreadable: Sequence[int]
) -> Tensor:
    """Report files that cannot be read and leave them out.

    Args:
        paths: The N files.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        unreadable: Indices of the files that cannot be read.

    Returns:
        Indices of the others, ascending.

    Raises:
        ValueError: No image of a class can be read.
    """
    readable = torch.ones(len(paths), dtype=torch.bool)
    readable[list(unreadable)] = False
    if len(unreadable):
        count = f"{len(unreadable):,} of {len(paths):,} images in {_common_folder(paths)}"
        names = _some([paths[index] for index in unreadable])
        print(f"skipped {count} that cannot be read: {names}", file=sys.stderr, flush=True)
    for label in range(len(classes)):
        if label not in labels[readable]:
            of_class = (labels == label).nonzero().squeeze(1).tolist()
            raise _no_image(_common_folder([paths[index] for index in of_class]))
    return readable.nonzero().squeeze(1)


def _find(root: Path, train: bool) -> ImageFolder:
    """List the classes and image files of one split.

    Raises:
        ValueError: The folder does not exist or contains no class folders.
    """
    folder = root / ("train" if train else "test")
    try:
        return ImageFolder(folder, allow_empty=True)
    except (FileNotFoundError, NotADirectoryError):
        place, what = (folder, "class folders") if folder.is_dir() else (root, f"{folder.name}/")
        raise ValueError(
            f"data.root: {place} has no {what} ({_content(place)}); data.name=folder needs "
            f"images in train/<class>/ and test/<class>/: point --data.root at the folder "
            f"that contains train/ and test/"
        ) from None


def _require_same_classes(root: Path, train: list[str], test: list[str]) -> None:
    if train != test:
        only = [
            f"only {half}/ has {_some(sorted(here))}"
            for half, here in (("train", set(train) - set(test)), ("test", set(test) - set(train)))
            if here
        ]
        raise ValueError(
            f"data.root: train/ and test/ in {root} must contain the same classes, but "
            f"{' and '.join(only)}; rename, add or delete folders until they agree"
        )


def _report_ignored(folder: Path) -> None:
    """Print how many files in the class folders are not read because of their suffix."""
    ignored = [
        path.suffix.lower() or path.name
        for path in sorted(folder.glob("*/**/*"))
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix.lower() not in IMG_EXTENSIONS
    ]
    if ignored:
        suffixes = _some(sorted(set(ignored)))
        print(
            f"ignored {len(ignored):,} files in {folder} that are not images of a supported type "
            f"({suffixes}); supported are {', '.join(IMG_EXTENSIONS)}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _no_image(folder: Path) -> ValueError:
    return ValueError(
        f"data.root: {folder} contains no readable image ({_content(folder)}); every class needs "
        f"at least one ({', '.join(IMG_EXTENSIONS)}) in both train/ and test/: add some, or delete "
        "the class from both"
    )


def _common_folder(paths: Sequence[str]) -> Path:
    return Path(os.path.commonpath([Path(path).parent for path in paths]))


def _content(folder: Path) -> str:
    """Describe what a folder contains."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    return f"it contains {_some(sorted(path.name for path in folder.iterdir())) or 'nothing'}"


def _some(names: Sequence[str]) -> str:
    """Join the first few names and count the rest."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more:,} more" if more > 0 else "")
