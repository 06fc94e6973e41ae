"""How good a classifier's probabilities are, as trained and calibrated, with bootstrap intervals.

Shapes: R bootstrap samples, N images, C classes.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.evaluation import CALIBRATION_BINS, bin_of, report
from vit.seeding import generator

RESAMPLES = 1000
DRAWN_AT_ONCE = 2_000_000  # limits peak memory


def measure_calibration(
    classifier: Classifier, images: ImageSet, logits: Tensor
) -> dict[str, dict[str, Any]]:
    """Measure the probabilities of test images with and without the temperature.

    Args:
        classifier: The model.
        images: The N test images, with labels.
        logits: (N, C) float32, on the CPU, not divided by the temperature.

    Returns:
        By "as trained" and, if the model has a temperature, "calibrated": temperature, loss (nats)
        and ece (0 to 1) with their 95% intervals loss_95 and ece_95, and reliability, see
        `vit.evaluation.report`.
    """
    variants = {"as trained": (1.0, logits)}
    if classifier.calibration:
        variants["calibrated"] = (classifier.calibration.temperature, classifier.scaled(logits))
    found, labels = {}, images.labels.cpu()
    for name, (temperature, scaled) in variants.items():
        result = report(scaled, labels, images.classes)
        kept = {key: result[key] for key in ("loss", "ece", "reliability")}
        found[name] = {"temperature": temperature, **kept, **intervals(scaled, labels)}
    return found


def intervals(logits: Tensor, labels: Tensor) -> dict[str, tuple[float, float]]:
    """Return 95% intervals of log loss and calibration error, from bootstrap samples of the images.

    The calibration error of a sample is too large by noise, all the more in bootstrap samples,
    which draw from a sample. So its interval is reflected at the estimate, and reaches 0 unless the
    estimate exceeds what 97.5% of equally confident, perfectly calibrated models would get.

    Args:
        logits: (N, C).
        labels: (N,) int64.

    Returns:
        loss_95 and ece_95.
    """
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    confidence = confidence.double()
    bins = F.one_hot(bin_of(confidence), CALIBRATION_BINS).double()
    gaps = (predicted == labels).double() - confidence
    columns = torch.cat([losses[:, None], gaps[:, None] * bins], dim=1)
    random, drawn, perfect = generator(0, "calibrated"), [], []
    for counts in resamples(len(labels)):
        drawn.append(counts @ columns / len(labels))
        hits = torch.rand(counts.shape, dtype=torch.float64, generator=random) < confidence
        perfect.append(((hits.double() - confidence) @ bins).abs().sum(dim=1) / len(labels))
    samples = torch.cat(drawn)
    ece = columns[:, 1:].mean(dim=0).abs().sum().item()
    low, high = percentiles(samples[:, 1:].abs().sum(dim=1))
    lowest = 0.0 if ece <= percentiles(torch.cat(perfect))[1] else max(0.0, 2 * ece - high)
    return {"loss_95": percentiles(samples[:, 0]), "ece_95": (lowest, max(0.0, 2 * ece - low))}


def resamples(count: int) -> Iterator[Tensor]:
    """Yield how often each of N items is in bootstrap samples, (r, N) float64, R in all."""
    random, at_once = generator(0, "bootstrap"), max(1, DRAWN_AT_ONCE // count)
    for start in range(0, RESAMPLES, at_once):
        rows = min(at_once, RESAMPLES - start)
        drawn = torch.randint(count, (rows, count), generator=random)
        ones = torch.ones((), dtype=torch.float64).expand(rows, count)
        yield torch.zeros(rows, count, dtype=torch.float64).scatter_add_(1, drawn, ones)


def percentiles(samples: Tensor) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentiles of bootstrap samples (R,)."""
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return low, high


def calibration_table(measured: dict[str, dict[str, Any]]) -> str:
    """Format the result of `measure_calibration` as text."""
    lines = [
        f"{'probabilities':<32}{'log loss (95% interval)':<29}calibration error (95% interval)"
    ]
    for name, values in measured.items():
        scale = f", temperature {values['temperature']:.3f}" if name == "calibrated" else ""
        cells = [
            f"{values[key]:.4f} ({values[f'{key}_95'][0]:.4f} to {values[f'{key}_95'][1]:.4f})"
            for key in ("loss", "ece")
        ]
        lines.append(f"{name + scale:<32}{cells[0]:<29}{cells[1]}")
    if "calibrated" not in measured:
        lines.append(
            "no temperature: no images were held out (data.val_size=0), or this is a checkpoint or "
            "an older file"
        )
    return "\n".join(lines)
