"""CSV tables of image files and their labels, one image per row."""

import csv
import os
from pathlib import Path

from vit.console import shorten
from vit.data.config import DataConfig
from vit.data.images import ImageSet, UserFile, user_files
from vit.data.layout import TESTS, TRAIN, join, listing, part_of
from vit.settings import expand

PATH, LABEL, SPLIT = "path", "label", "split"
ALSO = {
    "file": PATH, "filename": PATH, "image": PATH, "class": LABEL, "part": SPLIT, "subset": SPLIT,
}  # fmt: skip


def list_table(data: DataConfig, train: bool) -> ImageSet:
    """List the training or test images of a table, in its order.

    `data.root` is a CSV file with a header, in UTF-8, whose paths are relative to its folder.
    Validation images take the place of missing test images; beside test images, they are returned
    with the training images, as held out. Without a column "split", `data.test_fraction` splits the
    images. Class names are sorted, as numbers if all are whole numbers.

    Raises:
        ValueError: The table is missing or not of this form, a file is missing or listed twice; or
            as for `user_files`.
    """
    file = Path(data.root)
    rows = _read(file)
    labels = {label for label, _ in rows.values()}
    numeric = all(label.isdecimal() for label in labels)
    classes = sorted(labels, key=(lambda label: (int(label), label)) if numeric else None)
    parts = {part for _, part in rows.values()}
    split, test = parts <= {None}, next((name for name in TESTS if name in parts), "test")
    files = [
        UserFile(path, label, held=part not in (None, TRAIN, test))
        for path, (label, part) in rows.items()
        if split or (part != test) == train
    ]
    return user_files(data, train, split, file.parent, files, classes)


def _read(file: Path) -> dict[str, tuple[str, str | None]]:
    """Read and check a table; return the label of each file, and its split if it has the column."""
    if not file.is_file():
        raise ValueError(
            f"data.root: {file} is not a file ({listing(file)}); data.name=table needs a CSV file"
        )
    rows, seen = dict[str, tuple[str, str | None]](), set[str]()
    try:
        with file.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            delimiter = max(",;\t", key=stream.readline().count)  # Excel writes all of them
            stream.seek(0)
            reader = csv.DictReader(stream, delimiter=delimiter)
            names = [name.strip().lower() for name in reader.fieldnames or []]
            "".join(names).encode()  # raises if the table is not in UTF-8
            reader.fieldnames = columns = [ALSO.get(name, name) for name in names]
            for column in (PATH, LABEL, SPLIT):
                if columns.count(column) > 1:
                    same = " and ".join(n for n in names if ALSO.get(n, n) == column)
                    raise ValueError(
                        f"data.root: {file} has the columns {same}, which mean the same "
                        f"({column}); rename or delete all but one"
                    )
            if not {PATH, LABEL} <= {*columns}:
                raise ValueError(
                    f"data.root: {file} has the columns {join([*map(shorten, names)])}; expected "
                    f"are {PATH} (or file, filename or image), {LABEL} (or class) and, optionally, "
                    f"{SPLIT} (or part or subset)"
                )
            for record in reader:
                values = {name: (record[name] or "").strip() for name in columns}
                path = str(file.parent / expand(values[PATH]))
                shown = shorten(path, 300)
                target, split = os.path.abspath(path), values.get(SPLIT)  # noqa: PTH100 - keeps links
                part, missing = part_of(split or ""), not os.path.isfile(path)  # noqa: PTH113
                # Names of files may be any bytes.
                "".join(values[name] for name in values if name != PATH or missing).encode()
                unknown = split is not None and part is None
                problems = {
                    "more values than the header has columns": None in record,
                    "the label is empty": not values[LABEL],
                    f"{shown} is listed twice": target in seen,
                    f"{shown}: file not found; paths are relative to the table": missing,
                    f"split is {shorten(split)!r}; it must be train, val or test": unknown,
                }
                if wrong := [problem for problem, is_wrong in problems.items() if is_wrong]:
                    raise ValueError(f"data.root: {file}, line {reader.line_num}: {wrong[0]}")
                seen.add(target)
                rows[path] = values[LABEL], part
    except UnicodeError:
        raise ValueError(f"data.root: {file} is not in UTF-8; save it as UTF-8") from None
    except csv.Error as error:
        raise ValueError(f"data.root: {file} is not a CSV file ({error})") from None
    return rows
