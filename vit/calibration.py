"""Calibration of a classifier: what held-out images say about its probabilities.

Shapes: N images, C classes.
"""

import math
from dataclasses import dataclass

from torch import Tensor

HOTTEST = 100.0  # largest temperature; 1 / HOTTEST is the smallest


@dataclass(frozen=True)
class Calibration:
    """What is measured on held-out images at the end of training, and stored in the model file.

    Attributes:
        images: Number of held-out images.
        temperature: What logits are divided by, so that probabilities are calibrated.
    """

    images: int
    temperature: float

    @classmethod
    def fit(cls, logits: Tensor, labels: Tensor) -> "Calibration":
        """Calibrate with the logits (N, C) and labels (N,) int64 of held-out images."""
        return cls(len(labels), fit_temperature(logits, labels))


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature that minimizes the log loss (arXiv 1706.04599).

    The loss is convex in 1/T, so bisection of its slope finds the minimum. As in Platt (1999), the
    true class has a target probability of (N + 1) / (N + 2), and the rest is divided among all
    classes, so that a model without mistakes gets a temperature above 0.

    Args:
        logits: (N, C), at least one image.
        labels: (N,) int64.

    Returns:
        The temperature, 0.01 to 100.
    """
    logits = logits.double()
    logits = logits - logits.mean(dim=1, keepdim=True)  # so that the rest of the target adds 0
    target = (len(labels) + 1) / (len(labels) + 2)
    wanted = target * logits.gather(1, labels[:, None]).mean()
    low, high = -math.log(HOTTEST), math.log(HOTTEST)  # of 1/T
    for _ in range(50):
        middle = (low + high) / 2
        expected = ((logits * math.exp(middle)).softmax(dim=1) * logits).sum(dim=1).mean()
        low, high = (middle, high) if expected < wanted else (low, middle)
    return math.exp(-low)
