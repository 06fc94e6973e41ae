"""Tables of image files and their labels: CSV or JSONL, one image per row."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vit.data.config import DataConfig
from vit.data.layout import TEST, TRAIN, VALIDATION, content, report_unused, some
from vit.data.source import Source, files_of_part, list_files, require_classes, split_files
from vit.settings import shorten

PATH_NAMES, LABEL_NAMES, SPLIT = ("path", "file", "filename", "image"), ("label", "class"), "split"
EXPECTED = (
    f"columns path (or {', '.join(PATH_NAMES[1:])}), label (or {', '.join(LABEL_NAMES[1:])}) and, "
    f"optionally, {SPLIT} ({TRAIN}, {VALIDATION[0]} or {TEST})"
)


@dataclass(frozen=True)
class _Row:
    """One image: where it is listed, its file, its class, and its part or None."""

    line: int
    path: Path
    label: str
    split: str | None


def list_table(data: DataConfig, train: bool) -> Source:
    """List the training or test images of a table.

    Args:
        data: `data.root` is a CSV file with a header, or a JSONL file with an object per line, in
            UTF-8. Paths are relative to its folder. Images for validation are the test images
            where no others are named, and are left out otherwise. Without a column "split",
            `data.test_fraction` splits the images.
        train: Whether to list the training images rather than the test images.

    Returns:
        The files in the order of the table. Class names are sorted, as numbers if they all are
        whole numbers.

    Raises:
        ValueError: The table is missing or not of this form, a file is missing or listed twice, a
            class has no images in one of the parts, or test_fraction is given although the table
            has a column "split".
    """
    file = Path(data.root).expanduser()
    rows = _read(file)
    _check_paths(file, rows)
    classes = _sorted({row.label for row in rows})
    require_classes(file, classes)
    numbers = {name: label for label, name in enumerate(classes)}
    labels = torch.tensor([numbers[row.label] for row in rows])
    paths = [row.path for row in rows]
    if rows[0].split is None:
        _require(file, rows, classes, least=2, part="table")
        listed = list_files(file.parent, paths, labels)
        return split_files(paths, labels, classes, listed, train, data.test_fraction)
    if data.test_fraction is not None:
        raise ValueError(
            f"data.test_fraction: {data.test_fraction} is not allowed; it must be null, because "
            f"{file} has a column {SPLIT}"
        )
    parts = _parts(file, rows, classes, train)
    unused = sum(row.split not in parts for row in rows)
    if train and unused:
        report_unused(f"{unused:,} rows of {file} with {SPLIT} {VALIDATION[0]}")
    chosen = [n for n, row in enumerate(rows) if row.split == parts[0 if train else 1]]
    paths, labels = [paths[n] for n in chosen], labels[chosen]
    return files_of_part(paths, labels, classes, list_files(file.parent, paths, labels))


def _read(file: Path) -> list[_Row]:
    """Read a table and check each row by itself."""
    if not file.is_file():
        raise ValueError(
            f"data.root: {file} is not a file ({content(file)}); data.name=table needs a CSV or "
            f"JSONL file with {EXPECTED}"
        )
    records = _json_records if file.suffix.lower() == ".jsonl" else _csv_records
    try:
        rows = [_row(file, line, record) for line, record in records(file)]
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.root: {file} is not UTF-8 text ({error}); save it as UTF-8"
        ) from None
    if not rows:
        raise ValueError(f"data.root: {file} has no rows; it needs {EXPECTED}")
    if len({row.split is None for row in rows}) == 2:
        line = next(row.line for row in rows if row.split is None)
        raise _problem(file, line, f"{SPLIT} is empty here, but not in other rows")
    return rows


def _csv_records(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a CSV file with their line numbers, keys in lower case."""
    with file.open(encoding="utf-8-sig", newline="") as stream:
        reader = csv.reader(stream)
        try:
            header = [name.strip().lower() for name in next(reader, [])]
            if len(header) == 1:
                what = f"a single column, {shorten(header[0])!r}; separate {EXPECTED} by commas"
                raise _problem(file, reader.line_num, what)
            for values in reader:
                if not values:  # an empty line
                    continue
                if len(values) != len(header):
                    what = f"{len(values)} values, but the header has {len(header)}"
                    raise _problem(file, reader.line_num, what)
                yield reader.line_num, dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise _problem(file, reader.line_num, str(error)) from None


def _json_records(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the objects of a JSONL file with their line numbers, keys in lower case."""
    with file.open(encoding="utf-8-sig") as stream:
        for line, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                values = json.loads(text)
            except json.JSONDecodeError as error:
                raise _problem(file, line, f"not JSON ({error})") from None
            if not isinstance(values, dict):
                raise _problem(file, line, f"not an object with {EXPECTED}")
            for key, value in values.items():
                if key.lower() in (*PATH_NAMES, *LABEL_NAMES, SPLIT) and type(value) not in (
                    str, int, type(None),
                ):  # fmt: skip
                    raise _problem(file, line, f"{key} is {shorten(value)!r}, not text")
            yield (
                line,
                {key.lower(): "" if value is None else str(value) for key, value in values.items()},
            )


def _row(file: Path, line: int, record: dict[str, str]) -> _Row:
    paths, labels = (
        [record[name].strip() for name in names if name in record]
        for names in (PATH_NAMES, LABEL_NAMES)
    )
    if len(paths) != 1 or len(labels) != 1:
        found = some([shorten(name) for name in record])
        raise _problem(file, line, f"found the columns {found}; expected are {EXPECTED}")
    for name, (value,) in (("path", paths), ("label", labels)):
        if not value:
            raise _problem(file, line, f"the {name} is empty")
    split = record.get(SPLIT, "").strip().lower() or None
    if split is not None and split not in (TRAIN, TEST, *VALIDATION):
        what = f"{SPLIT} is {shorten(split)!r}; it must be {TRAIN}, {VALIDATION[0]} or {TEST}"
        raise _problem(file, line, what)
    if split in VALIDATION:
        split = VALIDATION[0]
    return _Row(line, file.parent / Path(paths[0]).expanduser(), labels[0], split)


def _check_paths(file: Path, rows: list[_Row]) -> None:
    """Check that every file exists and is listed once."""
    first: dict[Path, _Row] = {}
    for row in rows:
        earlier = first.setdefault(row.path, row)
        if earlier.label != row.label:
            what = f"is {shorten(row.label)} here, but {shorten(earlier.label)} in line"
            raise _problem(file, row.line, f"{row.path} {what} {earlier.line}; keep one")
        if earlier is not row:
            raise _problem(file, row.line, f"{row.path} is already in line {earlier.line}")
    missing = [row for row in rows if not row.path.is_file()]
    if missing:
        more = f" (and {len(missing) - 1:,} more of {len(rows):,})" if len(missing) > 1 else ""
        what = f"{missing[0].path}: file not found{more}; paths are relative to {file.parent}"
        raise _problem(file, missing[0].line, what)


def _parts(file: Path, rows: list[_Row], classes: tuple[str, ...], train: bool) -> tuple[str, str]:
    """Return the words for training and test images in the column "split"."""
    splits = {row.split for row in rows}
    test = TEST if TEST in splits else VALIDATION[0]
    if test not in splits:
        raise ValueError(
            f"data.root: {file} has no rows with {SPLIT} {TEST} or {VALIDATION[0]}; add some, or "
            f"delete the column {SPLIT} to use data.test_fraction"
        )
    if splits != {test}:  # test images alone can be evaluated
        trained = {row.label for row in rows if row.split == TRAIN}
        for row in rows:
            if row.label not in trained:
                what = f"no training image has the label {shorten(row.label)}"
                raise _problem(file, row.line, f"{what}; those known are {some(_sorted(trained))}")
    elif train:
        raise ValueError(
            f"data.root: {file} has no rows with {SPLIT} {TRAIN}; add some to train on"
        )
    tested = [row for row in rows if row.split == test]
    _require(file, tested, classes, least=1, part=f"{SPLIT} {test}")
    return TRAIN, test


def _require(file: Path, rows: list[_Row], classes: tuple[str, ...], least: int, part: str) -> None:
    """Check that every class has enough images."""
    counts = dict.fromkeys(classes, 0)
    for row in rows:
        counts[row.label] += 1
    for name, count in counts.items():
        if count < least:
            raise ValueError(
                f"data.root: {file}: class {shorten(name)} has {count} images in {part}, and needs "
                f"at least {least}; add some, or delete the class"
            )


def _sorted(labels: set[str]) -> tuple[str, ...]:
    """Sort class names, as numbers if they all are whole numbers."""
    numeric = all(label.isdecimal() for label in labels)
    return tuple(sorted(labels, key=(lambda label: (int(label), label)) if numeric else None))


def _problem(file: Path, line: int, what: str) -> ValueError:
    return ValueError(f"data.root: {file}, line {line}: {what}")
