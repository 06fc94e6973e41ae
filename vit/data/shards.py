"""Tar shards in WebDataset's layout: images and labels as members that share a name."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from vit.data.config import DataConfig
from vit.data.layout import (
    CLASSES_FILE,
    SHARD_SUFFIX,
    TEST,
    TRAIN,
    VALIDATION,
    content,
    find_test_folders,
    has_parts,
    is_shard,
    report_unused,
    some,
)
from vit.data.shard_index import index_shards
from vit.data.source import Source, TarMember, files_of_part, require_classes, split_files

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
LAYOUTS = (
    "data.name=shards needs train/*.tar and test/*.tar, or *.tar, to be split by "
    "data.test_fraction: point --data.root at the folder that contains train/ and test/, or the "
    "shards"
)


def list_shards(data: DataConfig, train: bool) -> Source:
    """List the training or test images of tar shards, see `vit.data.shard_index`.

    Args:
        data: `data.root` contains train/ and test/ with the shards, or the shards themselves, which
            `data.test_fraction` splits, and classes.txt, a class name per line; without it, the
            names are "0", "1", and so on. test/ is enough to list the test images; val/, valid/ or
            validation/ takes its place where it is missing.
        train: Whether to list the training images rather than the test images.

    Returns:
        The images, in the order of the shards' names and of the members.

    Raises:
        ValueError: There are no shards or test images, a shard is not what it should be, a label is
            too large, a class has too few images, or test_fraction is given although there are test
            images.
    """
    root = Path(data.root).expanduser()
    if has_parts(root):
        test, *others = find_test_folders(root, data.test_fraction, f"*{SHARD_SUFFIX}")
        for name in others if train else ():
            report_unused(f"{root / name}")
        folder = root / (TRAIN if train else test)
        parts = [root / name for name in (TRAIN, test) if (root / name).is_dir()]
        members, labels, classes = _list(root, folder, parts, least=1)
        return files_of_part(members, labels, classes, _listed(folder, labels))
    _refuse_mixed(root)
    members, labels, classes = _list(root, root, [root], least=2)
    listed = _listed(root, labels)
    return split_files(members, labels, classes, listed, train, data.test_fraction)


def _refuse_mixed(root: Path) -> None:
    """Refuse training and test shards in one folder, which would be mixed.

    Raises:
        ValueError: There are both.
    """
    names = sorted(path.name for path in root.glob(f"*{SHARD_SUFFIX}"))
    training = [name for name in names if name.lower().startswith(TRAIN)]
    others = [name for name in names if name.lower().startswith((TEST, *VALIDATION))]
    if training and others:
        raise ValueError(
            f"data.root: {root} contains shards of training images and {others[0]}; move them to "
            f"{root / TRAIN} and {root / TEST}, so that they are not mixed"
        )


def _list(
    root: Path, folder: Path, parts: Sequence[Path], least: int
) -> tuple[tuple[TarMember, ...], Tensor, tuple[str, ...]]:
    """Return the images of a folder, their labels (N,) int64, and the classes of all parts."""
    members, labels = index_shards(_find(folder))
    if (root / CLASSES_FILE).is_file():
        classes = _read_classes(root / CLASSES_FILE)
    else:
        classes = _count_classes([index_shards(_find(part)) for part in parts])
    require_classes(root, classes)
    highest = max(labels)
    if highest >= len(classes):
        raise ValueError(
            f"data.root: {members[labels.index(highest)]} has the label {highest}, but "
            f"{root / CLASSES_FILE} names {len(classes)} classes, 0 to {len(classes) - 1}; add "
            "names, or correct the labels"
        )
    counts = Counter(labels)
    for label, name in enumerate(classes):
        if counts[label] < least:
            raise ValueError(
                f"data.root: class {name} (label {label}) has {counts[label]} images in {folder}, "
                f"and needs at least {least}; add some, or leave out the class and its label"
            )
    return members, torch.tensor(labels), classes


def _find(folder: Path) -> list[Path]:
    """Return the shards in a folder, sorted by name."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    compressed = [name for name in names if name.lower().endswith(COMPRESSED)]
    if compressed:
        raise ValueError(
            f"data.root: {folder} contains compressed shards ({some(compressed)}), in which no "
            "image can be read by itself; decompress them: images are compressed already"
        )
    shards = [folder / name for name in names if is_shard(name)]
    if not shards:
        raise ValueError(f"data.root: {folder} contains no shards ({content(folder)}); {LAYOUTS}")
    return shards


def _read_classes(file: Path) -> tuple[str, ...]:
    """Read class names, one per line."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.root: {file} is not UTF-8 text ({error})") from None
    names = [line.strip() for line in text.rstrip().splitlines()]
    first: dict[str, int] = {}
    for line, name in enumerate(names, 1):
        if not name:
            raise ValueError(f"data.root: {file}, line {line}: the name of a class is missing")
        if first.setdefault(name, line) != line:
            raise ValueError(
                f"data.root: {file}, line {line}: {name} is already in line {first[name]}"
            )
    if not names:
        raise ValueError(f"data.root: {file} is empty; it needs a class name per line")
    return tuple(names)


def _count_classes(parts: Sequence[tuple[Sequence[TarMember], Sequence[int]]]) -> tuple[str, ...]:
    """Return a name for each label, from 0 to the highest; each must occur."""
    members = [member for members, _ in parts for member in members]
    labels = [label for _, labels in parts for label in labels]
    known, highest = set(labels), max(labels)
    if len(known) <= highest:
        gap = next(label for label in range(highest) if label not in known)
        raise ValueError(
            f"data.root: no image has the label {gap}, but {members[labels.index(highest)]} has "
            f"the label {highest}; number the classes from 0 without gaps, or name them all in "
            f"{CLASSES_FILE}"
        )
    return tuple(map(str, range(highest + 1)))


def _listed(folder: Path, labels: Tensor) -> bytes:
    """List the shards' names and sizes and the labels for a fingerprint."""
    shards = "".join(f"{shard.name}\0{shard.stat().st_size}\n" for shard in _find(folder))
    return f"{shards}{len(labels)}\n".encode() + labels.numpy().tobytes()
