"""Image folders in torchvision's layout: one folder per class, with or without train/ and test/."""

from pathlib import Path

import torch
from torch import Tensor

from vit.data.config import DataConfig
from vit.data.images import ImageSet, user_files
from vit.data.layout import (
    content,
    find_parts,
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
    parts = find_parts(root, "<class>/")
    found = [_find(part, report=train) for part in (parts if train else parts[-1:])]
    classes, paths, labels = found[0]
    tested, _, _ = found[-1]
    if classes != tested:
        extra = zip(parts, ({*classes} - {*tested}, {*tested} - {*classes}), strict=True)
        only = [f"only {part.name}/ has {some(sorted(names))}" for part, names in extra if names]
        raise ValueError(
            f"data.root: train/ and {parts[1].name}/ in {root} must contain the same classes, but "
            f"{' and '.join(only)}; rename, add or delete folders until they agree"
        )
    return user_files(data, train, len(parts) == 1, root, paths, labels, classes)


def _find(folder: Path, report: bool) -> tuple[list[str], list[str], Tensor]:
    """Return the class names, image files and labels of a folder; report which are not read."""
    classes = sorted(path.name for path in visible_folders(folder))
    if not classes:
        if not folder.exists():
            raise ValueError(f"data.root: {folder} does not exist; {LAYOUTS}")
        refuse_loose_images(folder)
        raise ValueError(f"data.root: {folder} has no class folders ({content(folder)}); {LAYOUTS}")
    files = [
        (path, label) for label, name in enumerate(classes) for path in visible_files(folder / name)
    ]
    if report:
        report_ignored(folder, (path for path, _ in files))
    images = [(path, label) for path, label in files if is_image(path)]
    labels = torch.tensor([label for _, label in images], dtype=torch.int64)
    return classes, [path for path, _ in images], labels
