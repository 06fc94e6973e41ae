"""How a user's own images are laid out on disk; imported without torch, by the command line."""

import functools
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from vit.console import counted, note_once
from vit.data.config import DataConfig

# Files with these are images; others are opened to see whether they are.
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".jfif", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
    ".gif", ".tga", ".avif", ".heic", ".heif", ".jp2",
)  # fmt: skip
# Raw photos of cameras: Pillow would read only their small previews.
RAW_SUFFIXES = (".nef", ".dng", ".cr2", ".arw", ".orf", ".rw2", ".pef", ".srw", ".nrw")
SYSTEM_FILES = {
    "__MACOSX", "Thumbs.db", "desktop.ini", "@eaDir", "lost+found", "$RECYCLE.BIN",
    "System Volume Information",
}  # fmt: skip
SHARD_SUFFIX, CLASSES_FILE = ".tar", "classes.txt"
# Folders, and words in a table's column "split"; the first of TESTS that exists is for testing.
TRAIN, TESTS = "train", ("test", "eval", "evaluation", "val", "valid", "validation", "dev")
NAME = rf"({'|'.join((TRAIN, *TESTS))})(?:ing)?(?:[ _-]?(?:set|data|images))?"
PART = re.compile(rf"(?:\w+[_-])?{NAME}(?:[ _-]?\d+)?")
SHARD = re.compile(rf"(?:.*[_.-])?{NAME}(?:[_.-].*|\d.*)?")
LISTED = 10  # names in a message


def is_visible(name: str) -> bool:
    """Return whether a file or folder is the user's, not the system's, such as .DS_Store."""
    return not name.startswith(".") and name not in SYSTEM_FILES


def is_image(path: str) -> bool:
    """Return whether a file is visible, and an image by its suffix or its content."""
    name = path.rpartition(os.sep)[2]
    if not is_visible(name) or name.lower().endswith(RAW_SUFFIXES):
        return False
    return name.lower().endswith(IMAGE_SUFFIXES) or _can_be_opened(path)


@functools.cache  # folders are listed several times in a run
def _can_be_opened(path: str) -> bool:
    from PIL import Image  # imported late: listing most folders does not need it

    from vit.data.pixels import FORMATS

    formats = [name for name in FORMATS if name != "TGA"]  # TGA files have no signature
    if not Path(path).is_file():  # a pipe might never end
        return False
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=formats):
            return True
    except Exception as error:  # Pillow raises many types of errors
        return isinstance(error, Image.DecompressionBombError)


def note_unused(folder: Path, files: Sequence[str], why: str) -> None:
    """Note once which files in a folder are not used, and why."""
    if files:
        names = join([os.path.relpath(file, folder) for file in files])
        note_once(f"{folder}: {counted(len(files), 'file', ',')} ignored, {why}: {names}")


def part_of(name: str) -> str | None:
    """Return the word of TRAIN and TESTS that a name such as Training or seg_test means, if any."""
    match = PART.fullmatch(name.lower())
    return match and match[1]


def find_parts(root: Path) -> list[Path]:
    """Return the folders of training, test and held-out images, or the one that is to be split.

    A part contains class folders or shards; other folders are classes. train/ may be missing, but
    not the folder of test images. One for validation beside it has the held-out images.
    """
    folders, inner = visible_folders(root), root / "images"
    named = [(word, path) for path in folders if (word := part_of(path.name))]
    if not named:
        is_inner = any(part_of(path.name) for path in visible_folders(inner))
        return find_parts(inner) if is_inner else [root]
    parts = [(word, path) for word, path in named if visible_folders(path) or tar_files(path)]
    parts = [(w, path) for w, path in parts if path.name == w or (w, root / w) not in parts]
    words = [word for word, _ in parts or named]
    tests = [word for word in TESTS if word in words]
    classes = [path for path in folders if part_of(path.name) is None]
    has_classes = any(_has_image(path) for c in classes for path in (c, *visible_folders(c)))
    # Other class folders, or images directly in them, suggest that parts are classes, too.
    has_others = has_classes and not (tests and TRAIN in words)
    has_images = not parts and any(_has_image(path) for _, path in named)
    if has_others and has_images:
        return [root]
    if has_others or has_images or not tests or len(words) > len({*words}):
        names = join(sorted(path.name for _, path in parts or named))
        raise ValueError(
            f"data.root: {root} ({listing(root)}) can be read in two ways: {names} as parts or as "
            "classes; for parts, point --data.root at one of them, which data.test_fraction then "
            "splits, or complete train/<class>/ and test/<class>/ (or val/) and move other folders "
            f"away; for classes, rename {names}"
        )
    folder_of = {TRAIN: root / TRAIN} | dict(named) | dict(parts)
    chosen = [folder_of[word] for word in (TRAIN, *tests[:2])]
    if ignored := join(sorted(path.name for _, path in named if path not in chosen)):
        note_once(f"{root}: {ignored} ignored; test images are in {chosen[1].name}")
    while all([f.name for f in visible_folders(part)] == [part.name] for part in chosen):
        chosen = [part / part.name for part in chosen]  # as in some unpacked archives
    return chosen


def recognize(root: Path) -> str | None:
    """Return the value of data.name for a user's own images, or None for anything else."""
    if root.suffix.lower() in (".csv", ".tsv") and root.is_file():
        return "table"
    part = next(filter(Path.is_dir, find_parts(root)), root)
    # Any tar file may lie in a folder, but not in train/ or beside a list of classes.
    is_listed = part_of(part.name) or (root / CLASSES_FILE).is_file()
    folders = visible_folders(part)
    if tar_files(part) and is_listed and not any(map(_has_image, folders)):
        return "shards"
    # Downloaded data sets may lie beside a folder of images, but not beside class folders. Images
    # without classes are refused when the folder is listed.
    is_folder = sum(map(_has_image, folders)) > 1
    return "folder" if is_folder or _has_image(root) else None


def is_stored(data: DataConfig) -> bool:
    """Return whether a published data set, or its archive, is in data.root."""
    return bool(data.spec.files) and any(Path(data.root).glob(data.spec.files))


def check_stored(data: DataConfig, is_target: bool = True) -> None:
    """Check that a published data set is in data.root, or, if that is new or empty, may get there.

    Users who mistype the path of their own images should not train on CIFAR-10 instead.
    """
    root, files = Path(data.root), data.spec.files
    is_empty = not root.is_file() and not any(root.glob("*"))
    if not (data.spec.own_files or is_stored(data) or (files and is_target and is_empty)):
        if not root.exists():
            raise ValueError(f"data.root: {root} does not exist; check the path")
        raise ValueError(
            f"data.root: {root} does not contain {data.name} ({listing(root)}); check the path, or "
            "train with --data.name folder, table or shards for images of your own (docs/data.md "
            f"describes them), or with --data.name {data.name} to use it all the same"
        )


def _has_image(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with os.scandir(folder) as entries:  # does not list all of a large folder
        return any(is_image(entry.path) for entry in entries)


def visible_folders(folder: Path) -> list[Path]:
    """List the folders in a folder, without hidden ones; none if there is no such folder."""
    return [path for path in folder.glob("*") if is_visible(path.name) and path.is_dir()]


def tar_files(folder: Path) -> list[Path]:
    """List the tar files in a folder, sorted, without hidden ones; none if there is no folder."""
    return sorted(path for path in folder.glob(f"*{SHARD_SUFFIX}") if is_visible(path.name))


def image_files(folder: Path, seen: set[str] | None = None) -> tuple[list[str], list[str]]:
    """List the image files in a folder and the folders below it, and the other visible files.

    Like torchvision's, the lists are sorted by folder, then by name. Wherever links lead, a folder
    is listed once. Folders whose real paths are in `seen` are not listed; the others are added.
    """
    lists, queue = [], [str(folder)]
    seen = set() if seen is None else seen
    seen.discard(os.path.realpath(folder))
    for path in queue:  # which grows in the loop
        if (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            _, folders, files = next(os.walk(path, onerror=_fail))
            lists.append((path, sorted(filter(is_visible, files))))
            queue += [f"{path}{os.sep}{name}" for name in sorted(filter(is_visible, folders))]
    paths = [f"{path}{os.sep}{name}" for path, names in sorted(lists) for name in names]
    images = [path for path in paths if is_image(path)]
    return images, sorted({*paths} - {*images})


def _fail(error: OSError) -> None:
    """Stop at a folder that cannot be listed."""
    raise error


def listing(path: Path) -> str:
    """Describe what a folder contains, or why it is not one."""
    if not path.is_dir():
        return "it is a file" if path.exists() else "it does not exist"
    return f"it contains {join(sorted(child.name for child in path.iterdir())) or 'nothing'}"


def join(names: Sequence[str]) -> str:
    """Join the first few names and count the rest."""
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more:,} more" if more > 0 else "")
