"""Parts of the report, and tables as text, which all commands print."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vit.evaluation import text_columns


@dataclass(frozen=True)
class Part:
    """An optional part of the report.

    Attributes:
        name: Its key in report.json.
        numbers: What report.json says.
        table: The same as text.
        pictures: By file name without its suffix, (height, width, 3) uint8.
        scalars: For TensorBoard, by tag below test/.
    """

    name: str
    numbers: dict[str, Any]
    table: str
    pictures: dict[str, np.ndarray]
    scalars: dict[str, float] = field(default_factory=dict)


def text_table(rows: Sequence[Sequence[str]], separator: str = "   ") -> list[str]:
    """Align cells in columns, the first to the left and the others to the right.

    Args:
        rows: The cells; all rows have as many.
        separator: Text between two columns.

    Returns:
        A line for each row.
    """
    widths = [max(map(text_columns, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        spaces = [
            " " * (width - text_columns(cell)) for cell, width in zip(row, widths, strict=True)
        ]
        numbers = [space + cell for cell, space in zip(row[1:], spaces[1:], strict=True)]
        lines.append(separator.join([row[0] + spaces[0], *numbers]))
    return lines


def with_interval(row: dict[str, Any], key: str, form: str) -> str:
    """Format a value and its 95% interval, such as `loss` and `loss_95`, with a format code."""
    low, high = row[f"{key}_95"]
    return f"{row[key]:{form}} ({low:{form}} to {high:{form}})"
