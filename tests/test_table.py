"""Tables of image files: their splits, and mistakes in them."""

from pathlib import Path

import pytest
from PIL import Image

from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.table import list_table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty pictures: 0.png to 19.png in images/."""
    (tmp_path / "images").mkdir()
    for number in range(20):
        Image.new("RGB", (9, 8), (number * 12, 0, 0)).save(tmp_path / f"images/{number}.png")
    return tmp_path


def write(folder: Path, *lines: str) -> Path:
    file = folder / "table.csv"
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def read(file: Path, train: bool = True, test_fraction: float | None = None) -> ImageSet:
    return list_table(DataConfig(name="table", root=str(file), test_fraction=test_fraction), train)


def rows(labels: list[str], splits: list[str] | None = None) -> list[str]:
    ends = [f",{split}" for split in splits] if splits else [""] * len(labels)
    return [f"images/{n}.png,{label}{ends[n]}" for n, label in enumerate(labels)]


def numbers(source: ImageSet) -> list[int]:
    return [int(Path(path).stem) for path in source.images.paths]


def test_files_and_labels_are_those_of_the_rows(folder):
    labels, splits = ["b", "ä", "b", "ä", "b", "ä"], ["train"] * 4 + ["test"] * 2
    file = write(folder, "path,label,split", *rows(labels, splits))
    training, test = read(file), read(file, train=False)
    assert training.classes == test.classes == ("b", "ä")
    assert (numbers(training), training.labels.tolist()) == ([0, 1, 2, 3], [0, 1, 0, 1])
    assert (numbers(test), test.labels.tolist()) == ([4, 5], [0, 1])
    assert all(Path(path).is_file() for path in training.images.paths)


def test_columns_have_any_order_and_numbers_are_names_in_their_order(folder):
    lines = [f"{(1, 2, 10)[n % 3]},images/{n}.png" for n in range(6)]
    training = read(write(folder, "Label, path", *lines))
    assert len(training) == 3 and training.classes == ("1", "2", "10")


def test_without_a_split_a_fraction_of_each_class_is_for_testing(folder):
    file = write(folder, "path,label", *rows([*"aabbb"] * 4))
    for fraction, per_class in ((None, [2, 2]), (0.5, [4, 6]), (0.01, [1, 1]), (0.99, [7, 11])):
        training, test = read(file, True, fraction), read(file, False, fraction)
        assert sorted(numbers(training) + numbers(test)) == list(range(20))
        assert test.labels.bincount().tolist() == per_class
        assert numbers(read(file, False, fraction)) == numbers(test)


def test_validation_rows_are_for_testing_only_where_no_others_are(folder):
    splits = ["train"] * 4 + ["val"] * 2
    file = write(folder, "path,label,split", *rows([*"ab"] * 3, splits))
    assert (numbers(read(file)), numbers(read(file, train=False))) == ([0, 1, 2, 3], [4, 5])
    splits = ["train"] * 4 + ["valid"] * 2 + ["test"] * 2
    file = write(folder, "path,label,split", *rows([*"ab"] * 4, splits))
    assert (numbers(read(file)), numbers(read(file, train=False))) == ([0, 1, 2, 3], [6, 7])


WRONG = {
    "no header": (["images/0.png,a", "images/1.png,b"], "line 2: found the columns images/0.png"),
    "no label": (["path,split", "images/0.png,train"], "line 2: found the columns path, split;"),
    "no rows": (["path,label"], "has no rows; it needs columns path"),
    "too many values": (["path,label", "a,b,c"], "line 2: more values than the header has columns"),
    "too few values": (["path,label", "images/0.png,a", "b"], "line 3: the label is empty"),
    "missing files": (
        ["path,label", "images/0.png,a", "images/90.png,b", "images/91.png,b"],
        "line 3: ROOT/images/90.png: file not found (and 1 more of 3); paths are relative to ROOT",
    ),
    "unknown split": (
        ["path,label,split", "images/0.png,a,training"],
        "line 2: split is 'training'; it must be train, val or test",
    ),
    "empty split": (
        ["path,label,split", "images/0.png,a,train", "images/1.png,b,"],
        "line 3: split is empty here, but not in other rows",
    ),
    "twice": (
        ["path,label", "images/0.png,a", "images/1.png,b", "images/0.png,b"],
        "line 4: ROOT/images/0.png is already in line 2, as a; keep one",
    ),
    "no test images": (
        ["path,label,split", *rows([*"ab"], ["train"] * 2)],
        "has no rows with split test; add some, or delete the column split",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_one_line_with_file_and_line(folder, case):
    lines, words = WRONG[case]
    file = write(folder, *lines)
    with pytest.raises(ValueError) as info:
        assert read(file) and read(file, train=False)
    message = str(info.value)
    assert message.startswith("data.root: ") and "\n" not in message
    assert words.replace("ROOT", str(folder)) in message


def test_a_table_that_is_no_text_or_is_missing(folder):
    with pytest.raises(ValueError, match=r"is not UTF-8 text"):
        read(folder / "images" / "0.png")
    with pytest.raises(ValueError, match=r"is not a file \(it contains images\); data\.name=table"):
        read(folder)
