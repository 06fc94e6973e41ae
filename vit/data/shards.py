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
    find_test_folder,
    has_parts,
    is_image,
    is_shard,
    is_visible,
    some,
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
    divided = has_parts(root)
    if divided:
        test = find_test_folder(root, data.test_fraction, f"*{SHARD_SUFFIX}")
        folder = root / (TRAIN if train else test)
        parts = [root / name for name in (TRAIN, test) if (root / name).is_dir()]
    else:
        _refuse_mixed(root)
        folder, parts = root, [root]
    shards = _find(folder)
    members, labels = index_shards(shards)
    if (root / CLASSES_FILE).is_file():
        classes = _read_classes(root / CLASSES_FILE)
    else:
        classes = _count_classes([index_shards(_find(part)) for part in parts])
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
    return user_files(data, train, not divided, root, members, numbers, classes, listed)


def _refuse_mixed(root: Path) -> None:
    """Refuse training and test shards in one folder, which would be mixed."""
    names = sorted(path.name for path in root.glob(f"*{SHARD_SUFFIX}"))
    training = [name for name in names if name.lower().startswith(TRAIN)]
    others = [name for name in names if name.lower().startswith((TEST, *VALIDATION))]
    if training and others:
        raise ValueError(
            f"data.root: {root} contains shards of training images and {others[0]}; move them to "
            f"{root / TRAIN} and {root / TEST}, so that they are not mixed"
        )


def _find(folder: Path) -> list[Path]:
    """Return the shards in a folder, sorted by name."""
    shards = sorted(path for path in folder.glob("*") if is_shard(path.name))
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


def _count_classes(parts: Sequence[tuple[Sequence[TarMember], Sequence[int]]]) -> tuple[str, ...]:
    """Return a name for each label, from 0 to the highest; each must occur."""
    known = {label for _, labels in parts for label in labels}
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
    found = [(shard, shard.stat()) for shard in shards]
    return _index_shards(tuple((shard, stat.st_size, stat.st_mtime_ns) for shard, stat in found))


@functools.lru_cache(maxsize=2)  # training and test images, which are listed several times in a run
def _index_shards(
    stamps: tuple[tuple[Path, int, int], ...],
) -> tuple[tuple[TarMember, ...], tuple[int, ...]]:
    hidden = True if rank() else None  # None shows the bar on terminals only
    with tqdm(stamps, "indexing shards", unit="shard", leave=False, disable=hidden) as bar:
        found = [pair for shard, _, _ in bar for pair in _index_shard(shard)]
    return tuple(member for member, _ in found), tuple(label for _, label in found)


def _index_shard(shard: Path) -> list[tuple[TarMember, int]]:
    """Read the headers and labels of a shard."""
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
        return [_labelled(shard, file, key, sample) for key, sample in samples.items()]


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
    last, end = "", 0
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (info := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it grows with the shard
                last, end = printable(info.name), tar.offset
                yield info
        # tarfile takes a damaged header for the end, and needs no end.
        file.seek(end)
        rest = file.read(END)
        if not rest:
            raise tarfile.ReadError("the end of the archive is missing")
        if rest.strip(b"\0"):
            raise tarfile.ReadError("a damaged header, or another tar file joined to it")
    except (tarfile.TarError, ValueError, OSError) as error:
        what = (
            f"cut or damaged after {last}, byte {end:,}" if last else "not an uncompressed tar file"
        )
        raise _problem(shard, f"{what} ({error}); copy or make it again") from None


def _problem(shard: Path, what: str) -> ValueError:
    return ValueError(f"data.root: {shard}: {printable(what)}")
