"""Tables of image files: their splits, and mistakes in them."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from small_runs import draw_pictures
from vit.config import Config
from vit.data.config import DataConfig
from vit.data.datasets import split_training
from vit.data.folder import list_folder
from vit.data.images import ImageSet
from vit.data.layout import recognize
from vit.data.table import list_table
from vit.run.folder import write_split


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files 0.png to 19.png in images/, which are listed, not read."""
    (tmp_path / "images").mkdir()
    for number in range(20):
        (tmp_path / f"images/{number}.png").touch()
    return tmp_path


def write(folder: Path, *lines: str) -> Path:
    file = folder / "table.csv"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def read(file: Path, train: bool = True) -> ImageSet:
    return list_table(DataConfig(name="table", root=str(file)), train)


def rows(labels: Sequence[str], splits: list[str] | None = None) -> list[str]:
    ends = [f",{split}" for split in splits] if splits else [""] * len(labels)
    return [f"images/{n}.png,{label}{ends[n]}" for n, label in enumerate(labels)]


def numbers(source: ImageSet) -> list[int]:
    return [int(Path(path).stem) for path in source.images.paths]


@pytest.mark.parametrize("last", ["test", "val", "valid", "Testing", " TEST_set"])
def test_files_and_labels_are_those_of_the_rows(folder, last):
    """Images for validation are for testing only where no others are; else they are held out."""
    table = rows(
        "bäbäbäbä", ["train", "Train", "training", "TRAIN"] + ["validation"] * 2 + [last] * 2
    )
    file = write(folder, "path,label,split", *table)
    training, test = read(file), read(file, train=False)
    assert training.classes == test.classes == ("b", "ä")
    assert (numbers(training), training.labels.tolist()) == ([*range(6)], [0, 1] * 3)
    assert training.held.tolist() == [False] * 4 + [True] * 2 and test.held is None
    data = DataConfig(name="table", root=str(file))
    parts = map(numbers, split_training(data, seed=0))
    assert [*map(sorted, parts)] == [[0, 1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match=r"data.val_size: 0.3 is not allowed; it must be null"):
        split_training(replace(data, val_size=0.3), seed=0)
    assert (numbers(test), test.labels.tolist()) == ([6, 7], [0, 1])
    assert all(Path(path).is_file() for path in training.images.paths)


def test_columns_have_any_order_and_numbers_are_names_in_their_order(folder):
    lines = [f"{(1, 2, 10)[n % 3]},images/{n}.png" for n in range(6)]
    training = read(write(folder, "Label, path", *lines))
    assert len(training) == 3 and training.classes == ("1", "2", "10")


def test_classes_that_differ_in_case_are_named(folder, capsys):
    assert len(read(write(folder, "path,label", *rows(["cat", "Cat"] * 4))).classes) == 2
    assert "the classes Cat and cat differ in case only" in capsys.readouterr().err


def test_usual_column_names_and_separators_are_accepted(folder):
    table = rows("abab", ["train", "train", "test", "test"])
    usual = read(write(folder, "path,label,split", *table))
    headers = (
        "file,Label,Part",
        "Filename,Label,subset",
        "IMAGE,label,split",
        "\ufeffpath,label,split",
    )
    for header, mark in itertools.product(headers, ",;\t"):
        other = read(write(folder, *(line.replace(",", mark) for line in (header, *table))))
        assert numbers(usual) == numbers(other) == [0, 1] and usual.fingerprint == other.fingerprint


def test_a_link_to_another_row_is_an_image_as_in_a_folder(folder):
    (folder / "link").symlink_to(folder / "images")
    table = ["images/0.png,a,train", "link/0.png,a,train", "images/1.png,b,train"]
    assert len(read(write(folder, "path,class,split", *table))) == 3


def test_split_of_a_run_is_a_table_with_the_same_test_images(tmp_path):
    data = DataConfig(name="folder", root=str(draw_pictures(tmp_path / "in", 30)))
    (tmp_path / "in/a/0.png").rename(tmp_path / "in/a/\udce4.png")  # not UTF-8
    write_split(Config(data=data, out=str(tmp_path)), *split_training(data, seed=0))
    table = (tmp_path / "split.csv").rename(tmp_path / "in/split.csv")
    assert recognize(table) == "table"
    expected, found = list_folder(data, train=False), read(table, train=False)
    assert {*found.images.paths} == {*expected.images.paths} and found.classes == ("a", "b")
    again = split_training(DataConfig(name="table", root=str(table)), seed=1)
    for part, before in zip(again, split_training(data, seed=0), strict=True):
        assert {*part.images.paths} == {*before.images.paths}


WRONG = [
    (["images/0.png,a", "images/1.png,b"], "has the columns images/0.png, a"),
    (["path,label"], "has 0 classes (); a classifier needs at least two"),
    (["path,label", "images/0.png,a,b"], "line 2: more values than the header"),
    (["path,label", "images/0.png,a", "b"], "line 3: the label is empty"),
    (["path,label", "images/0.png,a", "images/90.png,b"], "line 3: ROOT/images/90.png: file"),
    (["file,label,path", "images/0.png,a,images/0.png"], "columns file and path, which mean"),
    (["path,part,label,Subset", "images/0.png,train,a,train"], "columns part and subset"),
    (["path,label,split", *rows("a", ["train"]), "images/1.png,b,"], "line 3: split is ''; it"),
    (["path,label", *rows("ab"), "images/0.png,b"], "line 4: ROOT/images/0.png is listed twice"),
    (["path,label,split", *rows("a", ["train"]), "images/./0.png,a,test"], "0.png is listed twice"),
    (["path,label", *rows(["caf\u00e9"] * 2 + ["cafe\u0301"] * 2)], "two classes in ROOT are"),
    (["path,label,split", *rows("ab", ["train"] * 2)], "class a has 0 test images, class b has 0"),
    (["path,label", "\udcff"], "is not in UTF-8; save it"),
    (["path,label", "images/0.png,\udcff"], "is not in UTF-8; save it"),
    (["path,label\udcff", *rows("ab")], "is not in UTF-8; save it"),
]


@pytest.mark.parametrize(("lines", "words"), WRONG)
def test_a_mistake_is_one_line_with_file_and_line(folder, lines, words):
    file = folder / "table.csv"
    file.write_text("\n".join(lines), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ValueError) as info:
        assert read(file) and read(file, train=False)
    message = str(info.value)
    assert message.startswith("data.root: ") and "\n" not in message
    assert words.replace("ROOT", str(folder)) in message


def test_a_missing_table_is_refused(folder):
    with pytest.raises(ValueError, match=r"is not a file \(it contains images\); data\.name=table"):
        read(folder)
