"""Tar shards: the bits of a folder with the same images, only what is needed is read, mistakes."""

import io
import itertools
import re
import shutil
import tarfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from small_runs import ROOT
from vit.data.config import DataConfig
from vit.data.datasets import load, load_training
from vit.data.images import ImageSet
from vit.data.photos import TarMember
from vit.data.shards import list_shards
from vit.data.stream import ImageFiles

CLASSES = ("cat", "dog", "owl")


def encoded(number: int, kind: str) -> bytes:
    """A picture of noise, as the content of a file."""
    pixels = np.random.default_rng(number).integers(256, size=(36 + number % 5, 40, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind)
    return file.getvalue()


def write_shard(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def labelled(number: int, label: int) -> dict[str, bytes]:
    """Two members: a picture and its label."""
    kind = ("jpeg", "png", "webp")[number % 3]
    name = f"{number:04d}.{kind.replace('jpeg', 'jpg')}"
    return {name: encoded(number, kind), f"{number:04d}.cls": f"{label}\n".encode()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same images in a folder and in shards: 16 for training and 4 for testing per class."""
    folder, shards = (tmp_path_factory.mktemp(name) for name in ("folder", "shards"))
    numbers = itertools.count()
    for half, count in (("train", 16), ("test", 4)):
        members: list[dict[str, bytes]] = []
        for label, name in enumerate(CLASSES):
            (folder / half / name).mkdir(parents=True)
            for number in itertools.islice(numbers, count):
                members.append(labelled(number, label))
                image, content = next(iter(members[-1].items()))
                (folder / half / name / image).write_bytes(content)
        for start in range(0, len(members), 10):
            part = dict(itertools.chain(*(one.items() for one in members[start : start + 10])))
            write_shard(shards / half / f"{start // 10:03d}.tar", part)
    (shards / "classes.txt").write_text("\n".join(CLASSES) + "\n\n")
    return folder, shards


@pytest.fixture
def root(both: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the shards that may be damaged."""
    return shutil.copytree(both[1], tmp_path / "pets")


def config_of(root: Path, **values: Any) -> DataConfig:
    name = "shards" if any(root.rglob("*.tar")) else "folder"
    return DataConfig(name=name, root=str(root), **{"val_size": 9, "memory_gb": 0, **values})


def read(root: Path, train: bool = True, test_fraction: float | None = None) -> ImageSet:
    return list_shards(
        DataConfig(name="shards", root=str(root), test_fraction=test_fraction), train
    )


def paths(images: ImageSet) -> list[TarMember]:
    assert isinstance(images.images, ImageFiles)
    return [path for path in images.images.paths if isinstance(path, TarMember)]


def names(source: ImageSet) -> list[str]:
    return [member.name for member in paths(source)]


# The same images as in a folder.


def test_images_are_those_of_a_folder(both: tuple[Path, Path]) -> None:
    found = [
        (*load_training(config_of(root), 0), load(config_of(root).name, root, train=False))
        for root in both
    ]
    for one, other in zip(*found, strict=True):
        assert one.classes == other.classes == CLASSES
        assert torch.equal(one.labels, other.labels) and len(one) in (39, 9, 12)
        assert torch.equal(one.pixels(), other.pixels())


def test_the_documented_way_to_make_shards_keeps_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## Shards\n")[2]
    code = section.partition("class folders:\n\n")[2].partition("\n\nIf images")[0]
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        folder = Path("pictures/train", CLASSES[number % 3])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded(number, "jpeg"))
    exec(textwrap.dedent(code), {})
    folders, shards = (
        load_training(config_of(Path(root, "train"), val_size=3), 0)[0]
        for root in ("pictures", "pets")
    )
    assert torch.equal(folders.labels, shards.labels) and len(shards) == 6
    assert torch.equal(folders.pixels(), shards.pixels())


# What is read.


def test_a_shard_that_changes_is_read_again(root: Path) -> None:
    first, again = read(root), read(root)
    assert paths(again) == paths(first) and again.fingerprint == first.fingerprint
    write_shard(root / "train/002.tar", labelled(100, 0) | labelled(101, 2))
    changed = read(root)
    assert names(changed)[20:22] == ["0100.png", "0101.webp"]
    assert changed.labels[20:22].tolist() == [0, 2] and len(changed.labels) == 40
    assert changed.fingerprint != first.fingerprint


# Layouts.


def test_names_of_classes_are_numbers_without_a_list(root: Path) -> None:
    (root / "classes.txt").unlink()
    assert read(root).classes == read(root, train=False).classes == ("0", "1", "2")
    with_more = labelled(200, 11) | labelled(201, 11)
    write_shard(root / "train/more.tar", with_more)
    with pytest.raises(ValueError, match=r"class 11 has 0 test images in .*, and needs"):
        read(root, train=False)
    write_shard(root / "test/more.tar", with_more)
    assert read(root, train=False).classes == ("0", "1", "2", "11")
    shutil.rmtree(root / "train")
    assert read(root, train=False).labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 2


def test_shards_for_training_and_testing_are_not_mixed(root: Path) -> None:
    for number, shard in enumerate(sorted((root / "train").glob("*.tar"))):
        shard.rename(shard.with_name(f"train-{number}.tar"))
    assert len(read(root / "train").labels)
    shutil.copy(root / "train/train-0.tar", root / "train/val-0.tar")
    with pytest.raises(ValueError, match=r"contains shards of training images and others; move th"):
        read(root / "train")


def test_members_may_have_folders_and_companions(tmp_path: Path) -> None:
    picture = encoded(0, "jpeg")
    long = f"x/y.z/4\u00e9 {'long' * 30}"
    members = {
        "./b/1.JPG": picture, "./b/1.cls": b" 1", "./b/1.json": b"{}", "./b/1.seg.png": b"mask",
        "./a/1.Cls": b"0", "./a/1.txt": b"a caption", "./a/1.jpeg": picture,
        "./README": b"", "./.hidden.jpg": b"", "./__MACOSX/2.jpg": b"", "note.txt": b"",
        f"{long}.png": picture, f"{long}.cls": b"0", "5.png": picture, "5.cls": b"1",
    }  # fmt: skip
    write_shard(tmp_path / "0.tar", members)
    found: dict[str, int] = {}
    for part in (True, False):
        images = read(tmp_path, part)
        found |= zip(names(images), images.labels.tolist(), strict=True)
    assert found == {"./b/1.JPG": 1, "./a/1.jpeg": 0, f"{long}.png": 0, "5.png": 1}
    assert paths(images)[0].open().read() == picture


# Mistakes.


def add(members: dict[str, bytes | None]) -> Callable[[Path], None]:
    """Add members to train/001.tar, replace them, or leave them out."""

    def spoil(root: Path) -> None:
        path = root / "train/001.tar"
        with tarfile.open(path) as tar:
            old = {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
        write_shard(path, {k: v for k, v in (old | members).items() if v is not None})

    return spoil


def on_bytes(
    change: Callable[[bytes], bytes], name: str = "train/001.tar"
) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_bytes(change((root / name).read_bytes()))


SHARD = r"ROOT/train/001\.tar"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no tar": (
        on_bytes(lambda content: b"These are images." * 99),
        SHARD + r": not an uncompressed tar file \(.+\); copy or make it again$",
    ),
    "cut in an image": (
        on_bytes(lambda content: content[: content.index(b"0019.cls") - 700]),
        SHARD + r": cut or damaged after 0019\.png \(unexpected end of data\); copy or",
    ),
    "cut between members": (
        on_bytes(lambda content: content[: content.index(b"0019.cls")]),
        SHARD + r": cut or damaged after 0019\.png \(no end, ",
    ),
    "damaged header": (
        on_bytes(lambda content: content.replace(b"0014.webp", b"X014.webp", 1)),
        SHARD + r": cut or damaged after 0013\.cls \(no end, a damaged header",
    ),
    "joined by cat": (
        on_bytes(lambda content: 2 * content), SHARD + r": cut or .* another tar file joined to it",
    ),
    "no image at all": (
        on_bytes(lambda content: bytes(10_240)), SHARD + r": no images in it \(\.jpg, .*; delete",
    ),
    "no label": (add({"0012.cls": None}), SHARD + ": 0012 has no label; name.jpg and name.cls"),
    "no image": (add({"0012.jpg": None}), SHARD + ": 0012 has no image; name.jpg and name.cls"),
    "two images": (add({"0012.png": b""}), SHARD + ": 0012 has two images; name.jpg and name.cls"),
    "text as label": (
        add({"0012.cls": b"cat"}),
        SHARD + r": the label in 0012\.cls is 'cat'; it must be a whole number, 0 or more$",
    ),
    "label beyond the list": (
        add({"0012.cls": b"3"}),
        r"0012\.jpg in " + SHARD + r" has the label 3, but ROOT/classes\.txt names 3 classes, 0 to",
    ),
    "wrong names": (
        on_bytes(lambda content: b"a\n\nb\na", "classes.txt"),
        r"ROOT/classes\.txt must name each class once, one per line",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_that_names_shard_and_member(root: Path, case: str) -> None:
    spoil, words = WRONG[case]
    spoil(root)
    with pytest.raises(ValueError) as info:
        load_training(DataConfig(name="shards", root=str(root), memory_gb=0), seed=0)
    assert "\n" not in str(info.value)
    assert re.match(
        rf"data\.root: {words.replace('ROOT', re.escape(str(root)))}", str(info.value)
    ), info.value
