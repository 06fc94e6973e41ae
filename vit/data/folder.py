"""Image folders: pictures sorted into train/<class>/ and test/<class>/, torchvision's layout."""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from vit.data.photos import as_image, read_photo
from vit.seeding import generator

LISTED = 10  # names in a message


def read_folder(
    root: Path, train: bool, on_bad_image: str
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Read the training or the test images of an image folder, squared and resized.

    Args:
        root: Folder that holds train/ and test/; for test images test/ is enough.
        train: Training images, or else test images.
        on_bad_image: What happens at a picture that cannot be read: "error", or "skip", which
            leaves it out and says so on standard error.

    Returns:
        Images (N, 3, 32, 32) uint8, labels (N,) int64 and the class names. Test images are in the
        order of their paths; training images are mixed, always alike, because what takes the first
        few of them wants all classes.

    Raises:
        ValueError: A folder, a class or its pictures are missing, or a picture cannot be read.
    """
    files = _find(root, train)
    if train:
        _require_same_classes(root, files.classes, _find(root, train=False).classes)
    images, labels, bad = [], [], []
    for path, label in files.samples:
        try:
            images.append(as_image(read_photo(Path(path), "data.root")))
            labels.append(label)
        except ValueError as error:
            if on_bad_image != "skip":
                what = "replace or delete it, or train with --data.on_bad_image skip"
                raise ValueError(f"{error}; {what}") from None
            bad.append(path)
    if bad:
        share = f"{len(bad):,} of {len(files):,} pictures in {files.root}"
        print(f"left out {share} that cannot be read: {_some(bad)}", file=sys.stderr, flush=True)
    _require_pictures(files, labels)
    order = torch.arange(len(labels))
    if train:
        order = torch.randperm(len(labels), generator=generator(0, "folder"))
    return torch.stack(images)[order], torch.tensor(labels)[order], tuple(files.classes)


def _find(root: Path, train: bool) -> ImageFolder:
    """List the classes and picture files of a half.

    Raises:
        ValueError: The folder is not there or holds no folders.
    """
    folder = root / ("train" if train else "test")
    try:
        return ImageFolder(folder, allow_empty=True)
    except (FileNotFoundError, NotADirectoryError):
        place, what = (folder, "class folders") if folder.is_dir() else (root, f"{folder.name}/")
        raise ValueError(
            f"data.root: {place} has no {what} ({_content(place)}); data.name=folder needs "
            f"train/<class>/ and test/<class>/ with pictures: point --data.root at the folder "
            f"that holds train/ and test/"
        ) from None


def _require_same_classes(root: Path, train: list[str], test: list[str]) -> None:
    if train != test:
        only = [
            f"only {half}/ has {_some(sorted(here))}"
            for half, here in (("train", set(train) - set(test)), ("test", set(test) - set(train)))
            if here
        ]
        raise ValueError(
            f"data.root: train/ and test/ in {root} must have the same classes, but "
            f"{' and '.join(only)}; rename, add or delete folders until they agree"
        )


def _require_pictures(files: ImageFolder, labels: list[int]) -> None:
    there = set(labels)
    for number, name in enumerate(files.classes):
        if number not in there:
            folder = Path(files.root) / name
            raise ValueError(
                f"data.root: {folder} has no picture that can be read ({_content(folder)}); every "
                f"class needs one or more ({', '.join(IMG_EXTENSIONS)}) in train/ and in test/: "
                f"add some, or delete the class from both"
            )


def _content(folder: Path) -> str:
    """Say what a folder holds."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    return f"it holds {_some(sorted(path.name for path in folder.iterdir())) or 'nothing'}"


def _some(names: Sequence[str]) -> str:
    """Join the first names, and say how many more there are."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more:,} more" if more > 0 else "")
