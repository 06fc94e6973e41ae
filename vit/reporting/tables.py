"""Parts of the report, and tables as text, which all commands print."""

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from pydantic import Field, create_model

from vit.console import printable, shorten
from vit.files import require_file
from vit.settings import Between0And1, parse

LONGEST_NAME = 40  # characters of a class name in a table
TOP = 5  # classes per row of predictions

Number: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


def _measures(*names: str, kind: Any = Number) -> dict[str, Any]:
    """Return fields of a pydantic model: measures, and their intervals, which old files lack."""
    intervals = {f"{name}_95": (tuple[Number, Number] | None, None) for name in names}
    return dict.fromkeys(names, (kind, ...)) | intervals


Row: Any = create_model("Row", n=(int, ...), **_measures("recall", "precision", kind=Number | None))
Probabilities: Any = create_model(
    "Probabilities", temperature=(Number, ...), **_measures("loss", "ece")
)
Source: Any = create_model("Source", own=(bool, ...))
# The fields that are read from report.json again.
StoredReport = create_model(
    "StoredReport",
    n=(int, ...),
    images_per_second=(Number, ...),
    per_class=(Annotated[dict[str, Row], Field(min_length=2)], ...),
    confusion_matrix=(list[list[int]] | None, ...),
    calibration=(dict[str, Probabilities] | None, None),
    flip=(bool, False),
    weights=(str, ""),
    source=(Source | None, None),
    **_measures("accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1"),
)

Sets: Any = create_model("Sets", coverage=(Between0And1 | None, None))
# What the next report keeps if the model and the images, see `digest`, are the same.
StoredParts = create_model(
    "StoredParts", digest=(str, ""), weights=(str, ""), sets=(Sets | None, None),
    unfamiliar=(Any, None), corruptions=(Any, None), training=(Any, None),
)  # fmt: skip


def read_report(file: Path) -> dict[str, Any]:
    """Read the fields of report.json that are shown again; errors as for `vit.settings.parse`."""
    report: dict[str, Any] = parse(StoredReport, require_file(file).read_bytes(), file).model_dump()
    size, matrix = len(report["per_class"]), report["confusion_matrix"]
    if matrix is not None and [len(row) for row in matrix] != [size] * size:
        raise ValueError(f"{file}: confusion_matrix must have {size} rows and {size} columns")
    return report


class Part(NamedTuple):
    """An optional part of the report."""

    name: str  # its key in report.json
    numbers: dict[str, Any]
    table: str
    pictures: dict[str, np.ndarray]  # by file name without its suffix, (height, width, 3) uint8
    scalars: dict[str, float]  # by TensorBoard's tag below test/


def text_table(rows: Sequence[Sequence[str]], separator: str = "   ") -> list[str]:
    """Return a line for each row: the first column is aligned left, the others right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(_columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        spaces = [" " * (width - _columns(cell)) for cell, width in zip(row, widths, strict=True)]
        numbers = [space + cell for cell, space in zip(row[1:], spaces[1:], strict=True)]
        lines.append(separator.join([row[0] + spaces[0], *numbers]))
    return lines


def columns_of(best: str, ranking: dict[str, float]) -> dict[str, Any]:
    """Return the columns `best` and probability, then class_1, probability_1, class_2 and so on."""
    row = dict(zip((best, "probability"), next(iter(ranking.items())), strict=True))
    for rank, (name, probability) in enumerate(ranking.items(), start=1):
        row |= {f"class_{rank}": name, f"probability_{rank}": probability}
    return row


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, of which the first is the head, as a table in Markdown."""
    head, *others = [list(map(markdown, row)) for row in rows]
    lines = text_table([head, ["---"] * len(head), *others], " | ")
    return "\n".join(f"| {line} |" for line in lines)


def markdown(text: object) -> str:
    """Return text as one line that Markdown shows unchanged, wherever it comes from."""
    within_word = r"(?<=[^\W_])_(?=[^\W_])"  # where an underscore means nothing
    special = rf"(?!{within_word})[\\`*_\[\]<>|~&$#!@]|:(?=//)|(?<=www)\."
    return re.sub(special, lambda match: f"&#{ord(match[0])};", printable(text))


def _columns(cell: str) -> int:
    """Return how many columns of a terminal a text takes; East Asian letters take two."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in cell)
    return len(cell) + wide - sum(map(bool, map(unicodedata.combining, cell)))


def with_interval(row: dict[str, Any], key: str, form: str) -> str:
    """Format a value, or None, and its 95% interval, if any, such as `loss` and `loss_95`."""
    value, interval = row[key], row.get(f"{key}_95")
    text = "–" if value is None else f"{value:{form}}"
    return f"{text} ({interval[0]:{form}} to {interval[1]:{form}})" if interval else text


def metrics_table(result: dict[str, Any]) -> str:
    """Format the result of `vit.evaluation.evaluate` as text: overall, then a row per class."""
    names = [shorten(name, LONGEST_NAME) for name in result["per_class"]]
    lines = [
        f"accuracy          {with_interval(result, 'accuracy', '.2%')}, {result['n']:,} images",
        f"top-5 accuracy    {with_interval(result, 'top5_accuracy', '.2%')}",
        f"mean recall       {with_interval(result, 'balanced_accuracy', '.2%')}, balanced accuracy",
        f"mean F1 score     {with_interval(result, 'macro_f1', '.4f')}, macro F1",
        f"speed             {result['images_per_second']:,.0f} images/s, slow start included",
    ]
    if len(names) <= 5:
        del lines[1]  # it is always 100%
    rows = [["class", "recall", "precision", "images"]]
    for name, values in zip(names, result["per_class"].values(), strict=True):
        cells = [with_interval(values, key, ".1%") for key in rows[0][1:3]]
        rows.append([name, *cells, f"{values['n']:,}"])
    if (confusion := result["confusion_matrix"]) is not None:
        rows[0].append("most often confused with")
        for label, counts in enumerate(confusion):
            count, worst = max((n, c) for c, n in enumerate(counts) if c != label)
            rows[label + 1].append(f"{names[worst]} ({count})" if count else "–")
    return "\n".join([*lines, "", *text_table(rows)])
