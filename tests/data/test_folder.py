"""Image folders: reading, unreadable files, wrong layouts, and complete runs."""

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from small_runs import draw_pictures, load, small
from vit.cli import parse_train
from vit.commands.compare import run as compare_runs
from vit.commands.config import CompareConfig, EvalDataConfig, ReportConfig
from vit.commands.report import run as evaluate_run
from vit.commands.train import train
from vit.config import Config
from vit.data.config import DataConfig
from vit.data.datasets import _note_first, load_test_images, load_training, split_training
from vit.data.folder import list_folder
from vit.data.images import ImageSet
from vit.data.layout import recognize
from vit.data.photos import find_photos
from vit.data.preprocess import Preprocess
from vit.data.stream import ImageFiles
from vit.training.loop import Loop
from vit.training.start import check_config

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ("cat", "dog", "owl")


def picture(number: int) -> Image.Image:
    """A picture of noise, which its number fixes."""
    pixels = np.random.default_rng(number).integers(256, size=(32, 32, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """8 training and 4 test pictures of each class; their files' names are their numbers."""
    root = tmp_path / "pictures"
    for number in range(36):
        half, name = ("train" if number < 24 else "test"), CLASSES[number % 3]
        (root / half / name).mkdir(parents=True, exist_ok=True)
        picture(number).save(root / half / name / f"{number:02d}.png")
    return root


@pytest.fixture
def classes_only(tmp_path: Path) -> Path:
    """Ten pictures each of two classes, and fifteen of a third, beside hidden files."""
    root = tmp_path / "flowers and more"
    for number, name in enumerate(["rød"] * 10 + ["猫"] * 10 + ["c d"] * 15):
        (root / name).mkdir(parents=True, exist_ok=True)
        picture(number).save(root / name / f"{number:02d}.png")
    for folder in (".ipynb_checkpoints", "__MACOSX", "猫/.thumbnails"):
        (root / folder).mkdir()
        (root / folder / "copy.png").write_bytes(b"not the user's")
    for name in (".DS_Store", "._10.png", "notes.txt"):
        (root / "猫" / name).write_bytes(b"not an image")
    return root


def folder(root: Path, **values: Any) -> DataConfig:
    return DataConfig(name="folder", root=str(root), **values)


def read(root: Path, train: bool, test_fraction: float | None = None) -> ImageSet:
    return list_folder(folder(root, test_fraction=test_fraction), train)


def test_images_are_the_pictures_and_those_for_training_are_mixed_always_alike(root):
    test, data, again = (load("folder", root, train=train) for train in (False, True, True))
    assert torch.equal(data.images, again.images) and torch.equal(data.labels, again.labels)
    known = {np.array(picture(n)).transpose(2, 0, 1).tobytes(): n for n in range(36)}
    numbers = [[known[image.numpy().tobytes()] for image in part.images] for part in (test, data)]
    assert numbers[0] == sorted(range(24, 36), key=lambda number: (number % 3, number))
    assert sorted(numbers[1]) == [*range(24)] and set(data.labels[:10].tolist()) == {0, 1, 2}
    for images, found in zip((test, data), numbers, strict=True):
        assert images.labels.tolist() == [number % 3 for number in found]
        assert images.classes == CLASSES


@pytest.mark.parametrize(
    ("fraction", "per_class"), [(None, [3, 2, 2]), (0.5, [8, 5, 5]), (0.01, [1, 1, 1])]
)
def test_a_fraction_of_each_class_is_for_testing(classes_only, capsys, fraction, per_class):
    training, test = (read(classes_only, part, fraction) for part in (True, False))
    assert training.classes == test.classes == ("c d", "rød", "猫")
    assert test.labels.bincount().tolist() == per_class
    files = [Path(path) for images in (training, test) for path in images.origins]
    assert sorted(path.name for path in files) == [f"{number:02d}.png" for number in range(35)]
    for images in (training, test):
        assert list(images.origins) == sorted(images.origins)
        classes = [images.classes[n] for n in images.labels]
        assert classes == [Path(path).parent.name for path in images.origins]
    assert read(classes_only, False, fraction).origins == test.origins
    ignored = f"{classes_only}: 1 file ignored, not images: 猫/notes.txt\n"
    assert capsys.readouterr() == ("", ignored)  # once


def test_links_lead_to_other_disks_but_not_in_circles_or_into_other_classes(root, tmp_path):
    expected = [(read(root, part).origins, read(root, part).labels.tolist()) for part in (0, 1)]
    disk = tmp_path / "disk"
    shutil.move(root / "train/dog", disk / "dog")
    (root / "train/dog").symlink_to(disk / "dog")  # a class
    (disk / "more").mkdir()
    picture(99).save(disk / "more/99.png")
    (root / "train/cat/more").symlink_to(disk / "more")  # a part of one
    (root / "train/owl/deep").mkdir()
    picture(98).save(root / "train/owl/deep/98.png")
    places = {
        root / "train/cat": ("train/cat", "train", "train/dog", "test", "test/owl", "."),
        root / "train/owl/deep": ("train/owl", "train/cat"),
        root / "test/owl": ("train/owl", "test", "train"),
        disk / "dog": ("train/dog", "train/cat"),
        disk / "more": ("train", "train/owl"),
    }
    added = {"train/cat/more/99.png": 0, "train/owl/deep/98.png": 2}
    pairs = dict(zip(*expected[1], strict=True)) | {str(root / k): v for k, v in added.items()}
    expected[1] = tuple(zip(*sorted(pairs.items()), strict=True))
    # First one link at a time, because several multiply.
    for place, targets in [*((p, (t,)) for p, ts in places.items() for t in ts), *places.items()]:
        links = [place / f"a{number}" for number, _ in enumerate(targets)]
        for link, target in zip(links, targets, strict=True):
            link.symlink_to(root / target)
        for part in (0, 1):
            found = read(root, part)
            assert found.origins == tuple(expected[part][0]), (place, targets)
            assert found.labels.tolist() == [*expected[part][1]]
        if len(targets) == 1:
            links[0].unlink()
    photos = [str(path) for path in find_photos([str(root)], "predict")]
    assert len({Path(path).resolve() for path in photos}) == len(photos) == 38
    again = [
        str(root),
        *(f"{Path(path).parent}/../{Path(path).parent.name}/{Path(path).name}" for path in photos),
    ]
    assert [str(path) for path in find_photos(again, "predict")] == photos


def tree(root: Path, *files: str) -> Path:
    """Make pictures of noise and texts at paths such as train/cat/0.png, with two of each."""
    shutil.rmtree(root)
    for number, name in enumerate(files):
        for path in (root / name, (root / name).with_stem(f"{Path(name).stem}b")):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture(number).save(path) if path.suffix == ".png" else path.write_text("text")
    return root


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("Training", "Testing"), ("TRAIN", "TEST"), ("train", "eval"), ("training", "dev"),
        ("seg_train", "seg_test"), ("seg_train/seg_train", "seg_test/seg_test"),
        ("images/train", "images/val"), ("training_set", "test_set"), ("train", "Validation"),
        ("Training Images", "Test Images"), ("train1", "test1"),
    ],
)  # fmt: skip
def test_usual_names_of_train_and_test_folders_are_recognized(root, train, test):
    tree(root, *(f"{part}/{name}/0.png" for part in (train, test) for name in ("glioma", "none")))
    (root / "images/labels").mkdir(parents=True, exist_ok=True)
    assert recognize(root) == "folder"
    for part, name in ((True, train), (False, test)):
        found = read(root, part)
        assert found.classes == ("glioma", "none")
        assert {Path(path).parents[1] for path in found.origins} == {root / name}


def test_folders_are_parts_only_where_they_contain_classes(root, capsys):
    for classes in (("invalid", "valid"), ("car", "plane", "train"), ("Dev", "sales")):
        tree(root, *(f"{name}/0.png" for name in classes))
        assert recognize(root) == "folder" and read(root, True).classes == classes
    tree(root, "train/a/0.png", "train/b/0.png", "val/a/0.png", "val/b/0.png", "test/0.png")
    capsys.readouterr()
    assert {Path(path).parts[-3] for path in read(root, False).origins} == {"val"}
    assert capsys.readouterr().err == f"{root}: test ignored; test images are in val\n"
    tree(
        root, "train/a/0.png", "mini_train/a/0.png", "test/a/0.png", "train/b/0.png", "test/b/0.png"
    )
    assert {Path(path).parts[-3] for path in read(root, True).origins} == {"train"}


@pytest.mark.parametrize(
    "files",
    [
        ("train/0.png", "test1/0.png"), ("train/0.png", "test/0.png", "more/0.png"),
        ("train/a/0.png", "car/b/0.png"), ("valid/2024/0.png", "invalid/2024/0.png"),
        ("train/a/0.png", "Training/a/0.png", "tests/a/0.png"), ("val/0.png",),
        ("seg_train/a/0.png", "Training/a/0.png", "test/a/0.png"), ("train/a/0.png", "test/0.png"),
    ],
)  # fmt: skip
def test_folders_that_may_be_parts_or_classes_are_refused_with_both_readings(root, files):
    tree(root, *files)
    names = {Path(name).parts[0] for name in files} - {"car", "more", "invalid", "tests"}
    for ask in (lambda: recognize(root), lambda: read(root, True)):
        with pytest.raises(ValueError, match=r"two ways: .* as parts or as classes; ") as info:
            ask()
        words = str(info.value).partition("two ways: ")[2]
        assert {*words.partition(" as parts")[0].split(", ")} <= names
        assert words.endswith(words.partition(" as parts")[0])


BROKEN: list[tuple[str, Callable[[Path], Any]]] = [
    ("train", lambda path: path.write_bytes(next(path.parent.iterdir()).read_bytes()[:2000])),
    ("test", Image.new("1", (9500, 9500)).save),  # at which Pillow only warns
    ("train", lambda path: path.symlink_to("none.png")),
]


@pytest.mark.parametrize(("half", "spoil"), BROKEN, ids=["cut", "huge", "nowhere"])
def test_a_broken_picture_is_an_error_or_left_out(root, capsys, half, spoil):
    intact = load("folder", root, train=half == "train")
    path = root / half / "dog" / "bad.png"
    spoil(path)
    with pytest.raises(ValueError) as info:
        load_training(folder(root), seed=0)
    words = rf"data\.root: {re.escape(str(path))}( cannot be read|: file not).*on_bad_image skip$"
    assert re.match(words, str(info.value))
    assert spoil != BROKEN[1][1] or "more than 89 megapixels, the largest that" in str(info.value)
    assert capsys.readouterr() == ("", "")
    data = load("folder", root, train=half == "train", on_bad_image="skip")
    assert sorted(data.origins) == sorted(intact.origins)
    assert capsys.readouterr().err == (
        f"skipped 1 of {len(intact) + 1} images in {root} that cannot be read: {half}/dog/bad.png\n"
    )


def test_photos_in_heic_name_the_package_that_they_need(root, capsys):
    (root / "train/dog/a.png").write_bytes(b"no picture")
    (root / "train/dog/b.jpg").write_bytes(b"\0\0\0\x18ftypheic")
    hint = "; HEIC needs a package; run pip install pillow-heif"
    with pytest.raises(ValueError, match=r"b\.jpg cannot .* pillow-heif; 2 files cannot"):
        load_training(folder(root), seed=0)
    load("folder", root, train=True, on_bad_image="skip")
    assert capsys.readouterr().err.endswith(f"train/dog/b.jpg{hint}\n")


@pytest.mark.parametrize("memory", [None, 0.0])
def test_all_broken_pictures_are_named_at_once(root, memory):
    broken = sorted([*root.glob("t*/cat/*.png"), *root.glob("test/owl/*")])
    for path in broken:
        path.write_bytes(b"no picture")
    with pytest.raises(ValueError, match="; 16 files cannot be read: ") as info:
        load_training(folder(root, memory_gb=memory), seed=0)
    message = str(info.value)
    assert message.endswith("on_bad_image skip") and " and 6 more; " in message
    listed = message.partition("files cannot be read: ")[2].partition(" and ")[0].split(", ")
    assert len({*listed}) == 10 and {*listed} < {str(path.relative_to(root)) for path in broken}


def only_bad_pictures(root: Path) -> None:
    for path in (root / "test" / "dog").iterdir():
        path.write_bytes(b"")


WRONG = [
    (lambda root: root.rename(root.with_name("moved")), "ROOT does not exist; point --data.root"),
    (lambda root: (root / "test").rename(root / "tests"), "ROOT (it contains tests, train) can be"),
    (lambda root: (root / "test/dog").rename(root / "test/wolf"), "class wolf has 0 training"),
    (only_bad_pictures, "no test image of class dog in ROOT can be read (test/dog/25.png, "),
]


@pytest.mark.parametrize(("spoil", "words"), WRONG)
def test_a_wrong_layout_is_one_line_that_says_what_is_there_and_what_to_do(root, spoil, words):
    spoil(root)
    with pytest.raises(ValueError) as info:
        load_training(folder(root, on_bad_image="skip"), seed=0)
    message = str(info.value)
    assert message.startswith(f"data.root: {words}".replace("ROOT", str(root))), message
    assert "\n" not in message


def test_what_cannot_be_split_is_refused(root, classes_only):
    words = r"^data\.test_fraction: 0\.3 .* must be null"
    with pytest.raises(ValueError, match=words):
        read(root, train=True, test_fraction=0.3)
    assert len(read(root, train=False, test_fraction=0.3))  # of a model that was trained elsewhere
    with pytest.raises(ValueError, match=words):
        DataConfig(name="shapes", test_fraction=0.3)
    for name in ("rød", "猫"):
        shutil.rmtree(classes_only / name)
    with pytest.raises(ValueError, match=r"has 1 classes \(c d\); a classifier needs at least two"):
        read(classes_only, train=True)


def test_images_are_recognized(root, classes_only, tmp_path):
    table = tmp_path / "labels.csv"
    table.touch()
    assert recognize(root) == recognize(classes_only) == recognize(root / "train") == "folder"
    assert recognize(table) == "table"
    for other in (tmp_path, tmp_path / "nowhere", ROOT, ROOT / "data"):
        assert recognize(other) is None, other
    loose = root / "train" / "cat"  # images without classes
    with pytest.raises(ValueError, match=r"cat has no class folders \(it contains 00\.png, 03"):
        read(loose, train=recognize(loose) == "folder")
    shutil.rmtree(root / "train")
    (root / "test").rename(root / "val")
    assert recognize(root) == "folder"


def test_the_name_of_the_data_set_follows_from_the_root(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets/cifar-10-batches-py").mkdir(parents=True)
    (tmp_path / "root").write_text(f"data: {{root: '{root}'}}")
    (tmp_path / "both").write_text(f"data: {{root: '{root}', name: shapes}}")
    for words, name, out in (
        (["--data.root", str(root)], "folder", "runs/pictures"),
        (["--data.root", str(root), "--data.name", "cifar10"], "cifar10", "runs/quick"),
        (["--data.root", str(tmp_path / "sets")], "cifar10", "runs/quick"),
        (["--data.root", "data"], "cifar10", "runs/quick"),  # the default, which is created
        (["--data.name", "table", "--data.root", "x/labels.csv"], "table", "runs/labels"),
        (["--config", "quick", "--data.root", str(root)], "folder", "runs/pictures"),
        # A name in a file does not switch off what a later root says, but one beside the root does.
        (["--config", "cifar10_hour", "--data.root", str(root)], "folder", "runs/cifar10_hour"),
        (["--config", "cifar10", "--data.root", "sets"], "cifar10", "runs/cifar10"),
        (["--config", "cifar10", "--data.root", "new"], "cifar10", "runs/cifar10"),
        (["--config", "cifar10", "--config", "root"], "folder", "runs/cifar10"),
        (["--config", "both"], "shapes", "runs/shapes"),
        (["--config", "root", "--data.name", "digits"], "digits", "runs/digits"),
    ):
        found, _ = parse_train(words)
        assert (found.data.name, found.out) == (name, out), words


def test_a_mistyped_root_is_not_where_cifar10_is_downloaded_to(classes_only, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^data\.root: .*/flower does not exist; check the path"):
        parse_train(["--data.root", str(classes_only.with_name("flower"))])
    for folder in sorted(classes_only.iterdir())[1:]:  # one class, so that nothing is recognized
        shutil.rmtree(folder)
    (classes_only / "notes").mkdir()
    file = tmp_path / "settings.yaml"
    file.write_text(f"data: {{root: '{classes_only}'}}")
    with pytest.raises(ValueError, match=r"\(it contains .*notes.*\); check .* --data\.name fold"):
        parse_train(["--config", str(file)])
    classes_only.rename(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^data\.root: data does not contain cifar10 \(it"):
        parse_train(["--data.root", "data"])
    for recipe in ("cifar10", "shapes"):
        with pytest.raises(ValueError, match=rf"^data\.root: data does not contain {recipe} \(it"):
            parse_train(["--config", recipe, "--data.root", "data"])
    with pytest.raises(ValueError, match=r"^data\.root: data does not contain cifar10 "):
        parse_train(["--config", str(file), "--config", "cifar10", "--data.root", "data"])
    (tmp_path / "later").write_text("data: {name: svhn}")
    file.write_text("data: {root: data}")
    with pytest.raises(ValueError, match=r"^data\.root: data does not contain svhn .*name svhn to"):
        parse_train(["--config", str(file), "--config", "later"])


def config(root: Path, out: Path, **data: Any) -> Config:
    data = {"name": "folder", "root": str(root), "val_size": 3, "train_size": None, **data}
    train = {"epochs": 1, "batch_size": 8, "accumulate": 1}
    return small(out, data=data, train=train, track={"probes": 0})


def test_a_run_among_the_pictures_is_refused_and_one_beside_their_parts_is_not(root, classes_only):
    with pytest.raises(ValueError, match=r"^out: .* is inside data\.root=.*choose another --out$"):
        train(config(classes_only, classes_only / "runs" / "first"))
    assert not (classes_only / "runs").exists()
    for out in ("train/run", f"test/{CLASSES[0]}/run"):
        with pytest.raises(ValueError, match=r"^out: .* is inside data\.root="):
            check_config(config(root, root / out))
    check_config(config(root, root / "run"))


def keys(images: ImageSet) -> list[tuple[bytes, int]]:
    """The pixels and the label of each image."""
    pixels = [image.numpy().tobytes() for image in images.pixels()]
    return list(zip(pixels, images.labels.tolist(), strict=True))


@pytest.mark.parametrize("memory", [None, 0.0])
def test_copies_of_a_picture_are_on_one_side_of_each_split(tmp_path, memory, capsys):
    for number in range(60):  # each four times, and as a link
        folder = tmp_path / CLASSES[number % 3]
        folder.mkdir(exist_ok=True)
        for copy in range(4):
            picture(number).save(folder / f"{copy}-{number:02d}.png")
        (folder / f"link-{number:02d}.png").symlink_to(f"0-{number:02d}.png")
    shutil.copy(tmp_path / "cat" / "0-00.png", tmp_path / "dog" / "as-dog.png")
    data = DataConfig(name="folder", root=str(tmp_path), val_size=0.25, memory_gb=memory)
    training, held = load_training(data, seed=3)
    printed = capsys.readouterr().err
    assert "warning: 241 of 301 images" in printed and "cat/0-00.png" in printed
    assert "dog/as-dog.png" in printed and "test images are" not in printed
    test = load_test_images(data)
    sides = [set(keys(part)) for part in (training, held, test)]
    for one, other in itertools.combinations(sides, 2):
        assert not {pixels for pixels, _ in one} & {pixels for pixels, _ in other}
    assert sum(map(len, sides)) == 61 and len(training) + len(held) + len(test) == 301
    # A fifth of the different pictures of each class, then a quarter of the others.
    assert test.class_counts() == [20, 20, 20] and held.class_counts() == [20, 20, 20]

    shutil.rmtree(tmp_path / "dog")
    before = list_folder(data, train=True).fingerprint
    shutil.copy(tmp_path / "cat" / "0-03.png", tmp_path / "cat" / "0-06.png")
    assert list_folder(data, train=True).fingerprint != before  # so that no run mixes two splits


def test_copies_among_the_users_own_parts_stay_and_are_counted(root, capsys):
    shutil.copy(root / "train" / "cat" / "00.png", root / "test" / "cat" / "24.png")
    (root / "test" / "owl" / "link.png").symlink_to(root / "train" / "owl" / "02.png")
    data = DataConfig(name="folder", root=str(root))
    load_training(data, seed=0)
    printed = capsys.readouterr().err
    assert "warning: 2 of 37 images" in printed and "2 of the 13 test images" in printed
    assert load_test_images(data).class_counts() == [4, 4, 5]


def test_pages_are_bands_of_a_model_with_as_many_channels_else_pointed_out(tmp_path, capsys):
    pages = np.random.default_rng(0).integers(256, size=(20, 5, 32, 32), dtype=np.uint8)
    for number, planes in enumerate(pages):
        first, *others = map(Image.fromarray, planes)
        file = tmp_path / CLASSES[number % 2] / f"{number:02d}.tif"
        file.parent.mkdir(exist_ok=True)
        first.save(file, save_all=True, append_images=others)
    data = {"name": "folder", "root": str(tmp_path)}
    for channels, planes in ((5, slice(5)), (3, [0, 0, 0])):
        training, _ = load_training(DataConfig(channels=channels, **data), seed=0)
        for index, image in enumerate(training.images):
            number = int(Path(training.name(index)).stem)
            np.testing.assert_array_equal(image.numpy(), pages[number][planes])
        printed = capsys.readouterr().err
        assert printed.count("5 pages, of which the first is read") == (channels == 3)


def test_a_run_is_not_resumed_with_renamed_files_or_evaluated_with_other_classes(
    root, tmp_path, monkeypatch, capsys
):
    settings = config(root, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("vit.commands.train.finish_run", lambda *_: None)
        train(settings)
    first = sorted((root / "train" / "cat").iterdir())[0]
    first.rename(first.with_name("zz.png"))
    with pytest.raises(ValueError, match="files were added, deleted or renamed"):
        train(settings)
    first.with_name("zz.png").rename(first)
    report = train(settings)
    capsys.readouterr()
    shutil.copytree(root / "test" / "owl", tmp_path / "few" / "test" / "owl")
    few = vit.evaluate(vit.load(tmp_path / "run"), tmp_path / "few")
    assert "of 1 of 3 classes; none: cat, dog" in capsys.readouterr().err
    assert few["n"] == 4 and few["per_class"]["cat"]["n"] == 0
    assert few["confusion_matrix"][2] == report["confusion_matrix"][2]  # of owls
    options = ReportConfig(data=EvalDataConfig(root=str(tmp_path / "few")), out=str(tmp_path))
    assert evaluate_run(str(tmp_path / "run"), options)["accuracy"] == few["accuracy"]
    (root / "test" / "owl").rename(root / "test" / "emu")
    shutil.rmtree(root / "train")
    with pytest.raises(ValueError, match=r"^data\.root: .* does not know: emu;"):
        evaluate_run(str(tmp_path / "run"), ReportConfig(data=EvalDataConfig(root=str(root))))


def test_a_changed_folder_is_not_split_into_other_test_images(classes_only, tmp_path):
    train(config(classes_only, tmp_path / "run"))
    train(config(classes_only, tmp_path / "half", test_fraction=0.5))
    options = CompareConfig(others=(str(tmp_path / "half"),))
    with pytest.raises(ValueError, match=r"half/model\.safetensors .* another data\.test_fraction"):
        compare_runs(str(tmp_path / "run"), options)
    moved = classes_only.rename(tmp_path / "moved")
    there = ReportConfig(data=EvalDataConfig(root=str(moved)))
    assert evaluate_run(str(tmp_path / "run"), there)["n"] == 7
    one = next((moved / "c d").iterdir())
    shutil.copy(one, one.with_name("zz.png"))
    with pytest.raises(ValueError, match=r"was trained on other files than those in"):
        evaluate_run(str(tmp_path / "run"), there)


def test_a_folder_that_changes_during_training_is_not_tested(classes_only, tmp_path, monkeypatch):
    run = Loop.run

    def add_a_file(loop: Loop) -> None:
        run(loop)
        one = next((classes_only / "c d").iterdir())
        shutil.copy(one, one.with_name("zz.png"))

    monkeypatch.setattr(Loop, "run", add_a_file)
    with pytest.raises(ValueError, match=r"^data\.root: .* during training"):
        train(config(classes_only, tmp_path / "run"))
    (classes_only / "c d" / "zz.png").unlink()
    monkeypatch.undo()
    assert train(config(classes_only, tmp_path / "run"))["n"] == 7


def test_a_class_whose_name_is_not_utf_8_is_refused(tmp_path):
    draw_pictures(tmp_path, 4, ["a", "\udce4"])
    with pytest.raises(ValueError, match=r"class \\udce4 is not UTF-8; rename it"):
        list_folder(DataConfig(name="folder", root=str(tmp_path)), train=True)


def test_content_decides_what_is_an_image(root, capsys):
    """Saved under names that no list has, without a suffix, and beside what is no image."""
    names = {"a.jfif": "jpeg", "b": "png", "c.img": "webp", "d.JPE": "jpeg", "e.tga": "tga"}
    cat = root / "train" / "cat"
    for number, (name, form) in enumerate(names.items()):
        picture(100 + number).save(cat / name, form)
    (cat / "labels.csv").write_text("file,label\n")
    (cat / "half.jfif.part").write_bytes((cat / "a.jfif").read_bytes()[:3])
    (cat / "Thumbs.db").touch()
    (cat / "@eaDir/00.png").mkdir(parents=True)
    picture(150).save(cat / "@eaDir/00.png/thumb.png")
    picture(151).save(cat / "raw.NEF", "tiff")
    os.mkfifo(cat / "pipe")
    picture(200).save(root / "train" / "stray.png")
    for images in (load("folder", root, train=True), read(root, True)):
        found = sorted(Path(path).name for path in images.origins if Path(path).parent == cat)
        assert found == [*(f"{n:02d}.png" for n in range(0, 24, 3)), *sorted(names)]
    assert {*map(str, find_photos([str(cat)], "photos"))} == {str(cat / name) for name in found}
    what = "4 files ignored, not images: "
    assert capsys.readouterr().err.splitlines() == [
        f"{root}/train: {what}cat/half.jfif.part, cat/labels.csv, cat/pipe, cat/raw.NEF",
        f"{root}/train: 1 file ignored, not in a class folder: stray.png",
        f"{cat}: {what}half.jfif.part, labels.csv, pipe, raw.NEF",
    ]


@pytest.mark.parametrize("test", ["test", "evaluation"])
def test_a_folder_for_validation_beside_one_for_testing_is_held_out(root, test):
    places = [f"{part}/{name}/0.png" for part in ("train", "val", test) for name in "ab"]
    tree(root, *places, "train/a/1.png", "other/empty.txt")
    (root / "train/left.tar").touch()  # what was unpacked
    assert recognize(root) == "folder"
    training, held = split_training(DataConfig(name="folder", root=str(root)), seed=0)
    parts = [{Path(path).parts[-3] for path in images.origins} for images in (training, held)]
    assert (parts, len(training), len(held)) == ([{"train"}, {"val"}], 6, 4)
    assert {Path(path).parts[-3] for path in read(root, False).origins} == {test}


def test_an_empty_class_is_named_and_not_taken_for_cifar10(root):
    tree(root, "a/0.png", "b/0.png", "c/0.png", "d/notes.txt")
    (root / "c/0b.png").unlink()
    assert recognize(root) == "folder"
    words = r"class c has 1 image, class d has 0 images in .*; each class needs at least 2"
    with pytest.raises(ValueError, match=words):
        read(root, True)


def test_levels_that_a_file_of_12_bits_lacks_are_named(root, capsys):
    for name, top in (("12.png", 4000), ("16.png", 60_000)):
        Image.fromarray(np.linspace(0, top, 64).astype(np.uint16).reshape(8, 8)).save(root / name)
        file = ImageFiles((str(root / name),), Preprocess((8, 8), (0.5,), (0.5,)))
        _note_first(ImageSet(file, torch.zeros(1), ("a",), None, file.paths, str(root)))
    assert capsys.readouterr().err.count("is nearly black, with values up to 4,000 of 65,535") == 1
    dark = np.full((8, 8, 3), 15, np.uint8)  # what Pillow makes of RGB of 12 bits
    Image.fromarray(dark).save(root / "rgb.png")
    file = ImageFiles((str(root / "rgb.png"),), Preprocess((8, 8), (0.5,) * 3, (0.5,) * 3))
    _note_first(ImageSet(file, torch.zeros(1), ("a",), None, file.paths, str(root)))
    assert "rgb.png is nearly black, with values up to 15 of 255" in capsys.readouterr().err


def test_a_split_does_not_depend_on_which_files_can_be_read(root):
    def parts():
        split = split_training(folder(root, on_bad_image="skip"), seed=0)
        return [{*images.origins} for images in split]

    whole = parts()
    spoilt = [sorted(part)[0] for part in whole]
    for path in spoilt:
        Path(path).write_text(path)  # not the same, or they would be copies
    assert parts() == [part - {*spoilt} for part in whole]


def test_too_little_memory_is_no_broken_picture(root, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("vit.data.photos.bands_of", fail)
    with pytest.raises(MemoryError):
        load("folder", root, train=True, on_bad_image="skip")


def test_three_pages_are_not_taken_for_one_rgb_image(tmp_path, capsys):
    pages = [Image.new("L", (8, 8), value) for value in (10, 20, 30)]
    for number in range(20):
        file = tmp_path / "ab"[number % 2] / f"{number}.tif"
        file.parent.mkdir(exist_ok=True)
        pages[0].save(file, save_all=True, append_images=pages[1:])
    load_training(DataConfig(name="folder", root=str(tmp_path)), seed=0)
    assert "has 3 pages, of which the first is read; save them as one" in capsys.readouterr().err
