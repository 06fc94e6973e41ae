"""Tar shards in WebDataset's layout: images and labels as members that share a name.

A tar file is not compressed, so each image can be read by itself from the place that its header
gives. The headers are read when a shard is listed.
"""

import functools
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from tqdm import tqdm

from vit.console import note_once, printable, rank, shorten
from vit.data import layout
from vit.data.config import DataConfig
from vit.data.images import ImageSet, UserFile, user_files
from vit.data.photos import TarMember
from vit.files import require_file

BELONG = "name.jpg and name.cls belong together: members that share a name up to the first dot"
# Largest end of a tar file, after its last member: zeros, usually up to a multiple of 20 blocks of
# 512 bytes. Images after it, in tar files that were joined by cat, would be overlooked.
END = 2**20
PAX = re.compile("^[0-9]+ (path|size)=(.*)", re.MULTILINE)  # what a header says of the next member


def list_shards(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of tar shards, in the order of the shards and the members.

    `data.root` contains train/ and test/ (or val/) with the shards, or the shards themselves, which
    `data.test_fraction` splits; test/ is enough to list the test images. classes.txt, a class name
    per line, is in it, or beside a part; without it, the labels are the names.

    Raises:
        ValueError: There are no shards or test images, a shard is not what it should be, or a label
            is too large; or as for `user_files`.
    """
    root = Path(data.root)
    parts = layout.find_parts(root)
    part = parts[0 if train else 1 % len(parts)]
    if parts[2:]:
        note_once(f"{root}: {parts[2].name} ignored; test images are in {parts[1].name}")
    shards = layout.tar_files(part)
    if not shards:
        raise ValueError(
            f"data.root: {part} contains no shards ({layout.listing(part)}); data.name=shards "
            "needs train/*.tar and test/*.tar, or *.tar, to be split by data.test_fraction"
        )
    words = [layout.SHARD.fullmatch(shard.stem.lower()) for shard in shards]
    if part == root and len({word and word[1] for word in words}) > 1:
        raise ValueError(
            f"data.root: {part} contains shards of training images and others; move them to "
            f"{part / layout.TRAIN} and {part / 'test'}, so that they are not mixed"
        )
    images = _index(shards)
    folders = (root, root.parent) if layout.part_of(root.name) else (root,)
    if file := next(filter(Path.is_file, (path / layout.CLASSES_FILE for path in folders)), None):
        names = dict(enumerate(_read_classes(file)))
    else:
        listed = {label for part in parts for _, label in _index(layout.tar_files(part))}
        names = {label: str(label) for label in sorted(listed)}
    for image, label in images:
        if label not in names:
            raise ValueError(
                f"data.root: {image} has the label {label}, but {file} names "
                f"{len(names)} classes, 0 to {len(names) - 1}; add names, or correct the labels"
            )
    labels = torch.tensor([label for _, label in images])
    sizes = "".join(f"{shard.name}\0{shard.stat().st_size}\n" for shard in shards)
    identity = f"{sizes}{len(images)}\n".encode() + labels.numpy().tobytes()
    files = [UserFile(image, names[label]) for image, label in images]
    return user_files(data, train, len(parts) == 1, root, files, [*names.values()], identity)


def _read_classes(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    names = [line.strip() for line in text.rstrip().splitlines()]
    if "" in names or len({*names}) < len(names):
        raise ValueError(f"data.root: {file} must name each class once, one per line")
    return names


def _index(shards: Sequence[Path]) -> list[tuple[TarMember, int]]:
    """Find the images of shards, in the order of the shards and the members, and their labels."""
    hidden = True if rank() else None  # None shows the bar on terminals only
    with tqdm(shards, "indexing shards", unit="shard", leave=False, disable=hidden) as bar:
        stats = ((shard, shard.stat()) for shard in bar)
        indices = (_index_shard(shard, at.st_size, at.st_mtime_ns) for shard, at in stats)
        return [image for index in indices for image in index]


@functools.cache  # images are listed several times in a run
def _index_shard(shard: Path, size: int, changed: int) -> list[tuple[TarMember, int]]:
    """Read the headers and labels of a shard, again if its size or modification time differs."""
    images: dict[str, TarMember] = {}
    labels: dict[str, str] = {}
    with require_file(shard).open("rb") as file:
        for info in _headers(shard, file):
            *folders, name = info.name.removeprefix("./").split("/")
            stem, _, suffix = name.partition(".")
            key, kind = "/".join([*folders, stem]), suffix.lower()
            if not info.isreg() or not all(map(layout.is_visible, [*folders, name])):
                continue
            if f".{kind}" in layout.IMAGE_SUFFIXES:
                if key in images:
                    raise _problem(shard, f"{key} has two images; {BELONG}")
                name = printable(info.name)
                images[key] = TarMember(str(shard), name, info.offset_data, info.size)
            elif kind == "cls":
                file.seek(info.offset_data)
                labels[key] = file.read(min(info.size, 999)).decode(errors="replace").strip()
    if not images:
        suffixes = ", ".join(layout.IMAGE_SUFFIXES)
        raise _problem(shard, f"no images in it ({suffixes}, after the first dot); delete it")
    for key in sorted(images.keys() ^ labels.keys()):
        raise _problem(shard, f"{key} has no {'label' if key in images else 'image'}; {BELONG}")
    for key, label in labels.items():
        if re.fullmatch("[0-9]{1,9}", label) is None:
            problem = f"is {shorten(label)!r}; it must be a whole number, 0 or more"
            raise _problem(shard, f"the label in {key}.cls {problem}")
    return [(image, int(labels[key])) for key, image in images.items()]


def _headers(shard: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a complete tar file; a TarFile would loop at some damaged headers."""
    last, fields = "", dict[str, str]()
    try:
        while (block := file.read(tarfile.BLOCKSIZE)).strip(b"\0"):
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            start = info.offset_data = file.tell()
            extends = info.type in b"gxXKL"  # it describes the next member
            size = info.size if extends else int(fields.pop("size", info.size))
            if size < 0 or (extends and size > END):  # no name is that long
                raise tarfile.ReadError(f"a size of {size} bytes")
            if extends:
                text = file.read(size).decode("utf-8", "surrogateescape")
                fields |= PAX.findall(text) if info.type in b"gxX" else {"path": text.rstrip("\0")}
            else:
                last = info.name = fields.pop("path", info.name)
                info.size = size
                yield info
            file.seek(start - -size // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE)
        rest = block + file.read(END)
        if not rest or rest.strip(b"\0"):
            raise tarfile.ReadError("no end, or another tar file joined to it")
    except (tarfile.TarError, ValueError, OSError, OverflowError) as error:
        problem = f"cut or damaged after {last}" if last else "not an uncompressed tar file"
        raise _problem(shard, f"{problem} ({error}); copy or make it again") from None


def _problem(shard: Path, text: str) -> ValueError:
    return ValueError(f"data.root: {shard}: {printable(shorten(text, 900))}")
