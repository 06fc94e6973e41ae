"""Tar shards: the bits of a folder with the same images, only what is needed is read, mistakes."""

import io
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

from small_runs import ROOT, load
from vit.data.config import DataConfig
from vit.data.datasets import load_training
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


def labelled(numbers: range, label: int | None = None) -> dict[str, bytes]:
    """Two members for each number: a picture and its label."""
    members = {}
    for number in numbers:
        kind = ("jpg", "png", "webp")[number % 3]
        members[f"{number:04d}.{kind}"] = encoded(number, kind.replace("jpg", "jpeg"))
        members[f"{number:04d}.cls"] = f"{number % 3 if label is None else label}\n".encode()
    return members


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten images in each of three shards for training and one for testing."""
    for number, part in enumerate(("train", "train", "train", "test")):
        numbers = range(10 * number, 10 * number + 10)
        write_shard(tmp_path / f"pets/{part}/{number:03d}.tar", labelled(numbers))
    (tmp_path / "pets/classes.txt").write_text("\n".join(CLASSES) + "\n\n")
    return tmp_path / "pets"


def read(root: Path, train: bool = True) -> ImageSet:
    return list_shards(DataConfig(name="shards", root=str(root)), train)


def paths(images: ImageSet) -> list[TarMember]:
    assert isinstance(images.images, ImageFiles)
    return [path for path in images.images.paths if isinstance(path, TarMember)]


def names(source: ImageSet) -> list[str]:
    return [member.name for member in paths(source)]


def test_shards_made_as_documented_give_the_images_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## Shards\n")[2]
    code = section.partition("class folders:\n\n")[2].partition("\n\nIf images")[0]
    monkeypatch.chdir(tmp_path)
    for number in range(24):
        folder = Path("pictures/train", CLASSES[number % 3])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded(number, "jpeg"))
    exec(textwrap.dedent(code), {})
    Path("pets/train/classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    found = []
    for name, root in (("folder", "pictures/train"), ("shards", "pets/train")):
        data = DataConfig(name=name, root=root, val_size=6, memory_gb=0)
        found.append((*load_training(data, 0), load(name, root, train=False)))
    for one, other in zip(*found, strict=True):
        assert one.classes == other.classes == CLASSES
        assert torch.equal(one.labels, other.labels) and len(one) in (12, 6)
        assert torch.equal(one.pixels(), other.pixels())


# What is read.


def test_a_shard_that_changes_is_read_again(root: Path) -> None:
    first, again = read(root), read(root)
    assert paths(again) == paths(first) and again.fingerprint == first.fingerprint
    write_shard(root / "train/001.tar", labelled(range(100, 102)))
    changed = read(root)
    assert names(changed)[10:12] == ["0100.png", "0101.webp"]
    assert changed.labels[10:12].tolist() == [1, 2] and len(changed.labels) == 22
    assert changed.fingerprint != first.fingerprint


# Layouts.


def test_names_of_classes_are_numbers_without_a_list(root: Path) -> None:
    (root / "classes.txt").unlink()
    assert read(root).classes == read(root, train=False).classes == ("0", "1", "2")
    with_more = labelled(range(200, 202), 11)
    write_shard(root / "train/more.tar", with_more)
    with pytest.raises(ValueError, match=r"class 11 has 0 test images in .*, and needs"):
        read(root, train=False)
    write_shard(root / "test/more.tar", with_more)
    assert read(root, train=False).classes == ("0", "1", "2", "11")
    shutil.rmtree(root / "train")
    assert read(root, train=False).labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3]


def test_shards_for_training_and_testing_are_not_mixed(root: Path) -> None:
    for number, shard in enumerate(sorted((root / "train").glob("*.tar"))):
        shard.rename(shard.with_name(f"train-{number}.tar"))
    assert len(read(root / "train").labels)
    shutil.copy(root / "train/train-0.tar", root / "train/val-0.tar")
    with pytest.raises(ValueError, match=r"contains shards of training images and others; move th"):
        read(root / "train")


def test_a_class_may_be_called_train(root: Path) -> None:
    first = next((root / "train").glob("*.tar"))
    first.rename(first.with_name("train.tar"))
    assert len(read(root).labels) == 30


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
    "two images": (add({"0012.png": b""}), SHARD + ": 0012 has two images; name.jpg and name.cls"),
    "text as label": (add({"0012.cls": b"cat"}), SHARD + r": the label in 0012\.cls is 'cat'; it"),
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
