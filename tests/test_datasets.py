"""Data sets: their contents, downloading, and splitting."""

import contextlib
import dataclasses
import hashlib
import io
import pickle
import shutil
import socket
import socketserver
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision import datasets as torchvision_datasets
from torchvision.transforms.functional import pil_to_tensor

from vit.config import DataConfig
from vit.data.cifar import FILES
from vit.data.datasets import ImageSet, hold_out, load, load_training
from vit.data.shapes import KINDS, draw_shapes
from vit.data.splits import balanced_subset, describe_counts, held_out, stratified_subset
from vit.registry import DATASETS

ROOT = Path(__file__).resolve().parent.parent / "data"
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
SOURCES = {"cifar10": torchvision_datasets.CIFAR10, "cifar100": torchvision_datasets.CIFAR100}
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

with_cifar = pytest.mark.parametrize("name", FOLDERS)
property_test = settings(max_examples=100)

_loaded: dict[tuple[str, bool], ImageSet] = {}


def load_real(name: str, train: bool) -> ImageSet:
    """Load a data set once for all tests; skip the test where the data set is not there."""
    if name in FOLDERS and not (ROOT / FOLDERS[name]).exists():
        pytest.skip(f"{ROOT / FOLDERS[name]} is missing: the real {name} is not tested")
    if (name, train) not in _loaded:
        _loaded[name, train] = load(name, ROOT, train, download=False)
    return _loaded[name, train]


# What is in them.


@pytest.mark.parametrize("name", [*FOLDERS, "shapes"])
@pytest.mark.parametrize(("train", "cifar", "shapes"), [(True, 50_000, 10_000),
                                                        (False, 10_000, 2_000)])  # fmt: skip
def test_sizes_and_types(name, train, cifar, shapes):
    data = load_real(name, train)
    count = shapes if name == "shapes" else cifar
    assert data.images.shape == (count, 3, 32, 32) and data.images.dtype == torch.uint8
    assert data.labels.shape == (count,) and data.labels.dtype == torch.int64
    assert data.images.is_contiguous()
    assert len(data) == count
    assert (data.masks is not None) == (name == "shapes")
    per_class = torch.bincount(data.labels)
    assert per_class.tolist() == [count // len(data.classes)] * len(data.classes)


@pytest.mark.parametrize("name", [*FOLDERS, "shapes", "digits"])
def test_normalization_is_that_of_the_training_images(name):
    images = load_real(name, train=True).images
    values = torch.arange(256).double() / 255
    shares = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in images.unbind(1)])
    shares = shares / shares.sum(1, keepdim=True)
    mean = (shares * values).sum(1)
    std = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    assert mean.tolist() == pytest.approx(DATASETS[name].mean, abs=1e-4)
    assert std.tolist() == pytest.approx(DATASETS[name].std, abs=1e-4)


def test_cifar10_classes():
    assert load_real("cifar10", train=True).classes == CIFAR10_CLASSES
    assert load_real("cifar10", train=False).classes == CIFAR10_CLASSES


@pytest.mark.parametrize("train", [True, False])
def test_cifar10_equals_what_torchvision_converts(train):
    data = load_real("cifar10", train)
    original = torchvision_datasets.CIFAR10(ROOT, train=train)
    for index in (0, 1, 4_999, len(data) - 1):
        picture, label = original[index]
        assert torch.equal(data.images[index], pil_to_tensor(picture))
        assert data.labels[index] == label


def test_shapes_are_those_of_the_generator_and_need_no_root(tmp_path):
    training = load("shapes", tmp_path / "nowhere", train=True, count=50)
    test = load("shapes", tmp_path / "nowhere", train=False, count=50)
    assert not (tmp_path / "nowhere").exists()
    assert training.classes == KINDS and len(training) == len(test) == 50
    assert not (training.images == test.images).flatten(1).all(1).any()
    again = load("shapes", tmp_path, train=True, count=50)
    for key in ("images", "labels", "masks"):
        assert torch.equal(getattr(training, key), getattr(again, key))
    images, _, _ = draw_shapes(50, seed=0)
    assert not torch.equal(training.images, images)


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data\.name: 'letters' .* cifar10, cifar100, "):
        load("letters", tmp_path, train=True)


def test_digits_are_those_of_scikit_learn(tmp_path):
    training, test = (load("digits", tmp_path, train=part) for part in (True, False))
    original = load_digits()
    expected = np.round(original.images * 255 / 16).astype(np.uint8)
    whole = torch.cat([training.images, test.images])
    assert (len(training), len(test)) == (1438, 359)
    assert sorted(map(bytes, whole.flatten(1).numpy())) == sorted(
        map(bytes, expected.reshape(-1, 64))
    )
    assert training.images.shape[1:] == (1, 8, 8) and training.images.max() == 255
    assert training.classes == test.classes == tuple("0123456789")
    labels = dict(zip(map(bytes, expected.reshape(-1, 64)), original.target, strict=True))
    for part in (training, test):
        assert part.labels.tolist() == [labels[bytes(x)] for x in part.images.flatten(1).numpy()]
        per_class = part.labels.bincount()
        assert per_class.max() - per_class.min() <= 8  # as there are 174 to 183 of each
    assert torch.equal(load("digits", tmp_path, train=False).images, test.images)
    assert list(tmp_path.iterdir()) == []


@with_cifar
def test_files_and_sums_are_those_of_torchvision(name):
    files, source = FILES[name], SOURCES[name]
    assert files.folder == source.base_folder
    assert [*files.train.items()] == [*map(tuple, source.train_list)]
    assert [*files.test.items()] == [*map(tuple, source.test_list)]
    meta = source.meta
    assert (*files.meta, files.classes) == (meta["filename"], meta["md5"], meta["key"])


# How they arrive: tiny archives in CIFAR's layout come from a real server.


@dataclass
class Site:
    """A server and what it did."""

    port: int
    fetched: list[str] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{ARCHIVES[name]}"


@contextlib.contextmanager
def serving(path: str, *answers: bytes) -> Iterator[Site]:
    """Serve a file on a free port until the block ends: each answer once, the last ever after.

    The longest one's length is announced, so that at a shorter one the connection breaks off.
    """
    site = Site(0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == path and answers
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(max(map(len, answers)) if known else 0))
            self.end_headers()
            number = len(site.fetched)
            if self.headers["Method"] != "HEAD":  # torchvision looks for redirects like this
                site.fetched.append(self.path)
            if known:
                self.wfile.write(answers[min(number, len(answers) - 1)])

        def log_message(self, *args: object) -> None:
            pass

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        site.port = port
        yield site


@contextlib.contextmanager
def running(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def batch(name: str, first: int, count: int) -> bytes:
    """Pickle images as CIFAR does; each image is filled with its number, each row with its own."""
    numbers = np.arange(first, first + count, dtype=np.uint8)[:, None]
    planes = np.repeat([0, 50, 100], 1024) + np.tile(np.repeat(np.arange(32), 32), 3)
    labels = [n % 3 for n in range(first, first + count)]
    key = {"cifar10": "labels", "cifar100": "fine_labels"}[name]
    return pickle.dumps({"data": (numbers + planes[None]).astype(np.uint8), key: labels})


@dataclass
class Tiny:
    """A tiny data set in an archive, which is taken for the real one."""

    name: str
    archive: bytes = field(repr=False)
    folder: dict[str, bytes] = field(repr=False)
    source: type

    @property
    def path(self) -> str:
        return f"/{ARCHIVES[self.name]}"


@pytest.fixture(params=FOLDERS)
def tiny(request, monkeypatch) -> Tiny:
    """7 training images and 3 test images; our reader and torchvision know the sums of these."""
    name = request.param
    source, classes = SOURCES[name], ["low", "middle", "high"]
    if name == "cifar10":
        folder = {
            "data_batch_1": batch(name, 0, 4),
            "data_batch_2": batch(name, 4, 3),
            "test_batch": batch(name, 7, 3),
            "batches.meta": pickle.dumps({"label_names": classes}),
        }
        meta, key = "batches.meta", "label_names"
    else:
        folder = {
            "train": batch(name, 0, 7),
            "test": batch(name, 7, 3),
            "meta": pickle.dumps({"fine_label_names": classes}),
        }
        meta, key = "meta", "fine_label_names"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for file, content in folder.items():
            entry = tarfile.TarInfo(f"{FOLDERS[name]}/{file}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    sums = [[file, md5(content)] for file, content in folder.items() if file != meta]
    monkeypatch.setattr(source, "tgz_md5", md5(packed.getvalue()))
    train, test = (
        {f: s for f, s in sums if f.startswith("test") != part} for part in (True, False)
    )
    tiny_files = dataclasses.replace(
        FILES[name], train=train, test=test, meta=(meta, md5(folder[meta]))
    )
    monkeypatch.setitem(FILES, name, tiny_files)
    monkeypatch.setattr(source, "train_list", [s for s in sums if not s[0].startswith("test")])
    monkeypatch.setattr(source, "test_list", [s for s in sums if s[0].startswith("test")])
    monkeypatch.setattr(source, "meta", {"filename": meta, "key": key, "md5": md5(folder[meta])})
    monkeypatch.setattr(source, "url", f"http://127.0.0.1:{closed_port()}/{ARCHIVES[name]}")
    monkeypatch.setenv("no_proxy", "*")
    return Tiny(name, packed.getvalue(), folder, source)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def assert_is_tiny(data: ImageSet, train: bool) -> None:
    numbers = torch.arange(7) if train else torch.arange(7, 10)
    assert data.images.shape == (len(numbers), 3, 32, 32) and data.images.dtype == torch.uint8
    expected = (
        numbers[:, None, None, None]
        + torch.tensor([0, 50, 100])[:, None, None]
        + torch.arange(32)[:, None]
    )
    assert torch.equal(data.images, expected.expand(-1, -1, -1, 32).to(torch.uint8))
    assert torch.equal(data.labels, numbers % 3)
    assert data.classes == ("low", "middle", "high")


def assert_one_helpful_error(info: pytest.ExceptionInfo, tiny: Tiny, root: Path, what: str) -> None:
    error = info.value
    assert type(error) is ValueError
    assert error.__cause__ is None and error.__suppress_context__  # one traceback, not three
    for part in (
        what, str(root), ARCHIVES[tiny.name], FOLDERS[tiny.name], "--data.root", "`make demo`",
    ):  # fmt: skip
        assert part in str(error), f"{part!r} is not in {error}"


def test_downloads_once_and_then_needs_no_server(tiny, tmp_path, monkeypatch, capsys):
    root = tmp_path / "not" / "yet"
    with serving(tiny.path, tiny.archive) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        assert_is_tiny(load(tiny.name, root, train=True), train=True)
        assert site.url(tiny.name) in capsys.readouterr().out
        assert_is_tiny(load(tiny.name, str(root), train=False), train=False)
        assert site.fetched == [tiny.path]
    assert_is_tiny(load(tiny.name, root, train=True), train=True)
    assert_is_tiny(load(tiny.name, root, train=False, download=False), train=False)
    assert capsys.readouterr().out == ""


def test_without_leave_to_download_nothing_is_fetched(tiny, tmp_path, monkeypatch):
    with serving(tiny.path, tiny.archive) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        with pytest.raises(ValueError) as info:
            load(tiny.name, tmp_path, train=True, download=False)
        assert site.fetched == []
    assert_one_helpful_error(info, tiny, tmp_path, "data.download=false")


def test_an_unreachable_server(tiny, tmp_path):
    with pytest.raises(ValueError) as info:
        load(tiny.name, tmp_path, train=True)
    assert_one_helpful_error(info, tiny, tmp_path, f"tried {tiny.source.url}")
    assert "refused" in str(info.value)


def test_an_archive_the_server_does_not_have(tiny, tmp_path, monkeypatch):
    with serving(tiny.path) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        with pytest.raises(ValueError) as info:
            load(tiny.name, tmp_path, train=True)
    assert_one_helpful_error(info, tiny, tmp_path, f"tried {site.url(tiny.name)}")
    assert "404" in str(info.value)
    info.value.__context__.close()  # urllib's error holds the connection


def test_a_server_that_does_not_speak_http(tiny, tmp_path, monkeypatch):
    class Babble(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(b"220 welcome\r\n")

    with running(socketserver.TCPServer(("127.0.0.1", 0), Babble)) as port:
        monkeypatch.setattr(tiny.source, "url", f"http://127.0.0.1:{port}{tiny.path}")
        with pytest.raises(ValueError) as info:
            load(tiny.name, tmp_path, train=True)
    assert_one_helpful_error(info, tiny, tmp_path, f"tried {tiny.source.url}")


def damaged(content: bytes, damage: str) -> bytes:
    return b"x" + content[1:] if damage == "changed" else content[: len(content) // 2]


with_damage = pytest.mark.parametrize("damage", ["changed", "half"])


@with_damage
def test_an_archive_that_arrives_damaged_is_fetched_once_more(tiny, tmp_path, monkeypatch, damage):
    with serving(tiny.path, damaged(tiny.archive, damage), tiny.archive) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        assert_is_tiny(load(tiny.name, tmp_path, train=True), train=True)
    assert site.fetched == [tiny.path] * 2
    assert (tmp_path / ARCHIVES[tiny.name]).read_bytes() == tiny.archive


@with_damage
def test_an_archive_that_arrives_damaged_twice_is_an_error_and_not_kept(
    tiny, tmp_path, monkeypatch, damage
):
    with serving(tiny.path, damaged(tiny.archive, damage)) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        with pytest.raises(ValueError) as info:
            load(tiny.name, tmp_path, train=True)
    assert_one_helpful_error(info, tiny, tmp_path, f"tried {site.url(tiny.name)}")
    assert f"{ARCHIVES[tiny.name]} arrived damaged twice" in str(info.value)
    assert site.fetched == [tiny.path] * 2
    assert list(tmp_path.iterdir()) == []


@with_damage
def test_a_damaged_archive_in_root_is_replaced(tiny, tmp_path, monkeypatch, capsys, damage):
    archive = tmp_path / ARCHIVES[tiny.name]
    archive.write_bytes(damaged(tiny.archive, damage))
    with pytest.raises(ValueError) as info:
        load(tiny.name, tmp_path, train=True, download=False)
    assert_one_helpful_error(info, tiny, tmp_path, f"{archive} is damaged (data.download=false")
    assert archive.exists()  # without leave to replace it, it is left alone
    with serving(tiny.path, tiny.archive) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        assert_is_tiny(load(tiny.name, tmp_path, train=True), train=True)
    assert site.fetched == [tiny.path]
    assert f"{archive} is damaged: downloading" in capsys.readouterr().out


def test_a_damaged_archive_is_not_kept_where_no_other_can_be_had(tiny, tmp_path):
    archive = tmp_path / ARCHIVES[tiny.name]
    archive.write_bytes(damaged(tiny.archive, "half"))
    with pytest.raises(ValueError) as info:
        load(tiny.name, tmp_path, train=True)
    assert_one_helpful_error(info, tiny, tmp_path, f"{archive} is damaged (tried")
    assert not archive.exists()


@pytest.mark.parametrize("download", [True, False])
def test_an_archive_put_there_by_hand_is_unpacked(tiny, tmp_path, download):
    (tmp_path / ARCHIVES[tiny.name]).write_bytes(tiny.archive)
    assert_is_tiny(load(tiny.name, tmp_path, train=True, download=download), train=True)
    assert_is_tiny(load(tiny.name, tmp_path, train=False, download=False), train=False)


def put_folder(tiny: Tiny, root: Path) -> Path:
    folder = root / FOLDERS[tiny.name]
    folder.mkdir()
    for file, content in tiny.folder.items():
        (folder / file).write_bytes(content)
    return folder


def test_a_folder_put_there_by_hand_is_read(tiny, tmp_path):
    put_folder(tiny, tmp_path)
    assert_is_tiny(load(tiny.name, tmp_path, train=True), train=True)


@pytest.fixture(params=[0, -2, -1], ids=["training batch", "test batch", "class names"])
def bad_file(request, tiny, tmp_path) -> Path:
    return put_folder(tiny, tmp_path) / list(tiny.folder)[request.param]


def spoil(file: Path, damage: str) -> str:
    """Damage a file; return what is to be said of it."""
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(damaged(file.read_bytes(), damage))
    return f"{file} is {'missing' if damage == 'missing' else 'damaged'}"


with_spoilt_file = pytest.mark.parametrize("damage", ["missing", "changed", "half"])


@with_spoilt_file
def test_a_damaged_folder_is_refused_or_replaced(
    tiny, tmp_path, monkeypatch, capsys, bad_file, damage
):
    problem = spoil(bad_file, damage)
    with pytest.raises(ValueError) as info:
        load(tiny.name, tmp_path, train=True, download=False)
    assert_one_helpful_error(info, tiny, tmp_path, f"{problem} (data.download=false")
    with serving(tiny.path, tiny.archive) as site:
        monkeypatch.setattr(tiny.source, "url", site.url(tiny.name))
        assert_is_tiny(load(tiny.name, tmp_path, train=True), train=True)
    assert capsys.readouterr().out == f"{problem}: downloading {site.url(tiny.name)}\n"


@with_spoilt_file
def test_a_damaged_folder_beside_a_whole_archive_is_unpacked_again(
    tiny, tmp_path, capsys, bad_file, damage
):
    archive = tmp_path / ARCHIVES[tiny.name]
    archive.write_bytes(tiny.archive)
    problem = spoil(bad_file, damage)
    assert_is_tiny(load(tiny.name, tmp_path, train=True, download=False), train=True)
    assert capsys.readouterr().out == f"{problem}: unpacking {archive}\n"
    assert_is_tiny(load(tiny.name, tmp_path, train=False, download=False), train=False)
    assert capsys.readouterr().out == ""


def test_a_root_that_is_a_file(tiny, tmp_path):
    root = tmp_path / "file"
    root.touch()
    with pytest.raises(ValueError) as info:
        load(tiny.name, root, train=True)
    assert_one_helpful_error(info, tiny, root, "tried")


def test_a_root_in_the_home_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError) as info:
        load(tiny.name, "~/data", train=True, download=False)
    assert str(tmp_path / "data") in str(info.value)
    (tmp_path / "data").mkdir()
    put_folder(tiny, tmp_path / "data")
    assert_is_tiny(load(tiny.name, "~/data", train=True), train=True)
    shutil.rmtree(tmp_path / "data" / FOLDERS[tiny.name])
    (tmp_path / "data" / ARCHIVES[tiny.name]).write_bytes(tiny.archive)
    assert_is_tiny(load(tiny.name, "~/data", train=True), train=True)


# How they are split.


def labels_of(sizes: list[int], seed: int = 0) -> Tensor:
    """Return shuffled labels with so many images of each class."""
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


@property_test
@given(st.lists(st.integers(0, 12), min_size=1, max_size=8).filter(any), st.data())
def test_a_subset_is_as_even_as_the_classes_allow(sizes, data):
    labels = labels_of(sizes)
    count = data.draw(st.integers(0, len(labels)))
    chosen = balanced_subset(labels, count, data.draw(st.integers(0, 99)), "test")
    assert chosen.shape == (count,) and chosen.dtype == torch.int64
    assert (chosen.diff() > 0).all()
    taken = torch.bincount(labels[chosen], minlength=len(sizes)).tolist()
    most = max(taken)
    for number, size in zip(taken, sizes, strict=True):
        assert number <= size
        assert number >= min(size, most - 1)  # less than the others only where there are no more


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([10, 10, 10], 12, [4, 4, 4]),
        ([10, 10, 10], 30, [10, 10, 10]),
        ([10, 10, 10], 0, [0, 0, 0]),
        ([10, 2, 10], 12, [5, 2, 5]),
        ([1, 2, 30], 15, [1, 2, 12]),
        ([5, 0, 5], 4, [2, 0, 2]),
    ],
)
def test_subset_sizes(sizes, count, expected):
    labels = labels_of(sizes)
    chosen = balanced_subset(labels, count, 0, "test")
    assert torch.bincount(labels[chosen], minlength=3).tolist() == expected


def test_a_subset_depends_on_seed_and_purpose_alone():
    labels = labels_of([100] * 10)
    torch.manual_seed(0)
    first = balanced_subset(labels, 200, 0, "one")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(first, balanced_subset(labels, 200, 0, "one"))
    assert torch.equal(torch.get_rng_state(), state)
    for seed, purpose in ((1, "one"), (0, "other")):
        other = balanced_subset(labels, 200, seed, purpose)
        common = torch.isin(first, other).sum()
        assert 20 < common < 60  # chance shares 40 of 200


def test_every_image_and_every_class_has_the_same_chance():
    labels = labels_of([6, 6, 6])
    runs = 1500
    chosen = torch.stack([balanced_subset(labels, 7, seed, "test") for seed in range(runs)])
    times = torch.bincount(chosen.flatten(), minlength=18)
    assert (times - runs * 7 / 18).abs().max() < 5 * (runs * 7 / 18 * 11 / 18) ** 0.5
    per_class = torch.stack([(labels[chosen] == label).sum(1) for label in range(3)])
    larger = (per_class == 3).sum(1)
    assert (larger - runs / 3).abs().max() < 5 * (runs * 2 / 9) ** 0.5


def test_more_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match=r"^probes: 31 images requested, but there are only 30$"):
        balanced_subset(labels_of([10, 10, 10]), 31, 0, "probes")


def numbered_set(sizes: list[int]) -> ImageSet:
    """Make a set whose images and masks tell their number."""
    labels = labels_of(sizes)
    numbers = torch.arange(len(labels))
    images = numbers[:, None, None, None].expand(-1, 3, 2, 2).to(torch.uint8)
    return ImageSet(images, labels, ("a", "b", "c"), numbers[:, None, None].expand(-1, 2, 2) > 20)


@pytest.mark.parametrize("count", [0, 1, 9, 10, 57])
def test_hold_out_splits_into_two_complete_disjoint_parts(count):
    whole = numbered_set([20, 20, 20])
    kept, held = hold_out(whole, count, seed=0)
    assert (len(kept), len(held)) == (60 - count, count)
    numbers = torch.cat([kept.images[:, 0, 0, 0], held.images[:, 0, 0, 0]]).long()
    assert torch.equal(numbers.sort().values, torch.arange(60))
    per_class = torch.bincount(held.labels, minlength=3)
    assert per_class.max() - per_class.min() <= (count % 3 > 0)
    for part in (kept, held):
        own = part.images[:, 0, 0, 0].long()
        assert torch.equal(part.images, whole.images[own])
        assert torch.equal(part.labels, whole.labels[own])
        assert torch.equal(part.masks, whole.masks[own])
        assert part.classes == whole.classes


def test_hold_out_depends_on_the_seed():
    whole = numbered_set([20, 20, 20])
    first, again, other = (hold_out(whole, 12, seed)[1].images for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_hold_out_shares_no_draw_with_the_probes():
    whole = numbered_set([20, 20, 20])
    held = hold_out(whole, 12, seed=0)[1].images[:, 0, 0, 0].long()
    assert not torch.equal(held, balanced_subset(whole.labels, 12, 0, "track.probes"))


@pytest.mark.parametrize("count", [58, 60, 61])
def test_hold_out_leaves_something_to_train_on(count):
    words = rf"^data\.val_size: {count} .* at most 57, .*\(20 in each of 3 classes\)$"
    with pytest.raises(ValueError, match=words):
        hold_out(numbered_set([20, 20, 20]), count, seed=0)


@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ([100, 40, 1], None, [10, 4, 0]),  # a tenth
        ([3, 2, 14], None, [1, 1, 1]),  # at least one, but not the last
        ([3333, 3333, 3333], None, [333, 333, 333]),
        ([4000, 4000, 2000], None, [400, 400, 200]),  # 1,000 of 10,000 or more
        ([20, 30, 40], 0.25, [5, 8, 10]),
        ([20, 2, 1], 0.99, [19, 1, 0]),
        ([20, 30, 40], 9, [2, 3, 4]),
        ([20, 30, 40], 0, [0, 0, 0]),
    ],
)
def test_held_out_images_are_a_count_a_fraction_or_what_suits(sizes, size, expected):
    labels = labels_of(sizes)
    held = held_out(labels, ["a", "b", "c"], size, seed=0)
    assert (held.diff() > 0).all()
    assert torch.bincount(labels[held], minlength=3).tolist() == expected
    assert torch.equal(held_out(labels, ["a", "b", "c"], size, seed=0), held)


@pytest.mark.parametrize(("size", "number"), [(None, 1000), (0.25, 100), (40, 40), (0, 0)])
def test_as_many_shapes_are_drawn_as_are_needed(size, number):
    data = DataConfig(name="shapes", train_size=300, val_size=size)
    training, held = load_training(data, seed=0)
    assert (len(training), len(held)) == (300, number)


def test_a_size_between_counts_and_fractions_is_refused():
    with pytest.raises(ValueError, match=r"^data\.val_size: 1\.5 .* less than 1, or"):
        DataConfig(val_size=1.5)
    assert [str(DataConfig(val_size=size).val_size) for size in ("1000", 1e3, 0.1, None)] == [
        "1000", "1000", "0.1", "None",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "count", "expected"),
    [
        ([100, 100, 30], 100, [44, 43, 13]),  # equal numbers would take all of the third
        ([100, 100, 30], 227, [99, 99, 29]),
        ([1, 2, 30], 15, [0, 1, 14]),
        ([1, 1, 8], 7, [0, 0, 7]),
        ([10, 10, 10], 12, [4, 4, 4]),
        ([10, 10, 10], 0, [0, 0, 0]),
    ],
)
def test_stratified_subset_is_proportional_and_leaves_one_of_each(sizes, count, expected):
    labels = labels_of(sizes)
    for seed in range(5):
        chosen = stratified_subset(labels, count, seed, "test")
        assert (chosen.diff() > 0).all()
        taken = torch.bincount(labels[chosen], minlength=3)
        # Of classes of the same size it is chance which one gives one more.
        assert sorted(taken.tolist()) == sorted(expected)
        assert taken[2] == expected[2]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.data())
@settings(max_examples=60)
def test_stratified_counts_are_within_one_of_proportional(sizes, data):
    labels = labels_of(sizes)
    count = data.draw(st.integers(0, len(labels) - len(sizes)))
    taken = torch.bincount(
        labels[stratified_subset(labels, count, 0, "test")], minlength=len(sizes)
    )
    assert taken.sum() == count
    free = [number for number, size in zip(taken.tolist(), sizes, strict=True) if number < size - 1]
    for number, size in zip(taken.tolist(), sizes, strict=True):
        assert number < size  # one is left
    # Webster: no class that could give more lags behind one that has given.
    lag = [(n + 0.5) / s for n, s in zip(taken.tolist(), sizes, strict=True) if n < s - 1]
    lead = [(n - 0.5) / s for n, s in zip(taken.tolist(), sizes, strict=True) if n > 0]
    assert not free or not lead or max(lead) <= min(lag) + 1e-6


@pytest.mark.parametrize("classes", [10, 100])
def test_splits_of_equal_classes_are_those_of_the_balanced_choice(classes):
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))
    labels = (torch.arange(5000) % classes)[order]
    for seed in range(3):
        for count in (0, 7, 100, 1000):
            balanced = balanced_subset(labels, count, seed, "data.val_size")
            assert torch.equal(stratified_subset(labels, count, seed, "data.val_size"), balanced)


def test_split_of_cifar10_stays_what_it_was():
    whole = load_real("cifar10", train=True)
    training, held = hold_out(whole, 1000, seed=0)
    assert torch.equal(held.images[:8], whole.images[[22, 68, 179, 220, 222, 237, 347, 371]])
    assert held.class_counts() == [100] * 10 and training.class_counts() == [4900] * 10


def test_class_without_training_images_is_refused_with_the_counts():
    with pytest.raises(
        ValueError, match=r"^data\.train_size: 4 leaves a class .*\(circle .* use more"
    ):
        load_training(DataConfig(name="shapes", train_size=4, val_size=0), seed=0)


def test_counts_are_listed_or_summarized():
    assert describe_counts(["a", "b"], [3, 3]) == "3 in each of 2 classes"
    assert describe_counts(["a", "b"], [3000, 1]) == "a 3,000, b 1"
    assert describe_counts([str(n) for n in range(21)], [*range(5, 26)]) == (
        "5 to 25 in each of 21 classes"
    )


def test_select_takes_images_in_the_order_asked_for():
    whole = numbered_set([10, 10, 10])
    part = whole.select(torch.tensor([25, 3, 3]))
    assert part.images[:, 0, 0, 0].tolist() == [25, 3, 3]
    assert part.labels.tolist() == whole.labels[[25, 3, 3]].tolist()
    assert part.masks[:, 0, 0].tolist() == [True, False, False]
    bare = ImageSet(whole.images, whole.labels, whole.classes)
    assert bare.select(torch.tensor([1])).masks is None
    assert bare.to(torch.device("meta")).images.is_meta
    assert bare.to(torch.device("meta")).labels.is_meta


def test_failed_download_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision_datasets.CIFAR10, "url", "http://127.0.0.1:9/nothing.tar.gz")
    with pytest.raises(ValueError, match="tried http"):
        load("cifar10", tmp_path / "mistyped" / "data", train=True)
    assert not (tmp_path / "mistyped").exists()
