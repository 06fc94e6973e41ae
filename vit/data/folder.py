"""Image folders in torchvision's layout: one folder per class, with or without train/ and test/."""

from pathlib import Path

import torch
from torch import Tensor

from vit.data.config import DataConfig
from vit.data.images import ImageSet, user_files
from vit.data.layout import (
    TRAIN,
    content,
    find_test_folder,
    has_parts,
    is_image,
    refuse_loose_images,
    report_ignored,
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
        classes, paths, labels = _find(root, report=train)
        return user_files(data, train, True, root, paths, labels, classes)
    test = find_test_folder(root, data.test_fraction, "<class>/")
    classes, paths, labels = _find(root / (TRAIN if train else test), report=train)
    if train:
        tested, _, _ = _find(root / test, report=True)
        if classes != tested:
            extra = {TRAIN: {*classes} - {*tested}, test: {*tested} - {*classes}}
            only = [
                f"only {name}/ has {some(sorted(extra[name]))}" for name in extra if extra[name]
            ]
            raise ValueError(
                f"data.root: train/ and {test}/ in {root} must contain the same classes, but "
                f"{' and '.join(only)}; rename, add or delete folders until they agree"
            )
    return user_files(data, train, False, root, paths, labels, classes)


def _find(folder: Path, report: bool) -> tuple[list[str], list[str], Tensor]:
    """Return the class names, image files and labels of a folder; report which are not read."""
    classes = sorted(path.name for path in visible_folders(folder))
    if not classes:
        if not folder.exists():
            raise ValueError(f"data.root: {folder} does not exist; {LAYOUTS}")
        refuse_loose_images(folder)
        raise ValueError(f"data.root: {folder} has no class folders ({content(folder)}); {LAYOUTS}")
    paths, labels, others = list[str](), list[int](), list[str]()
    for label, name in enumerate(classes):
        files = visible_files(folder / name)
        images = [path for path in files if is_image(path)]
        paths += images
        labels += [label] * len(images)
        others += [path for path in files if not is_image(path)]
    if report:
        report_ignored(folder, others)
    return classes, paths, torch.tensor(labels, dtype=torch.int64)
