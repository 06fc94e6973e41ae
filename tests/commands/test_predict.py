"""eval.py RUN predict: a table of predictions for image files; and how the files are found."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from command_line import Call
from small_runs import rows_of

SAME = ("--device", "cpu", "--precision", "float32")


@pytest.fixture(name="call")
def call_in_an_empty_folder(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """Run eval.py on the bundled model."""
    monkeypatch.chdir(tmp_path)
    return partial(call, "cifar10_quick")


def save_photo(path: Path, seed: int, size: tuple[int, int] = (50, 40)) -> None:
    """Save a photo of coarse noise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(256, size=(4, 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size).save(path)


NAMES = ["B.JPG", "a.jpeg", "c/0.png", "c/d/1.webp", 'c/ä, "é.bmp', "x.ppm", "y.tiff"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of seven photos, in the order in which they are found, and other files."""
    folder = tmp_path_factory.mktemp("photos")
    for seed, name in enumerate(NAMES):
        save_photo(folder / name, seed, (50 + seed, 40))
    for name in (".hidden.png", ".hidden/2.png", "c/.cache/3.jpg"):
        save_photo(folder / name, 0)
    (folder / "notes.txt").write_text("no picture")
    (folder / "c/table.csv").write_text("no picture")
    return folder


def test_features_are_what_the_head_turns_into_logits(photos):
    classifier = vit.load("cifar10_quick", "cpu", "float32")
    files = [photos / name for name in NAMES]
    features = classifier.features(files)
    assert features.shape == (7, 96)
    torch.testing.assert_close(classifier.features(files[0]), features[:1])
    found = classifier.model.head(features).softmax(dim=1)
    for row, shares in zip(found, classifier.predict(files, 10), strict=True):
        expected = torch.tensor([shares[name] for name in classifier.classes])
        torch.testing.assert_close(classifier.scaled(row.log()).softmax(dim=0), expected)


@pytest.mark.parametrize(("batch_size", "at_once"), [(3, 2), (500, 32)])
def test_table_holds_what_predict_says(call, photos, tmp_path, monkeypatch, batch_size, at_once):
    monkeypatch.setattr("vit.data.stream.AT_ONCE", at_once)
    monkeypatch.setattr("vit.data.stream.FEW", at_once)  # with and without workers
    table = tmp_path / "new" / "table.csv"
    ended = call("predict", photos, "--out", table, "--batch_size", batch_size, *SAME)
    assert ended.code == 0 and "ignored, not images: c/table.csv, notes.txt" in ended.error
    assert "classified 7 of 7 files" in ended.out and f"wrote {table}" in ended.out
    rows = rows_of(table)
    assert [row["file"] for row in rows] == [str(photos / name) for name in NAMES]
    expected = vit.load("cifar10_quick", "cpu", "float32").predict([row["file"] for row in rows])
    for row, shares in zip(rows, expected, strict=True):
        assert (row["class"], row["probability"]) == (row["class_1"], row["probability_1"])
        assert f"{row['file']}: {row['class']} ({float(row['probability']):.1%})\n" in ended.out
        found = {row[f"class_{n}"]: float(row[f"probability_{n}"]) for n in range(1, 6)}
        assert list(found) == list(shares)
        assert list(found.values()) == pytest.approx(list(shares.values()), rel=1e-4)
        assert len(row) == 13
    assert list(table.parent.iterdir()) == [table]


def test_without_a_readable_picture_nothing_is_written(call, tmp_path):
    (tmp_path / "a.jpg").write_text("no picture")
    ended = call("predict", "a.jpg")
    last = "error: predict: none of the files (1) can be read as an image\n"
    assert ended.code == 2 and ended.error.endswith(last)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jpg"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("predict none.png", "predict: none.png: file not found"),
        ("predict folder", "predict: folder contains no image files"),
        ("predict photo.png --out folder/a.csv", "folder/a.csv is not a regular file"),
        ("predict photo.png --out photo.png/a.csv", "out: photo.png is a file"),
        ("predict photo.png --out other.csv", "out: other.csv exists and is not a table of pre"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(call, tmp_path, words, part):
    save_photo(tmp_path / "photo.png", 0)
    (tmp_path / "other.csv").write_text("file,size\n")
    (tmp_path / "folder/a.csv").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    ended = call(*words.split())
    assert ended.code == 2 and ended.out == ""
    assert ended.error.startswith(f"error: {part}") and ended.error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "other.csv").read_text() == "file,size\n"


@pytest.mark.parametrize("command", ["predict", "photo"])
def test_what_cannot_be_read_in_a_folder_is_named(call, tmp_path, command):
    save_photo(tmp_path / "in/good.png", 0)
    (tmp_path / "in/cut.png").write_bytes((tmp_path / "in/good.png").read_bytes()[:60])
    (tmp_path / "in/phone.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(99))
    (tmp_path / "in/film.mov").touch()
    (tmp_path / "in/t\x1b[2J.jpg").write_text("no picture")
    frames = [Image.new("RGB", (40, 40), colour) for colour in ("white", "black")]
    frames[0].save(tmp_path / "in/moving.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "first.png")
    ended = call(command, "in", "first.png", *(["--out", "a.csv"] if command == "predict" else []))
    assert ended.code == 0 and "classified 3 of 6 files" in ended.out
    assert "\x1b" not in ended.error
    ignored, *skipped = ended.error.splitlines()
    assert ignored == "in: 1 file ignored, not images: film.mov"
    assert [line[: line.index(":", 10)] for line in skipped] == ["warning: skipped"] * 3
    assert "in/cut.png cannot be read as an image: " in skipped[0]
    assert skipped[1].endswith("HEIC needs a package; run pip install pillow-heif")
    if command == "predict":
        shares = {row.pop("file"): row for row in rows_of(Path("a.csv"))}
        assert shares["in/moving.gif"] == shares["first.png"] != shares["in/good.png"]
