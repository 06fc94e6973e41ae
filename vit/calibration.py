"""Calibration of a classifier: what held-out images say about its probabilities.

Shapes: N images, C classes.
"""

import math
from dataclasses import field
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vit.seeding import generator
from vit.settings import Positive, group, require

HOTTEST = 100.0  # largest temperature; 1 / HOTTEST is the smallest
LEVELS = 1000  # quantiles are stored for coverages of 1/1000, 2/1000 and so on
PENALTY, FREE_RANKS = 0.01, 5  # of RAPS: each class after the fifth scores 0.01 more than the last


@group("", kw_only=False)
class Calibration:
    """What is measured on held-out images at the end of training, and stored in the model file."""

    images: Annotated[int, Field(ge=1)]  # number of held-out images
    temperature: Positive  # what logits are divided by, so that probabilities are calibrated
    # For each kind of `set_scores`, the largest score in a set, by coverage in steps of 1/1000, up
    # to the largest for which there are enough images.
    quantiles: dict[str, list[float]] = field(hash=False)
    # The energy of held-out images, see `energy`, ascending: of all, or 1000 quantiles.
    energies: list[float] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        equal = len({len(self.quantiles.get(kind, ())) for kind in ("lac", "raps")}) == 1
        require(equal, "quantiles", self.quantiles, "lists for lac and raps of one length")

    @classmethod
    def fit(cls, logits: Tensor, labels: Tensor) -> "Calibration":
        """Calibrate with the logits (N, C) and labels (N,) int64 of held-out images."""
        count, quantiles = len(labels), {}
        ranks = [-(-(count + 1) * level // LEVELS) for level in range(1, LEVELS)]  # rounded up
        uniform = torch.rand(count, generator=generator(0, "held-out"))
        for kind, scores in set_scores(logits, uniform).items():
            ordered = scores.gather(1, labels[:, None]).squeeze(1).sort().values.tolist()
            # Six digits, rounded up, keep the file small.
            chosen = [ordered[rank - 1] for rank in ranks if rank <= count]
            quantiles[kind] = [math.ceil(1e6 * score) / 1e6 for score in chosen]
        evenly = torch.linspace(0, count - 1, min(count, LEVELS)).round().long()
        energies = [round(value, 4) for value in energy(logits).sort().values[evenly].tolist()]
        return cls(count, fit_temperature(logits, labels), quantiles, energies)

    def familiarity(self, logits: Tensor) -> Tensor:
        """Return the fraction of held-out images that look at most as familiar as each image, (N,).

        It is below 5% for about 5% of images like the held-out ones, and more often for images of
        no class: a conformal p-value (arXiv 2104.08279) with `energy` as score. Logits are as
        trained.
        """
        energies = torch.tensor(self.energies, dtype=torch.float64)
        below = torch.searchsorted(energies, energy(logits), right=True)
        return (below + 1) / (len(energies) + 1)

    def sets(self, logits: Tensor, uniform: Tensor, coverage: float) -> dict[str, Tensor]:
        """Return sets of classes, (N, C) bool, for each kind of `set_scores`.

        They contain the true class with at least the probability `coverage`, above 0 and below 1,
        rounded up to thousandths, over held-out and other images from one distribution. Logits
        (N, C) are as trained, `uniform` (N,) is random, 0 to 1. ValueError if there were too few
        held-out images.
        """
        level, most = math.ceil(LEVELS * coverage - 1e-9), len(self.quantiles.get("lac", ()))
        allowed = f"at most {most / LEVELS} for a model with {self.images:,} held-out images"
        require(level <= most, "coverage", coverage, allowed)
        return {
            kind: scores <= self.quantiles[kind][level - 1]
            for kind, scores in set_scores(logits, uniform).items()
        }


def energy(logits: Tensor) -> Tensor:
    """Return how familiar images with logits (N, C) look: minus their energy (arXiv 2010.03759)."""
    return logits.double().logsumexp(dim=1)


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature, 0.01 to 100, that minimizes the log loss (arXiv 1706.04599).

    The loss is convex in 1/T, so bisection of its slope finds the minimum. As in Platt (1999), the
    true class has a target probability of (N + 1) / (N + 2), and the rest is divided among all
    classes, so that a model without mistakes gets a temperature above 0.
    """
    logits = logits.double()
    logits = logits - logits.mean(dim=1, keepdim=True)  # so that the rest of the target adds 0
    target = (len(labels) + 1) / (len(labels) + 2)
    wanted = target * logits.gather(1, labels[:, None]).mean()
    low, high = -math.log(HOTTEST), math.log(HOTTEST)  # bounds of log 1/T
    for _ in range(50):
        middle = (low + high) / 2
        expected = ((logits * math.exp(middle)).softmax(dim=1) * logits).sum(dim=1).mean()
        low, high = (middle, high) if expected < wanted else (low, middle)
    return math.exp(-low)


def set_scores(logits: Tensor, uniform: Tensor) -> dict[str, Tensor]:
    """Score how badly each class fits an image; a conformal set has the classes of low scores.

    Logits are as trained: the temperature depends on the held-out images, which would then differ
    from test images, and coverage would only be approximate. Scores are (N, C) float64: "lac", 1
    minus the probability (arXiv 1609.00451), and "raps", the sum of the larger probabilities and
    the random fraction `uniform` (N,) of the class's, with a penalty (arXiv 2009.14193). The most
    probable class scores 0, so that no set is empty.
    """
    probabilities = logits.double().softmax(dim=1)
    ordered, order = probabilities.sort(dim=1, descending=True)
    sums = ordered.cumsum(dim=1) + (uniform[:, None] - 1) * ordered
    penalty = PENALTY * (torch.arange(logits.shape[1]) + 1 - FREE_RANKS).clamp(min=0)
    scores = {"lac": 1 - probabilities, "raps": sums.scatter(1, order, sums + penalty)}
    return {kind: score.scatter(1, order[:, :1], 0.0) for kind, score in scores.items()}
