"""The exercises can be solved, and what they say of wrong solutions is what the doctor says."""

from pathlib import Path
from typing import Any

import pytest

from vit.attention_check.watch import Row
from vit.commands.check import check
from vit.model.definitions import read_definitions

FOLDER = Path(__file__).resolve().parent.parent / "docs/exercises"
TEXT = (FOLDER.parent / "exercises.md").read_text(encoding="utf-8").replace("\n", " ")
ATTENTION = """
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (query, key, value)
        )
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        heads = (self.dropout(weights) @ value).transpose(1, 2).flatten(2)
        return self.out(heads), weights
"""
RELATIVE_BIAS = """
        rows, columns = grid
        place = torch.arange(rows * columns)
        down, across = (x[:, None] - x for x in (place // columns, place % columns))
        middle = [size // 2 for size in self.table.shape[1:]]
        bias = self.table[:, down + middle[0], across + middle[1]]
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5 + bias
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        weights = scores.softmax(dim=-1)
        return dropout(weights) @ value, weights
"""
CAUSAL = """
import vit

def causal(query, key, value, mask, dropout):
    before = vit.causal_mask(query.shape[-2], query.device)
    mask = before if mask is None else mask & before
    return vit.scaled_dot_product_attention(query, key, value, mask, dropout)
"""


def solve(file: str, body: str, changes: tuple[str, str] = ("", "")) -> str:
    """Replace the last line of a template."""
    template = (FOLDER / file).read_text(encoding="utf-8")
    unsolved = template.index("        raise NotImplementedError(")
    return (template[:unsolved] + body.lstrip("\n")).replace(*changes)


def check_source(source: str, name: str, folder: Path) -> dict[str, Row]:
    file = folder / "solution.py"
    file.write_text(source, encoding="utf-8")
    attention: Any = getattr(read_definitions(file), name)
    return {row.property: row for row in check(attention, with_cost=False)}


@pytest.mark.parametrize(
    ("file", "name", "body"),
    [("mine.py", "Attention", ATTENTION), ("relative_bias.py", "RelativeBias", RELATIVE_BIAS)],
)
def test_templates_ask_for_what_is_missing_and_solutions_pass(file, name, body, tmp_path):
    (row,) = check_source((FOLDER / file).read_text(encoding="utf-8"), name, tmp_path).values()
    assert "NotImplementedError" in row.advice and "return" in row.advice
    rows = check_source(solve(file, body), name, tmp_path)
    assert {row.result for row in rows.values()} == {"passed"}
    assert "equals torch's attention" in rows


def test_wrong_solutions_are_marked_as_the_page_says(tmp_path):
    unscaled = solve("mine.py", ATTENTION, (" / query.shape[-1] ** 0.5", ""))
    queries = solve("mine.py", ATTENTION, ("dim=-1", "dim=-2"))
    scale, rows, order = "scores are divided by √d", "rows of weights sum to 1", "permuting tokens"
    for source, name, property, result, words in (
        (unscaled, "Attention", scale, "remark", "divided by 1.00, so not at all"),
        (queries, "Attention", rows, "failed", "softmax runs over the queries"),
        (queries, "Attention", "mask", "failed", ""),
        (CAUSAL, "causal", f"{order} permutes outputs", "remark", ""),
        (CAUSAL, "causal", "mask", "passed", ""),
    ):
        row = check_source(source, name, tmp_path)[property]
        assert row.result == result and words in f"{row.number}{row.advice}" and words in TEXT
