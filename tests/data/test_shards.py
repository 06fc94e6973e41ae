"""Tar shards: the bits of a folder with the same images, only what is needed is read, mistakes."""

import io
import random
import re
import shutil
import tarfile
import textwrap
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from small_runs import ROOT, deadline, load
from vit.cli import parse_train
from vit.commands.train import train
from vit.data.config import DataConfig
from vit.data.datasets import load_training
from vit.data.images import ImageSet
from vit.data.layout import recognize
from vit.data.shards import list_shards

CLASSES = ("cat", "dog", "owl")


def encoded(number: int, kind: str) -> bytes:
    """A picture of noise, as the content of a file."""
    pixels = np.random.default_rng(number).integers(256, size=(36 + number % 5, 40, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, kind)
    return file.getvalue()


def write_shard(path: Path, members: dict[str, bytes], layout: int = tarfile.PAX_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=layout) as tar:
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


def names(source: ImageSet) -> list[str]:
    return [member.name for member in source.images.paths]


def test_shards_made_as_documented_give_the_images_of_the_folder_and_a_report(
    tmp_path, monkeypatch
):
    section = (ROOT / "docs/data.md").read_text(encoding="utf-8").partition("## Shards\n")[2]
    section = section.partition("folder of these:\n\n")[2]
    code, command = re.split(r"\n    python (train\.py .*)\n", section, maxsplit=1)[:2]
    monkeypatch.chdir(tmp_path)
    for number in range(24):
        folder = Path("pictures", CLASSES[number % 3])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encoded(number, "jpeg"))
        (folder / ".hidden.jpg").touch()
    exec(textwrap.dedent(code), {})
    inner = textwrap.dedent(code).replace('Path("pets")', 'Path("pets/train")')
    exec(inner.replace("pets", "other"), {})  # without a test/
    with pytest.raises(ValueError, match=r"point --data\.root at one of them"):
        recognize(Path("other"))
    found = []
    for root in ("pictures", "pets", "other/train"):
        data = DataConfig(name=recognize(Path(root)), root=root, val_size=6, memory_gb=0)
        found.append((*load_training(data, 0), load(data.name, root, train=False)))
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert one.classes == other.classes == CLASSES
            assert torch.equal(one.labels, other.labels) and len(one) in (12, 6)
            assert torch.equal(one.pixels(), other.pixels())

    _, *flags = command.split()
    flags += ["--train.device", "cpu", "--train.epochs", "1", "--track.live_mb", "0"]
    config, options = parse_train(flags)
    report = train(config, **options)
    assert report is not None and config.out == "runs/pets"
    assert report["n"] == 6 and [*report["per_class"]] == [*CLASSES]


def test_a_shard_that_changes_is_read_again(root):
    first, again = read(root), read(root)
    assert again.images.paths == first.images.paths and again.fingerprint == first.fingerprint
    write_shard(root / "train/001.tar", labelled(range(100, 102)))
    changed = read(root)
    assert names(changed)[10:12] == ["0100.png", "0101.webp"]
    assert changed.labels[10:12].tolist() == [1, 2] and len(changed.labels) == 22
    assert changed.fingerprint != first.fingerprint


def test_names_of_classes_are_numbers_without_a_list(root):
    (root / "classes.txt").unlink()
    assert read(root).classes == read(root, train=False).classes == ("0", "1", "2")
    with_more = labelled(range(200, 202), 11)
    write_shard(root / "train/more.tar", with_more)
    with pytest.raises(ValueError, match=r"class 11 has 0 test images in .*; each class needs"):
        read(root, train=False)
    write_shard(root / "test/more.tar", with_more)
    assert read(root, train=False).classes == ("0", "1", "2", "11")
    shutil.rmtree(root / "train")
    assert read(root, train=False).labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3]


@pytest.mark.parametrize(
    ("train", "other"), [("train", "val"), ("in1k-train-of-9", "in1k-validation-of-1")]
)
def test_shards_for_training_and_testing_are_not_mixed(root, train, other):
    for number, shard in enumerate(sorted((root / "train").glob("*.tar"))):
        shard.rename(shard.with_name(f"{train}-{number}.tar"))
    assert len(read(root / "train").labels)
    shutil.copy(root / f"train/{train}-0.tar", root / f"train/{other}-0.tar")
    with pytest.raises(ValueError, match=r"contains shards of training images and others; move th"):
        read(root / "train")


def test_a_shard_in_train_may_be_called_train(root):
    first = next((root / "train").glob("*.tar"))
    first.rename(first.with_name("train.tar"))
    assert len(read(root).labels) == 30


@pytest.mark.parametrize("layout", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_may_have_folders_and_companions(tmp_path, layout):
    picture = encoded(0, "jpeg")
    long = f"x/y.z/4\u00e9 {'long' * 30}"
    members = {
        "./b/1.JPG": picture, "./b/1.cls": b" 1", "./b/1.json": b"{}", "./b/1.seg.png": b"mask",
        "./a/1.Cls": b"0", "./a/1.txt": b"a caption", "./a/1.jpeg": picture,
        "./README": b"", "./.hidden.jpg": b"", "./__MACOSX/2.jpg": b"", "note.txt": b"",
        f"{long}.png": picture, f"{long}.cls": b"0", "5.png": picture, "5.cls": b"1",
    }  # fmt: skip
    write_shard(tmp_path / "0.tar", members, layout)
    found: dict[str, int] = {}
    for part in (True, False):
        images = read(tmp_path, part)
        found |= zip(names(images), images.labels.tolist(), strict=True)
    assert found == {"./b/1.JPG": 1, "./a/1.jpeg": 0, f"{long}.png": 0, "5.png": 1}
    assert images.images.paths[0].open().read() == picture


def add(members: dict[str, bytes | None]) -> Callable[[Path], None]:
    """Add members to train/001.tar, replace them, or leave them out."""

    def spoil(root: Path) -> None:
        path = root / "train/001.tar"
        with tarfile.open(path) as tar:
            old = {info.name: tar.extractfile(info).read() for info in tar}
        write_shard(path, {k: v for k, v in (old | members).items() if v is not None})

    return spoil


def on_bytes(
    change: Callable[[bytes], bytes], name: str = "train/001.tar"
) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_bytes(change((root / name).read_bytes()))


WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (on_bytes(lambda content: b"These are images." * 99), "SHARD: not an uncompressed tar file "),
    (on_bytes(lambda content: content[: content.index(b"0019.cls")]), r"SHARD: cut .* 0019\.png"),
    (on_bytes(lambda content: content.replace(b"14.webp", b"1X.webp", 1)), r"SHARD: cut .*\(bad"),
    (on_bytes(lambda content: 2 * content), "SHARD: cut or .* another tar file joined to it"),
    (on_bytes(lambda content: bytes(10_240)), r"SHARD: no images in it \(\.jpg, .*; delete"),
    (add({"0012.cls": None}), "SHARD: 0012 has no label; name.jpg and name.cls"),
    (add({"0012.png": b""}), "SHARD: 0012 has two images; name.jpg and name.cls"),
    (add({"0012.cls": b"cat"}), r"SHARD: the label in 0012\.cls is 'cat'; it"),
    (add({"0012.cls": b"3"}), r"0012\.jpg in SHARD has the label 3, but ROOT/classes\.txt names 3"),
    (on_bytes(lambda content: b"a\n\nb\na", "classes.txt"), r"ROOT/classes\.txt must name each"),
]


@pytest.mark.parametrize(("spoil", "words"), WRONG)
def test_a_mistake_is_one_line_that_names_shard_and_member(root, spoil, words):
    spoil(root)
    with pytest.raises(ValueError) as info:
        load_training(DataConfig(name="shards", root=str(root), memory_gb=0), seed=0)
    words = words.replace("SHARD", r"ROOT/train/001\.tar").replace("ROOT", re.escape(str(root)))
    assert re.match(rf"data\.root: {words}", str(info.value)) and "\n" not in str(info.value)


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE, content: bytes = b"") -> bytes:
    """A header that claims a size, and the content that follows it."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def sealed(block: bytes) -> bytes:
    """A header with the checksum of its content."""
    total = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def pax(text: bytes, size: int | None = None) -> bytes:
    return header("x", len(text) if size is None else size, tarfile.XHDTYPE, text)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail instead of never ending, and where more than 32 MB are asked for."""
    tracemalloc.start()
    try:
        with deadline(20):
            yield
        assert tracemalloc.get_traced_memory()[1] < 2**25
    finally:
        tracemalloc.stop()


LONG = tarfile.GNUTYPE_LONGNAME
TWO = header("a.jpg", 4, content=b"1234") + header("a.cls", 1, content=b"0")
END = bytes(1024)
HEADERS = {
    "to itself": header("b", -512) + END,
    "size in pax": pax(b"13 size=-512\n") + header("b", 1) + END,
    "number in pax": pax(b"9 size=x\n") + header("b.jpg", 1, content=b"1") + END,
    "rest as a name": header("L", -1, LONG) + bytes(2**26),
    "many long names": 3000 * header("L", 2, LONG, b"a"),
    "many pax headers": 3000 * pax(b"9 path=a\n"),
    "digits": pax(b"1" * 400_000),
    "pax of 8 GB": pax(b"", 2**33) + END,
    "label of 8 GB": header("b.jpg", 0) + header("b.cls", 2**33, content=b"0") + END,
    "image beyond the end": header("b.cls", 1, content=b"0") + header("b.jpg", 2**20) + END,
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers_end_in_one_line(tmp_path, case):
    shard = tmp_path / "0.tar"
    shard.write_bytes(TWO + HEADERS[case])
    with bounded(), pytest.raises(ValueError) as info:
        read(tmp_path)
    message = str(info.value)
    assert message.startswith(f"data.root: {shard}: cut or damaged after ") and "\n" not in message


def test_a_label_is_not_read_beyond_what_it_may_be(tmp_path):
    shard = tmp_path / "0.tar"
    with shard.open("wb") as file:  # a file with a hole, of a few blocks on the disk
        file.write(TWO + header("b.jpg", 0) + header("b.cls", 2**33))
        file.truncate(file.tell() + 2**33 + 1024)
    with bounded(), pytest.raises(ValueError, match=r"the label in b\.cls is '.*'; it must be"):
        read(tmp_path)


def test_any_change_of_headers_ends_in_images_or_one_line(tmp_path):
    members = labelled(range(6)) | {f"{'long' * 40}.{kind}": b"0" for kind in ("png", "cls")}
    contents = []
    for layout in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        write_shard(tmp_path / "0.tar", members, layout)
        contents.append((tmp_path / "0.tar").read_bytes())
    fields = [(0, 100), (124, 136), (156, 157), (257, 265), (345, 500), (482, 495)]
    sizes = [n.to_bytes(12, "big", signed=True) for n in (-1, -512, -1024, -2560, -(2**40))]
    sizes += [b"\x80" + n.to_bytes(11) for n in (2**33, 2**63, 2**87)] + [b"77777777777\0"]
    outcomes = set()
    for seed in range(400):
        rng = random.Random(seed)
        content = rng.choice(contents)
        blocks = [content[n : n + 512] for n in range(0, len(content), 512)]
        places = [n for n, block in enumerate(blocks) if block[257:262] == b"ustar"]
        for place in rng.sample(places, rng.randint(1, 3)):
            start, stop = rng.choice(fields)
            value = rng.randbytes(stop - start)
            if start == 124:
                value = rng.choice(sizes)
            elif start == 156:
                value = rng.choice(b"0 1 5 7 g x K L S X".split())
            blocks[place] = sealed(blocks[place][:start] + value + blocks[place][stop:])
        (tmp_path / "0.tar").write_bytes(b"".join(blocks)[: rng.choice([None, len(content) // 2])])
        with bounded():
            try:
                found = read(tmp_path).images.paths
                assert all(m.offset + m.size <= len(content) for m in found)
                outcomes.add("images")
            except ValueError as error:
                assert str(error).startswith("data.root: ") and "\n" not in str(error)
                outcomes.add("damaged" if "damaged" in str(error) else "other")
    assert outcomes == {"images", "damaged", "other"}
