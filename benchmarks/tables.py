"""Markdown tables, and how a few measured values are written in them."""

import statistics
from collections.abc import Iterable, Sequence

import torch

from vit.intervals import mean_interval


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plus_minus(mean: float, half: float, form: str = ".3f") -> str:
    """Format a mean and half the width of its interval, as in "0.125 ± 0.004"."""
    return f"{mean:{form}} ± {half:{form.removeprefix('+')}}"


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Format the median of some values, with the lowest and the highest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def mean_of_runs(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of a few values and half the width of its 95% t interval.

    The interval of a single value is NaN.
    """
    return mean_interval(torch.tensor(values, dtype=torch.float64))
