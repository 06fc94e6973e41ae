"""95% confidence intervals and tests for means, proportions and anything that can be resampled.

SciPy has some of them, but is an optional dependency.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.seeding import generator

Z = 1.959964  # a normal variable is within ± Z with a probability of 95%
RESAMPLES = 1000  # of the bootstrap


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return the mean of values (N,) and half its 95% interval (Student), NaN for one value."""
    values = values.cpu().double()
    mean = values.mean().item()
    if len(values) < 2:
        return mean, math.nan
    interval = student("mean", values)[0]["mean_95"]
    return mean, 0.0 if interval is None else interval[1] - mean


def fraction(name: str, part: int, total: int) -> dict[str, Any]:
    """Return a fraction and its 95% interval by name; None if there is nothing to divide by."""
    if not total:
        return {name: None, f"{name}_95": None}
    return {name: part / total, f"{name}_95": wilson_interval(part, total)}


def average(name: str, values: Tensor) -> dict[str, Any]:
    """Return the mean of values (N,) and its 95% interval (Student), None for N = 1, by name."""
    mean, half = mean_interval(values)
    return {name: mean, f"{name}_95": (mean - half, mean + half) if len(values) > 1 else None}


def wilson_interval(hits: float, count: float) -> tuple[float, float]:
    """Return the 95% confidence interval of a proportion (Wilson 1927, without correction)."""
    rate = hits / count
    centre = rate + Z * Z / (2 * count)
    spread = Z * math.sqrt(rate * (1 - rate) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    low, high = (centre - spread) / scale, (centre + spread) / scale
    # The proportion stays inside despite rounding.
    return max(0.0, min(low, rate)), min(1.0, max(high, rate))


def interval_of_mean(mean: float, error: float, count: int) -> tuple[float, float]:
    """Return the 95% interval of a mean of fractions of `count` images with a standard error.

    Wilson interval at the effective sample size: it stays within 0 to 1, and has a width even if
    the error of a sample is 0.
    """
    effective = mean * (1 - mean) / error**2 if error > 1e-9 else count
    return wilson_interval(mean * effective, effective)


def bootstrap(measure: Callable[..., Tensor], *sizes: int) -> Tensor:
    """Return 95% intervals (K, 2) of K statistics of weights (N,) for each group of N images."""
    random, samples = generator(0, "bootstrap"), []
    for _ in range(RESAMPLES):
        drawn = [torch.randint(size, (size,), generator=random) for size in sizes]
        samples.append(measure(*(part.bincount(minlength=len(part)).double() for part in drawn)))
    points = torch.tensor([0.025, 0.975], dtype=torch.float64)
    return torch.stack(samples).quantile(points, dim=0).T


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the p-value of McNemar's exact test (1947) from images that only one model gets right.

    It is the probability of a split at least as uneven if both models were equally good.
    """
    fewer = torch.arange(min(only_first, only_second) + 1, dtype=torch.float64)
    splits = torch.distributions.Binomial(only_first + only_second, torch.tensor(0.5).double())
    return min(1.0, 2 * splits.log_prob(fewer).exp().sum().item())


def student(name: str, *samples: Tensor) -> tuple[dict[str, Any], float | None]:
    """Return a mean, or the difference of two, with its 95% interval by name, and its p-value.

    Student's t-test, or Welch's, tests for a mean of 0. Samples are (N,); interval and p-value are
    None if a sample has a single value, or if none varies.
    """
    mean = samples[0].mean().item() - sum(sample.mean().item() for sample in samples[1:])
    squares = [s.var().item() / len(s) if len(s) > 1 else math.nan for s in samples]
    if not (square := sum(squares)) > 1e-18:  # rounding
        return {name: mean, f"{name}_95": None}, None
    parts = [part**2 / (len(s) - 1) for part, s in zip(squares, samples, strict=True)]
    freedom = square**2 / sum(parts)
    angles = np.linspace(0, 1, 100_001) ** 3 * math.pi / 2  # cubed, as p-values may be small
    heights = np.sin((angles[1:] + angles[:-1]) / 2) ** (freedom - 1)
    tails = np.append(0, np.cumsum(heights * np.diff(angles)))  # |t| > sqrt(freedom) / tan(angle)
    scale, tails = math.sqrt(square * freedom), tails / tails[-1]
    p_value = float(np.interp(math.atan2(scale, abs(mean)), angles, tails))
    half = scale / math.tan(np.interp(0.05, tails, angles))
    return {name: mean, f"{name}_95": (mean - half, mean + half)}, p_value
