"""Where the images in tar shards are, and their labels.

A tar file is not compressed, so each image can be read by itself once its place is known. The
places come from the headers, which are read once and stored beside the shards, as NVIDIA DALI's
wds2idx does. Members belong together by WebDataset's rule: they share a name up to the first dot.
"""

import functools
import json
import re
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from tqdm import tqdm

from vit.console import printable, rank
from vit.data.layout import IMAGE_SUFFIXES, is_image, is_visible
from vit.data.source import TarMember
from vit.files import write_atomically
from vit.settings import shorten

INDEX_FILE = "vit_index.json"
LABELS = ("cls", "json")
# What follows the last member: zeros, to a multiple of some blocks of 512 bytes, usually 20. Images
# after them, in tar files that were joined by cat, would be overlooked.
END = 2**20

Number = Annotated[int, Field(ge=0)]
Row = tuple[str, Number, Number, Number]  # of an image: name, offset, size and label


@dataclass(frozen=True)
class _Shard:
    """The images of a shard that had this size and time of modification when it was indexed."""

    size: int
    mtime_ns: int
    images: list[Row]


@dataclass(frozen=True)
class _Index:
    """What the index file of a folder contains: its shards by name."""

    version: Literal[1]
    shards: dict[str, _Shard]


_INDEX = TypeAdapter(_Index)


class _Part(NamedTuple):
    """A member: its name, what follows the first dot in lower case, offset and size."""

    name: str
    extension: str
    offset: int
    size: int


def index_shards(shards: Sequence[Path]) -> tuple[tuple[TarMember, ...], tuple[int, ...]]:
    """Find the images of shards, and read their labels.

    Shards that have not changed since the index beside them was written are not read again.

    Args:
        shards: Tar files in one folder.

    Returns:
        The N images, in the order of the shards and of their samples' first members, and their
        labels, 0 or more.

    Raises:
        ValueError: A shard cannot be read, or has an image without a label or the reverse.
    """
    found = [(shard, shard.stat()) for shard in shards]
    stamps = tuple((shard.name, stat.st_size, stat.st_mtime_ns) for shard, stat in found)
    return _index_shards(shards[0].parent, stamps)


@functools.lru_cache(maxsize=2)  # training and test images, which are listed several times in a run
def _index_shards(
    folder: Path, stamps: tuple[tuple[str, int, int], ...]
) -> tuple[tuple[TarMember, ...], tuple[int, ...]]:
    stored, shards = _read_index(folder), dict[str, _Shard]()
    hidden = True if rank() else None  # None shows the bar on terminals only
    with tqdm(stamps, "indexing shards", unit="shard", leave=False, disable=hidden) as bar:
        for name, size, mtime_ns in bar:
            shard = stored.get(name)
            if shard is None or (shard.size, shard.mtime_ns) != (size, mtime_ns):
                shard = _Shard(size, mtime_ns, _index_shard(folder / name))
            shards[name] = shard
    new = sum(shard is not stored.get(name) for name, shard in shards.items())
    if new and rank() == 0:
        _write_index(folder, shards, new)
    members, labels = [], []
    for name, shard in shards.items():
        path = str(folder / name)
        for image, offset, size, label in shard.images:
            members.append(TarMember(path, image, offset, size))
            labels.append(label)
    return tuple(members), tuple(labels)


def _read_index(folder: Path) -> dict[str, _Shard]:
    """Return the shards of the index file; none if it is missing or damaged: it is made again."""
    try:
        return _INDEX.validate_json((folder / INDEX_FILE).read_bytes()).shards
    except (OSError, ValidationError):
        return {}


def _write_index(folder: Path, shards: dict[str, _Shard], new: int) -> None:
    of = f" of {len(shards):,}" if new < len(shards) else ""  # the others have not changed
    count = f"indexed {new:,}{of} shard{'s' * (len(shards) > 1)} in {folder}"
    try:
        write_atomically(folder / INDEX_FILE, _INDEX.dump_json(_Index(1, shards)))
    except OSError as error:
        what = f"cannot be stored there ({error.strerror}), so every start repeats this"
    else:
        what = f"is stored there as {INDEX_FILE}"
    print(f"{count}; the index {what}", file=sys.stderr, flush=True)


def _index_shard(shard: Path) -> list[Row]:
    """Read the headers and labels of a shard."""
    samples: dict[str, list[_Part]] = {}
    with shard.open("rb") as file:
        for info in _headers(shard, file):
            *folders, last = info.name.removeprefix("./").split("/")
            stem, _, extension = last.partition(".")
            extension = extension.lower()
            needed = is_image(last) or (stem and extension in LABELS)
            if not needed or info.isdir() or not all(map(is_visible, folders)):
                continue
            if not info.isreg() or info.issparse():
                raise _problem(
                    shard,
                    f"{info.name} is a link or sparse, so the shard has no bytes of it in one "
                    "place; make it with tar --dereference --hard-dereference",
                )
            part = _Part(printable(info.name), extension, info.offset_data, info.size)
            samples.setdefault("/".join([*folders, stem]), []).append(part)
        images = [_row(shard, file, key, parts) for key, parts in samples.items()]
    if not images:
        raise _problem(shard, f"no images in it ({', '.join(IMAGE_SUFFIXES)}); delete the shard")
    return images


def _headers(shard: Path, file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar file, and check that it is complete."""
    last, end = "", 0
    try:
        with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
            while (info := tar.next()) is not None:
                # The list of members would grow with the shard.
                tar.members.clear()  # type: ignore[attr-defined]
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
        if not last:
            raise _problem(shard, f"not an uncompressed tar file ({error})") from None
        raise _problem(
            shard, f"cut or damaged after {last}, byte {end:,} ({error}); copy or make it again"
        ) from None


def _row(shard: Path, file: BinaryIO, key: str, parts: Sequence[_Part]) -> Row:
    """Return the image and the label of a sample, in which a .cls counts before a .json."""
    images = [part for part in parts if f".{part.extension}" in IMAGE_SUFFIXES]
    cls, objects = ([part for part in parts if part.extension == name] for name in LABELS)
    labels = cls or objects
    for what, found in (("images", images), ("labels", labels)):
        if len(found) > 1:
            names = " and ".join(part.name for part in found[:2])
            raise _problem(
                shard,
                f"{names} are {what} of one example, because members that share a name up to the "
                "first dot belong together; keep one, or rename the other",
            )
    if not images:
        raise _problem(
            shard,
            f"{parts[0].name} has no image; expected is {key}.jpg or another of "
            f"{', '.join(IMAGE_SUFFIXES)}, because members that share a name up to the first dot "
            "belong together",
        )
    if not labels:
        raise _problem(
            shard,
            f"{images[0].name} has no label; expected is {key}.cls that contains a whole number, "
            f'or {key}.json with a "label"',
        )
    image = images[0]
    return image.name, image.offset, image.size, _label(shard, file, labels[0])


def _label(shard: Path, file: BinaryIO, part: _Part) -> int:
    file.seek(part.offset)
    content = file.read(part.size)
    if part.extension == "cls":
        text = content.decode(errors="replace").strip()
    else:
        try:
            text = str(json.loads(content)["label"])
        except (ValueError, RecursionError, TypeError, KeyError):
            raise _problem(shard, f'{part.name} is not a JSON object with a "label"') from None
    if re.fullmatch("[0-9]{1,9}", text) is None:
        raise _problem(
            shard,
            f"the label in {part.name} is {shorten(text)!r}; it must be a whole number, 0 or more",
        )
    return int(text)


def _problem(shard: Path, what: str) -> ValueError:
    return ValueError(f"data.root: {shard}: {printable(what)}")
