"""CSV tables of image files and their labels, one image per row."""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch

from vit.data.config import DataConfig
from vit.data.images import ImageSet, user_files
from vit.data.layout import TEST, TRAIN, VALIDATION, content, some
from vit.settings import shorten

PATH, LABEL, SPLIT = "path", "label", "split"
EXPECTED = f"columns {PATH}, {LABEL} and, optionally, {SPLIT} ({TRAIN}, {VALIDATION[0]} or {TEST})"


@dataclass(frozen=True)
class _Row:
    """One image: where it is listed, its file, its class, and its part or None."""

    line: int
    path: Path
    label: str
    split: str | None


def list_table(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of a table, in its order.

    Class names are sorted, as numbers if they all are whole numbers.

    Args:
        data: `data.root` is a CSV file with a header, in UTF-8. Paths are relative to its folder.
            Images for validation are the test images where no others are named, and are left out
            otherwise. Without a column "split", `data.test_fraction` splits the images.
        train: Whether to list the training images rather than the test images.

    Raises:
        ValueError: The table is missing or not of this form, a file is missing or listed twice, a
            class has no images in one of the parts, or test_fraction is given although the table
            has a column "split".
    """
    file = Path(data.root).expanduser()
    rows = _read(file)
    _check_paths(file, rows)
    labels = {row.label for row in rows}
    numeric = all(label.isdecimal() for label in labels)
    classes = sorted(labels, key=(lambda label: (int(label), label)) if numeric else None)
    parts = _find_parts(file, rows, train)
    chosen = parts[0 if train else -1]
    numbers = {label: number for number, label in enumerate(classes)}
    targets = torch.tensor([numbers[row.label] for row in chosen])
    paths = [str(row.path) for row in chosen]
    return user_files(data, train, len(parts) == 1, file.parent, paths, targets, classes)


def _read(file: Path) -> list[_Row]:
    """Read a table and check each row by itself."""
    if not file.is_file():
        raise ValueError(
            f"data.root: {file} is not a file ({content(file)}); data.name=table needs a CSV file "
            f"with {EXPECTED}"
        )
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            rows = [_row(file, reader.line_num, record) for record in reader]
    except UnicodeDecodeError as error:
        raise ValueError(f"data.root: {file} is not UTF-8 text ({error})") from None
    except csv.Error as error:
        raise ValueError(f"data.root: {file} is not a CSV file ({error})") from None
    if not rows:
        raise ValueError(f"data.root: {file} has no rows; it needs {EXPECTED}")
    if len({row.split is None for row in rows}) == 2:
        line = next(row.line for row in rows if row.split is None)
        raise _problem(file, line, f"{SPLIT} is empty here, but not in other rows")
    return rows


def _row(file: Path, line: int, record: dict[str, str]) -> _Row:
    """Check a row as `csv.DictReader` returns it: missing values are None."""
    if None in record:
        raise _problem(file, line, "more values than the header has columns")
    record = {key.strip().lower(): (value or "").strip() for key, value in record.items()}
    if PATH not in record or LABEL not in record:
        columns = some([shorten(name) for name in record])
        raise _problem(file, line, f"found the columns {columns}; expected are {EXPECTED}")
    for name in (PATH, LABEL):
        if not record[name]:
            raise _problem(file, line, f"the {name} is empty")
    split = record.get(SPLIT, "").lower()
    if split not in ("", TRAIN, TEST, *VALIDATION):
        what = f"{SPLIT} is {shorten(split)!r}; it must be {TRAIN}, {VALIDATION[0]} or {TEST}"
        raise _problem(file, line, what)
    split = VALIDATION[0] if split in VALIDATION else split
    return _Row(line, file.parent / Path(record[PATH]).expanduser(), record[LABEL], split or None)


def _check_paths(file: Path, rows: list[_Row]) -> None:
    """Check that every file exists and is listed once."""
    first: dict[Path, _Row] = {}
    for row in rows:
        earlier = first.setdefault(row.path, row)
        if earlier is not row:
            what = f"{row.path} is already in line {earlier.line}"
            raise _problem(file, row.line, f"{what}, as {shorten(earlier.label)}; keep one")
    missing = [row for row in rows if not row.path.is_file()]
    if missing:
        more = f" (and {len(missing) - 1:,} more of {len(rows):,})" if len(missing) > 1 else ""
        what = f"{missing[0].path}: file not found{more}; paths are relative to {file.parent}"
        raise _problem(file, missing[0].line, what)


def _find_parts(file: Path, rows: list[_Row], train: bool) -> list[list[_Row]]:
    """Return the rows of the training and of the test images, or all rows, to be split."""
    if rows[0].split is None:
        return [rows]
    training, test, validation = (
        [row for row in rows if row.split == name] for name in (TRAIN, TEST, VALIDATION[0])
    )
    parts = {TRAIN: training, TEST: test or validation}
    for name in (TEST, TRAIN) if train else (TEST,):  # test images alone can be evaluated
        if not parts[name]:
            raise ValueError(
                f"data.root: {file} has no rows with {SPLIT} {name}; add some, or delete the "
                f"column {SPLIT} to use data.test_fraction"
            )
    return [*parts.values()]


def _problem(file: Path, line: int, what: str) -> ValueError:
    return ValueError(f"data.root: {file}, line {line}: {what}")
