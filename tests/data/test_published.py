"""Published data sets: tiny files of the same form, downloaded by torchvision; digits."""

import dataclasses
import gzip
import hashlib
import io
import pickle
import struct
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_digits
from torchvision import datasets as tv

from small_runs import Payload, load
from vit.data import published
from vit.data.config import DataConfig
from vit.data.datasets import load_training, open_images

TRAINED, TESTED = [2, 0, 1, 2], [1, 2, 0]  # labels
CLASSES = ("low", "middle", "high")


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def picture(number: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(number).integers(256, size=shape).astype(np.uint8)


def jpeg(number: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(number, (10, 12, 3))).save(stream, "jpeg")
    return stream.getvalue()


def pack(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def cifar10(site: Path, url: str, patch: pytest.MonkeyPatch) -> None:
    cls, labels = tv.CIFAR10, TRAINED + TESTED
    files = {cls.meta["filename"]: pickle.dumps({"label_names": CLASSES})}
    batches = {"data_batch_1": range(2), "data_batch_2": range(2, 4), "test_batch": range(4, 7)}
    for file, numbers in batches.items():
        rows = [picture(n, (32, 32, 3)).transpose(2, 0, 1).ravel() for n in numbers]
        batch = {"data": np.stack(rows), "labels": [labels[n] for n in numbers]}
        files[file] = pickle.dumps(batch)
    pack(site / cls.filename, {f"{cls.base_folder}/{file}": files[file] for file in files})
    sums = {file: hashlib.md5(content).hexdigest() for file, content in files.items()}
    patch.setattr(cls, "train_list", [[f, sums[f]] for f in batches if "test" not in f])
    patch.setattr(cls, "test_list", [[f, sums[f]] for f in batches if "test" in f])
    patch.setattr(cls, "meta", {**cls.meta, "md5": sums[cls.meta["filename"]]})
    patch.setattr(cls, "tgz_md5", md5(site / cls.filename))
    patch.setattr(cls, "url", url + cls.filename)


def fashion_mnist(site: Path, url: str, patch: pytest.MonkeyPatch) -> None:
    resources = []
    for part, labels, first in (("train", TRAINED, 0), ("t10k", TESTED, 4)):
        images = np.stack([picture(first + n, (28, 28)) for n in range(len(labels))])
        head = struct.pack(">4i", 0x803, len(labels), 28, 28)
        contents = {
            f"{part}-images-idx3-ubyte.gz": head + images.tobytes(),
            f"{part}-labels-idx1-ubyte.gz": struct.pack(">2i", 0x801, len(labels)) + bytes(labels),
        }
        for name, content in contents.items():
            (site / name).write_bytes(gzip.compress(content))
            resources.append((name, md5(site / name)))
    patch.setattr(tv.FashionMNIST, "resources", resources)
    patch.setattr(tv.FashionMNIST, "mirrors", [url])


def svhn(site: Path, url: str, patch: pytest.MonkeyPatch) -> None:
    split_list = {}
    for part, labels, first in (("train", TRAINED, 0), ("test", TESTED, 4)):
        images = np.stack([picture(first + n, (32, 32, 3)) for n in range(len(labels))], axis=3)
        name = f"{part}_32x32.mat"
        savemat(site / name, {"X": images, "y": np.array([[n or 10] for n in labels])})
        split_list[part] = [url + name, name, md5(site / name)]
    patch.setattr(tv.SVHN, "split_list", split_list)


def flowers102(site: Path, url: str, patch: pytest.MonkeyPatch) -> None:
    pack(site / "102flowers.tgz", {f"jpg/image_{n:05d}.jpg": jpeg(n) for n in range(1, 8)})
    savemat(site / "imagelabels.mat", {"labels": [[n + 1 for n in TRAINED + TESTED]]})
    savemat(site / "setid.mat", {"trnid": [[1, 2]], "valid": [[3, 4]], "tstid": [[5, 6, 7]]})
    names = {"image": "102flowers.tgz", "label": "imagelabels.mat", "setid": "setid.mat"}
    files = {key: (name, md5(site / name)) for key, name in names.items()}
    patch.setattr(tv.Flowers102, "_file_dict", files)
    patch.setattr(tv.Flowers102, "_download_url_prefix", url)


MAKERS = {make.__name__: make for make in (cifar10, fashion_mnist, svhn, flowers102)}


def config(name: str, root: Path, download: bool = True) -> DataConfig:
    return DataConfig(name=name, root=str(root), download=download)


def assert_complete(data: DataConfig) -> None:
    name = data.name
    for train, labels, first in ((True, TRAINED, 0), (False, TESTED, 4)):
        images = open_images(data, train)
        assert images.labels.dtype == torch.int64 and images.masks is None
        if name == "cifar10":
            assert images.classes == CLASSES
        if name == "flowers102":  # training images are shuffled
            files = [*map(Path, images.images.paths)]
            numbers = [int(file.stem[-5:]) - 1 for file in files]
            assert all(file.is_file() for file in files)
            assert sorted(numbers) == [*range(first, first + len(labels))]
            assert images.labels.tolist() == [(TRAINED + TESTED)[number] for number in numbers]
            continue
        assert images.labels.tolist() == labels
        shape = (28, 28, 1) if name == "fashion_mnist" else (32, 32, 3)
        expected = np.stack(
            [picture(first + n, shape).transpose(2, 0, 1) for n in range(len(labels))]
        )
        assert images.images.dtype == torch.uint8 and images.images.is_contiguous()
        assert torch.equal(images.images, torch.from_numpy(expected))


Offer = Callable[[str], DataConfig]


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Return a function that offers a set for download, and the settings that download it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setenv("no_proxy", "*")
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()

        def make(name: str) -> DataConfig:
            MAKERS[name](site, f"http://127.0.0.1:{server.server_address[1]}/", monkeypatch)
            return config(name, tmp_path / "data")

        yield make
        server.shutdown()


def refused(data: DataConfig) -> str:
    """Return the line that says why a data set cannot be read, and what to do."""
    with pytest.raises(ValueError) as info:
        open_images(data, train=True)
    error, message = info.value, str(info.value)
    assert error.__context__ is None  # one traceback, not three
    assert message.startswith(f"data.root: {data.name} is not in {data.root}")
    for part in (f"Put {data.spec.archive} into {data.root}", "--data.root", "`make demo`"):
        assert part in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", MAKERS)
def test_a_set_is_downloaded_once_and_read(name, offer, capsys):
    data = offer(name)
    offline = dataclasses.replace(data, download=False)
    assert "data.download=false" in refused(offline) and not Path(data.root).exists()
    assert_complete(data)
    assert f"{name} is not in {data.root}" in capsys.readouterr().out
    assert any(Path(data.root).glob(data.spec.files))
    assert_complete(offline)
    assert capsys.readouterr().out == ""


def test_runs_that_start_together_download_once(offer, monkeypatch):
    """The second waits until the first has unpacked the files, and reads them."""
    data, asks, found = offer("cifar10"), threading.Event(), list[object]()
    monkeypatch.setattr(published, "say", lambda _: asks.set())
    with monkeypatch.context() as patch:
        patch.setattr(tv.CIFAR10, "url", "http://127.0.0.1:9/cifar")  # nobody answers
        second = threading.Thread(target=lambda: found.append(open_images(data, train=True)))
        with FileLock(Path(data.root) / ".download.lock"):
            second.start()
            assert asks.wait(60)
            second.join(0.3)
            assert second.is_alive()  # without the lock, it would have failed to download
            patch.undo()
            tv.CIFAR10(data.root, download=True)
            patch.setattr(tv.CIFAR10, "url", "http://127.0.0.1:9/cifar")
        second.join()
    assert len(found) == 1


def test_a_failed_or_damaged_download_is_one_line_and_repeated(offer, tmp_path, monkeypatch):
    data = offer("cifar10")
    with monkeypatch.context() as patch:
        patch.setattr(tv.CIFAR10, "url", "http://127.0.0.1:9/cifar")
        assert "refused" in refused(data)
    (archive,) = (tmp_path / "site").iterdir()
    content = archive.read_bytes()
    archive.write_bytes(content[:100])
    assert "corrupted" in refused(data)
    archive.write_bytes(content)
    assert_complete(data)


def idx(images: bytes, labels: bytes, claimed: int = 2) -> dict[str, bytes]:
    return {
        f"raw/{part}-{kind}-ubyte": content
        for part in ("train", "t10k")
        for kind, content in {
            "images-idx3": struct.pack(">4i", 0x803, claimed, 28, 28) + images,
            "labels-idx1": struct.pack(">2i", 0x801, len(labels)) + labels,
        }.items()
    }


def legacy(content: object) -> dict[str, bytes]:
    """Files in which torchvision once stored MNIST."""
    file = io.BytesIO()
    torch.save(content, file)
    return {f"processed/{name}.pt": file.getvalue() for name in ("training", "test")}


PIXELS, TWO = bytes(2 * 28 * 28), torch.zeros(2, 28, 28, dtype=torch.uint8)
DAMAGED: dict[str, tuple[str, list[Callable[[Path], dict[str, bytes]]]]] = {
    "fashion_mnist": ("FashionMNIST", [
        lambda ran: legacy(Payload(ran)),
        lambda ran: {f"processed/{n}.pt": pickle.dumps(Payload(ran)) for n in ("training", "test")},
        lambda _: legacy({"images": TWO}),
        lambda _: legacy(([[0]], torch.tensor([0, 1]))),
        lambda _: legacy((TWO[:, 1:], torch.tensor([0, 1]))),
        lambda _: legacy((TWO, torch.tensor([0, 10]))),
        lambda _: idx(PIXELS, b"\1"),
        lambda _: idx(PIXELS, b"\1\xff"),
        lambda _: idx(PIXELS[1:], b"\0\1"),
        lambda _: idx(PIXELS, b"\0\1", -2),
        lambda _: idx(PIXELS, b"\0\1", 2**31 - 1),
    ]),
    "food101": ("food-101", [
        lambda _, text=text: {"images/a": b"", "meta/train.json": text}
        for text in (b"", b"[]", b"{}", b'{"a": 1}', b'{"a": [', b"[" * 99_999, b"\xff")
    ]),
    "oxford_iiit_pet": ("oxford-iiit-pet", [
        lambda _, text=text: {"images/a": b"", "annotations/trainval.txt": text}
        for text in (b"", b"a", b"a x 1 1", b"a 0 1 1", b"a 2 1 1", b"a %d 1 1" % 2**70)
    ]),
    "svhn": (".", [lambda ran: {"train_32x32.mat": pickle.dumps(Payload(ran))}]),
    "flowers102": ("flowers-102", [lambda ran: {
        "jpg/a": b"", "setid.mat": pickle.dumps(Payload(ran)), "imagelabels.mat": b"",
    }]),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_or_hostile_files_are_one_line_and_run_nothing(name, tmp_path):
    folder, cases = DAMAGED[name]
    for number, case in enumerate(cases):
        root, ran = tmp_path / str(number), tmp_path / "ran"
        for file, content in case(ran).items():
            path = root / folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        refused(config(name, root, download=False))
        assert not ran.exists()


def test_nothing_is_downloaded_into_images_of_the_users_own(tmp_path, monkeypatch):
    """Whose data set was not named, as in Config(data={"root": "pictures"})."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.jpg").touch()
    with pytest.raises(ValueError, match=r"images of your own.* set data\.name to folder"):
        open_images(config("cifar10", tmp_path), train=True)
    assert {path.name for path in tmp_path.iterdir()} == {"cat", "dog"}
    cifar10(tmp_path, "http://127.0.0.1:9/", monkeypatch)  # an archive to be unpacked here
    assert_complete(config("cifar10", tmp_path))


def test_an_archive_is_unpacked_without_a_network_and_damaged_files_are_replaced(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    root, data = tmp_path / "data", config("cifar10", Path("~/data"))
    root.mkdir()
    cifar10(root, "http://127.0.0.1:9/", monkeypatch)
    assert_complete(data)
    for file in root.glob("*/*_batch*"):
        content = file.read_bytes()
        file.write_bytes(b"x" + content[1:])
        assert_complete(data)
        assert file.read_bytes() == content


def test_cifar10_is_read_without_torchvision_if_its_files_are_whole(tmp_path, monkeypatch):
    data = config("cifar10", tmp_path)
    cifar10(tmp_path, "http://127.0.0.1:9/", monkeypatch)
    assert_complete(data)
    files, folder = (["data_batch_1", "data_batch_2"], ["test_batch"]), next(tmp_path.glob("*/"))
    monkeypatch.setattr(published, "CIFAR10_FILES", files)
    parts = [[folder / name for name in (*part, "batches.meta")] for part in files]
    sums = [sha256(b"".join(path.read_bytes() for path in part)).hexdigest() for part in parts]
    monkeypatch.setattr(published, "CIFAR10_SHA256", sums)

    def torchvision(*_: object) -> None:
        raise ValueError("torchvision was asked")

    monkeypatch.setattr(published, "read_torchvision", torchvision)
    assert_complete(data)
    (folder / "test_batch").unlink()
    with pytest.raises(ValueError, match="torchvision was asked"):
        load_training(data, seed=0)


@pytest.mark.parametrize(("name", "module"), [("svhn", "scipy"), ("digits", "sklearn")])
def test_a_missing_package_is_named(name, module, offer, tmp_path, monkeypatch):
    data = offer(name) if name in MAKERS else config(name, tmp_path)
    for known in [known for known in sys.modules if known.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ValueError, match=rf"^data\.name: {name} needs .* \({module}\S*\); install "
    ):
        open_images(data, train=True)


def test_digits_are_those_of_scikit_learn(tmp_path):
    training, test = (load("digits", tmp_path, train=part) for part in (True, False))
    assert (len(training), len(test)) == (1438, 359)
    assert training.classes == test.classes == tuple("0123456789")
    original = load_digits()
    expected = np.round(original.images * 255 / 16).astype(np.uint8).reshape(-1, 64)
    found = [
        (bytes(image), label)
        for part in (training, test)
        for image, label in zip(part.images.flatten(1).numpy(), part.labels.tolist(), strict=True)
    ]
    assert sorted(found) == sorted(zip(map(bytes, expected), original.target, strict=True))
