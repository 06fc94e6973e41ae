"""Image folders in torchvision's layout: one folder per class, with or without train/ and test/."""

import os
from pathlib import Path

from vit.data.config import DataConfig
from vit.data.images import ImageSet, UserFile, user_files
from vit.data.layout import find_parts, image_files, is_image, listing, note_unused, visible_folders


def list_folder(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of an image folder, sorted by path.

    `data.root` contains train/ and test/ (or val/), or the class folders themselves, which
    `data.test_fraction` splits. test/ is enough to list the test images. With both test/ and val/,
    the training images include those in val/, which are held out.

    Raises:
        ValueError: A folder is missing; or as for `user_files`.
    """
    root = Path(data.root)
    parts = find_parts(root)
    part = parts[0 if train else 1 % len(parts)]
    if not root.exists():
        raise ValueError(f"data.root: {root} does not exist; point --data.root at the images")
    if not visible_folders(part):
        raise ValueError(
            f"data.root: {part} has no class folders ({listing(part)}); data.name=folder needs "
            "images in train/<class>/ and test/<class>/, or in <class>/, to be split by "
            "data.test_fraction"
        )
    # Of all parts, so that a class that is missing in one of them has no images there.
    folders = [folder for part in parts for folder in visible_folders(part)]
    classes = sorted({folder.name for folder in folders})
    seen = {*map(os.path.realpath, [root, *parts, *folders])}  # links to these add no images
    files = list[UserFile]()
    for folder in (part, *(parts[2:] if train else ())):
        unused = list[str]()
        # By their own names, because some file systems find train/cat where there is train/Cat.
        for name in sorted(own.name for own in visible_folders(folder)):
            images, others = image_files(folder / name, seen)
            unused += others
            files += [UserFile(path, name, folder != part) for path in images]
        note_unused(folder, unused, "not images")
        beside = [str(path) for path in sorted(folder.iterdir()) if path.is_file()]
        note_unused(folder, [*filter(is_image, beside)], "not in a class folder")
    return user_files(data, train, len(parts) == 1, root, files, classes)
