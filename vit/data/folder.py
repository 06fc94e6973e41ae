"""Image folders in torchvision's layout: one folder per class, with or without train/ and test/."""

from pathlib import Path

import torch
from torch import Tensor

from vit.data.config import DataConfig
from vit.data.images import ImageSet, user_files
from vit.data.layout import (
    IMAGE_SUFFIXES,
    TRAIN,
    content,
    find_test_folders,
    has_parts,
    is_image,
    report_ignored,
    report_unused,
    require_classes,
    some,
    visible_files,
    visible_folders,
)

LAYOUTS = (
    "data.name=folder needs images in train/<class>/ and test/<class>/, or in <class>/, to be "
    "split by data.test_fraction: point --data.root at the folder that contains train/ and test/, "
    "or the classes"
)


def list_folder(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of an image folder, sorted by path.

    Args:
        data: `data.root` contains train/ and test/, or the class folders themselves, which
            `data.test_fraction` splits. test/ is enough to list the test images; val/, valid/ or
            validation/ takes its place where it is missing.
        train: Whether to list the training images rather than the test images.

    Raises:
        ValueError: A folder, a class or its images are missing, or test_fraction is given although
            there are test images.
    """
    root = Path(data.root).expanduser()
    if not has_parts(root):
        classes, paths, labels = _find(root, least=2, report=train)
        return user_files(data, root, paths, labels, classes, train)
    test, *unused = find_test_folders(root, data.test_fraction, "<class>/")
    classes, paths, labels = _find(root / (TRAIN if train else test), least=1, report=train)
    if train:
        tested, _, _ = _find(root / test, least=1, report=True)
        if classes != tested:
            extra = {TRAIN: {*classes} - {*tested}, test: {*tested} - {*classes}}
            only = [
                f"only {part}/ has {some(sorted(names))}" for part, names in extra.items() if names
            ]
            raise ValueError(
                f"data.root: train/ and {test}/ in {root} must contain the same classes, but "
                f"{' and '.join(only)}; rename, add or delete folders until they agree"
            )
        for name in unused:
            report_unused(f"{root / name}")
    return user_files(data, root, paths, labels, classes)


def _find(folder: Path, least: int, report: bool) -> tuple[list[str], list[str], Tensor]:
    """List the classes and image files of a folder of class folders, without hidden ones.

    Args:
        folder: The folder.
        least: How many images each class must have.
        report: Whether to print how many files are not read because of their suffix.

    Returns:
        The class names, the N files and their labels (N,) int64.

    Raises:
        ValueError: The folder is missing, or has too few classes or images.
    """
    classes = sorted(path.name for path in visible_folders(folder))
    if not classes:
        raise ValueError(f"data.root: {folder} has no class folders ({content(folder)}); {LAYOUTS}")
    require_classes(folder, classes)
    paths, labels, others = list[str](), list[int](), list[str]()
    for label, name in enumerate(classes):
        files = visible_files(folder / name)
        images = [path for path in files if is_image(path)]
        if len(images) < least:
            raise ValueError(
                f"data.root: {folder / name} contains {len(images) or 'no'} readable image "
                f"({content(folder / name)}); every class needs at least one to train and one to "
                f"test ({', '.join(IMAGE_SUFFIXES)}): add some, or delete the class everywhere"
            )
        paths += images
        labels += [label] * len(images)
        others += [path for path in files if not is_image(path)]
    if report:
        report_ignored(folder, others)
    return classes, paths, torch.tensor(labels)
