"""Tar shards in WebDataset's layout: images and labels as members that share a name.

A tar file is not compressed, so each image can be read by itself once its place is known. The
places come from the headers, which are read when a shard is listed. Members belong together by
WebDataset's rule: they share a name up to the first dot.
"""

import functools
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from vit.console import printable, rank
from vit.data.config import DataConfig
from vit.data.images import ImageSet, user_files
from vit.data.layout import (
    CLASSES_FILE,
    IMAGE_SUFFIXES,
    SHARD_SUFFIX,
    TEST,
    TRAIN,
    VALIDATION,
    content,
    find_parts,
    is_image,
    is_visible,
    some,
    tar_files,
)
from vit.data.photos import TarMember
from vit.settings import shorten

LAYOUTS = (
    "data.name=shards needs train/*.tar and test/*.tar, or *.tar, to be split by "
    "data.test_fraction, none of them compressed: point --data.root at the folder that contains "
    "train/ and test/, or the shards"
)
LABELS = ("cls", "json")  # a .cls counts before a .json
BELONG = "members that share a name up to the first dot belong together"
# What follows the last member: zeros, to a multiple of some blocks of 512 bytes, usually 20. Images
# after them, in tar files that were joined by cat, would be overlooked.
END = 2**20


def list_shards(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of tar shards, in the order of the shards and the members.

    Args:
        data: `data.root` contains train/ and test/ with the shards, or the shards themselves, which
            `data.test_fraction` splits, and classes.txt, a class name per line; without it, the
            names are "0", "1", and so on. test/ is enough to list the test images; val/, valid/ or
            validation/ takes its place where it is missing.
        train: Whether to list the training images rather than the test images.

    Raises:
        ValueError: There are no shards or test images, a shard is not what it should be, a label is
            too large, a class has too few images, or test_fraction is given although there are test
            images.
    """
    root = Path(data.root).expanduser()
    parts = find_parts(root, f"*{SHARD_SUFFIX}")
    split = len(parts) == 1
    if split:
        _refuse_mixed(root)
    shards = _find(parts[0 if train else -1])
    members, labels = index_shards(shards)
    if (root / CLASSES_FILE).is_file():
        classes = _read_classes(root / CLASSES_FILE)
    else:
        found = [index_shards(_find(part)) for part in parts if part.is_dir()]
        classes = _count_classes({label for _, labels in found for label in labels})
    highest = max(labels)
    if highest >= len(classes):
        raise ValueError(
            f"data.root: {members[labels.index(highest)]} has the label {highest}, but "
            f"{root / CLASSES_FILE} names {len(classes)} classes, 0 to {len(classes) - 1}; add "
            "names, or correct the labels"
        )
    numbers = torch.tensor(labels)
    names = "".join(f"{shard.name}\0{shard.stat().st_size}\n" for shard in shards)
    listed = f"{names}{len(labels)}\n".encode() + numbers.numpy().tobytes()
    return user_files(data, train, split, root, members, numbers, classes, listed)


def _refuse_mixed(root: Path) -> None:
    """Refuse training and test shards in one folder, which would be mixed."""
    names = [path.name for path in tar_files(root)]
    training = [name for name in names if name.lower().startswith(TRAIN)]
    others = [name for name in names if name.lower().startswith((TEST, *VALIDATION))]
    if training and others:
        raise ValueError(
            f"data.root: {root} contains shards of training images and {others[0]}; move them to "
            f"{root / TRAIN} and {root / TEST}, so that they are not mixed"
        )


def _find(folder: Path) -> list[Path]:
    """Return the shards in a folder, sorted by name."""
    shards = tar_files(folder)
    if not shards:
        raise ValueError(f"data.root: {folder} contains no shards ({content(folder)}); {LAYOUTS}")
    return shards


def _read_classes(file: Path) -> tuple[str, ...]:
    """Read class names, one per line."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.root: {file} is not UTF-8 text ({error})") from None
    names = [line.strip() for line in text.rstrip().splitlines()] or [""]
    wrong = [name or "an empty line" for name, n in Counter(names).items() if n > 1 or not name]
    if wrong:
        raise ValueError(
            f"data.root: {file} must name each class in a line and once, but has {some(wrong)}"
        )
    return tuple(names)


def _count_classes(known: set[int]) -> tuple[str, ...]:
    """Return a name for each label, from 0 to the highest; each must occur."""
    if max(known) >= len(known):
        raise ValueError(
            f"data.root: the images have {len(known)} different labels, up to {max(known)}; number "
            f"the classes from 0 without gaps, or name them all in {CLASSES_FILE}"
        )
    return tuple(map(str, range(len(known))))


def index_shards(shards: Sequence[Path]) -> tuple[tuple[TarMember, ...], tuple[int, ...]]:
    """Find the images of shards, and read their labels.

    Returns:
        The N images, in the order of the shards and of their samples' first members, and their
        labels, 0 or more.

    Raises:
        ValueError: A shard cannot be read, or has an image without a label or the reverse.
    """
    hidden = True if rank() else None  # None shows the bar on terminals only
    with tqdm(shards, "indexing shards", unit="shard", leave=False, disable=hidden) as bar:
        found = [pair for shard in bar for pair in _index_shard(shard, *_stamp(shard))]
    return tuple(member for member, _ in found), tuple(label for _, label in found)


def _stamp(shard: Path) -> tuple[int, int]:
    stat = shard.stat()
    return stat.st_size, stat.st_mtime_ns


@functools.cache  # images are listed several times in a run
def _index_shard(shard: Path, size: int, changed: int) -> tuple[tuple[TarMember, int], ...]:
    """Read the headers and labels of a shard, again if its size or the time of change differs."""
    samples: dict[str, dict[str, TarMember]] = {}
    with shard.open("rb") as file:
        for info in _headers(shard, file):
            *folders, last = info.name.removeprefix("./").split("/")
            stem, _, extension = last.partition(".")
            kind = extension.lower()
            if not is_image(last) and kind not in LABELS:
                continue
            if info.isdir() or not all(map(is_visible, [*folders, last])):
                continue
            if not info.isreg() or info.issparse():
                raise _problem(
                    shard,
                    f"{info.name} is a link or sparse, so the shard has no bytes of it in one "
                    "place; make it with tar --dereference --hard-dereference",
                )
            member = TarMember(str(shard), printable(info.name), info.offset_data, info.size)
            sample = samples.setdefault("/".join([*folders, stem]), {})
            kind = "image" if f".{kind}" in IMAGE_SUFFIXES else kind
            if kind in sample:
                what = f"{sample[kind].name} and {member.name} are of one example, because {BELONG}"
                raise _problem(shard, f"{what}; keep one, or rename the other")
            sample[kind] = member
        if not samples:
            raise _problem(
                shard, f"no images in it ({', '.join(IMAGE_SUFFIXES)}); delete the shard"
            )
        return tuple(_labelled(shard, file, key, sample) for key, sample in samples.items())


def _labelled(
    shard: Path, file: BinaryIO, key: str, sample: dict[str, TarMember]
) -> tuple[TarMember, int]:
    """Return the image of a sample and its label."""
    label = sample.get("cls") or sample.get("json")
    if "image" not in sample:
        name = next(iter(sample.values())).name
        suffixes = ", ".join(IMAGE_SUFFIXES)
        what = f"has no image; expected is {key}.jpg or another of {suffixes}, because {BELONG}"
        raise _problem(shard, f"{name} {what}")
    if label is None:
        what = f'expected is {key}.cls that contains a whole number, or {key}.json with a "label"'
        raise _problem(shard, f"{sample['image'].name} has no label; {what}")
    file.seek(label.offset)
    text = file.read(label.size).decode(errors="replace").strip()
    if "cls" not in sample:
        try:
            text = str(json.loads(text)["label"])
        except (ValueError, RecursionError, TypeError, KeyError):
            raise _problem(shard, f'{label.name} is not a JSON object with a "label"') from None
    if re.fullmatch("[0-9]{1,9}", text) is None:
        what = f"is {shorten(text)!r}; it must be a whole number, 0 or more"
        raise _problem(shard, f"the label in {label.name} {what}")
    return sample["image"], int(text)


def _headers(shard: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file, and check that it is complete."""
    last = ""
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it grows with the shard
                last = printable(info.name)
                yield info
            file.seek(tar.offset)  # tarfile takes a damaged header for the end, and needs no end
            rest = file.read(END)
        if not rest or rest.strip(b"\0"):
            raise tarfile.ReadError("no end, a damaged header, or another tar file joined to it")
    except (tarfile.TarError, ValueError, OSError) as error:
        what = f"cut or damaged after {last}" if last else "not an uncompressed tar file"
        raise _problem(shard, f"{what} ({error}); copy or make it again") from None


def _problem(shard: Path, what: str) -> ValueError:
    return ValueError(f"data.root: {shard}: {printable(what)}")
