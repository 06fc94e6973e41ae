"""Image folders in torchvision's layout: one folder per class, with or without train/ and test/."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vit.console import note
from vit.data.config import DataConfig
from vit.data.layout import (
    IMAGE_SUFFIXES,
    TRAIN,
    content,
    find_test_folders,
    has_parts,
    is_image,
    is_visible,
    report_ignored,
    report_unused,
    some,
)
from vit.data.source import (
    Source,
    TarMember,
    files_of_part,
    list_files,
    require_classes,
    split_files,
)

LAYOUTS = (
    "data.name=folder needs images in train/<class>/ and test/<class>/, or in <class>/, to be "
    "split by data.test_fraction: point --data.root at the folder that contains train/ and test/, "
    "or the classes"
)


def list_folder(data: DataConfig, train: bool) -> Source:
    """List the training or test images of an image folder.

    Args:
        data: `data.root` contains train/ and test/, or the class folders themselves, which
            `data.test_fraction` splits. test/ is enough to list the test images; val/, valid/ or
            validation/ takes its place where it is missing.
        train: Whether to list the training images rather than the test images.

    Returns:
        The files, sorted by path.

    Raises:
        ValueError: A folder, a class or its images are missing, or test_fraction is given although
            there are test images.
    """
    root = Path(data.root).expanduser()
    if has_parts(root):
        return _list_part(root, train, data.test_fraction)
    classes, paths, labels = _find(root)
    if train:
        _report_ignored(root)
    for name, count in zip(classes, _counts(labels, classes), strict=True):
        if count < 2:
            raise ValueError(
                f"data.root: {root / name} contains {count or 'no'} readable image "
                f"({content(root / name)}); every class needs at least two "
                f"({', '.join(IMAGE_SUFFIXES)}), one of them to test: add some, or delete the class"
            )
    listed = list_files(root, paths, labels)
    return split_files(paths, labels, classes, listed, train, data.test_fraction)


def _list_part(root: Path, train: bool, test_fraction: float | None) -> Source:
    """List the images of train/, or of test/ or what takes its place; see `list_folder`."""
    test, *others = find_test_folders(root, test_fraction, "<class>/")
    if train and not (root / TRAIN).is_dir():
        raise ValueError(f"data.root: {root} has no train/ ({content(root)}); {LAYOUTS}")
    classes, paths, labels = _find(root / (TRAIN if train else test))
    if train:
        _require_same_classes(root, test, classes, _find(root / test)[0])
        for part in (TRAIN, test):
            _report_ignored(root / part)
        for name in others:
            report_unused(f"{root / name}")
    for name, count in zip(classes, _counts(labels, classes), strict=True):
        if count == 0:
            raise _no_image(root / (TRAIN if train else test) / name, name)
    return files_of_part(paths, labels, classes, list_files(root, paths, labels))


def _counts(labels: Tensor, classes: Sequence[str]) -> list[int]:
    return torch.bincount(labels, minlength=len(classes)).tolist()


def drop_unreadable(
    paths: Sequence[str | TarMember],
    labels: Tensor,
    classes: Sequence[str],
    unreadable: Sequence[int],
    report: bool = True,
) -> Tensor:
    """Leave out files that cannot be read.

    Args:
        paths: The N files, or members of tar files.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        unreadable: Indices of the files that cannot be read.
        report: Whether to print which they are.

    Returns:
        Indices of the others, ascending.

    Raises:
        ValueError: No image of a class can be read.
    """
    readable = torch.ones(len(paths), dtype=torch.bool)
    readable[list(unreadable)] = False
    if len(unreadable) and report:
        count = f"{len(unreadable):,} of {len(paths):,} images in {_common_folder(paths)}"
        names = some([str(paths[index]) for index in unreadable])
        note(f"skipped {count} that cannot be read: {names}")
    counts = labels[readable].bincount(minlength=len(classes)).tolist()
    for label, name in enumerate(classes):
        if counts[label] == 0:
            of_class = (labels == label).nonzero().squeeze(1).tolist()
            raise _no_image(_common_folder([paths[index] for index in of_class]), name)
    return readable.nonzero().squeeze(1)


def _find(folder: Path) -> tuple[list[str], list[Path], Tensor]:
    """List the classes and image files of a folder of class folders, without hidden ones.

    Returns:
        The class names, the N files and their labels (N,) int64.

    Raises:
        ValueError: The folder does not exist or does not contain two class folders.
    """
    from torchvision.datasets.folder import find_classes, make_dataset  # late because it is slow

    def is_visible_image(path: str) -> bool:
        *folders, name = Path(path).relative_to(folder).parts
        return is_image(name) and all(map(is_visible, folders))

    try:
        classes = [name for name in find_classes(folder)[0] if is_visible(name)]
    except (FileNotFoundError, NotADirectoryError):
        classes = []
    if not classes:
        raise ValueError(f"data.root: {folder} has no class folders ({content(folder)}); {LAYOUTS}")
    require_classes(folder, classes)
    numbers = {name: label for label, name in enumerate(classes)}
    samples = make_dataset(folder, numbers, is_valid_file=is_visible_image, allow_empty=True)
    labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
    return classes, [Path(path) for path, _ in samples], labels


def _require_same_classes(root: Path, test: str, train: list[str], others: list[str]) -> None:
    if train != others:
        only = [
            f"only {part}/ has {some(sorted(here))}"
            for part, here in (
                (TRAIN, set(train) - set(others)),
                (test, set(others) - set(train)),
            )
            if here
        ]
        raise ValueError(
            f"data.root: train/ and {test}/ in {root} must contain the same classes, but "
            f"{' and '.join(only)}; rename, add or delete folders until they agree"
        )


def _report_ignored(folder: Path) -> None:
    """Print how many files in the class folders are not read because of their suffix."""
    files = (path for path in sorted(folder.glob("*/**/*")) if path.is_file())
    report_ignored(
        folder, [path for path in files if all(map(is_visible, path.relative_to(folder).parts))]
    )


def _no_image(folder: Path, name: str) -> ValueError:
    of_class = "" if folder.name == name else f" of class {name}"
    return ValueError(
        f"data.root: {folder} contains no readable image{of_class} ({content(folder)}); every "
        f"class needs at least one ({', '.join(IMAGE_SUFFIXES)}) to train and one to test: add "
        "some, or delete the class from both parts"
    )


def _common_folder(paths: Sequence[str | TarMember]) -> Path:
    """Return the folder that contains all files, or the tar files that they are in."""
    files = (path.shard if isinstance(path, TarMember) else path for path in paths)
    return Path(os.path.commonpath([Path(file).parent for file in files]))
