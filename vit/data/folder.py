"""Image folders in torchvision's layout: one folder per class, with or without train/ and test/."""

import os
from pathlib import Path

import torch

from vit.data.config import DataConfig
from vit.data.images import ImageSet, user_files
from vit.data.layout import content, find_parts, image_files, is_image, note_unused, visible_folders


def list_folder(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of an image folder, sorted by path.

    `data.root` contains train/ and test/ (or val/), or the class folders themselves, which
    `data.test_fraction` splits. test/ is enough to list the test images.

    Raises:
        ValueError: A folder is missing; or as for `user_files`.
    """
    root = Path(data.root)
    parts = find_parts(root)
    part = parts[0 if train else -1]
    if not visible_folders(part):
        raise ValueError(
            f"data.root: {part} has no class folders ({content(part)}); data.name=folder needs "
            "images in train/<class>/ and test/<class>/, or in <class>/, to be split by "
            "data.test_fraction"
        )
    # Of both parts, so that a class that is missing in one of them has no images there.
    folders = [folder for part in parts for folder in visible_folders(part)]
    classes = sorted({folder.name for folder in folders})
    seen = {*map(os.path.realpath, [root, *parts, *folders])}  # links there add nothing
    images, others = zip(*(image_files(part / name, seen) for name in classes), strict=True)
    note_unused(part, [file for files in others for file in files], "not images")
    beside = [str(path) for path in sorted(part.iterdir()) if path.is_file()]
    note_unused(part, [*filter(is_image, beside)], "not in a class folder")
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor([*map(len, images)]))
    paths = [path for files in images for path in files]
    return user_files(data, train, len(parts) == 1, root, paths, labels, classes)
