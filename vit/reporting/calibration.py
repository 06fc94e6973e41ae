"""How good a classifier's probabilities are on test images, and its sets of classes.

Shapes: N images, C classes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.evaluation import CALIBRATION_BINS, bin_of, report, wilson_interval
from vit.explain.faithfulness import mean_interval
from vit.reporting.tables import text_table, with_interval
from vit.seeding import generator

RESAMPLES = 1000
UNCALIBRATED = "no images were held out (data.val_size=0), or it is a checkpoint or an older file"


def bootstrap(measure: Callable[..., Tensor], *sizes: int) -> list[list[float]]:
    """Return 95% intervals of statistics (K,), of weights (N,) for each group of N images."""
    random, samples = generator(0, "bootstrap"), []
    for _ in range(RESAMPLES):
        drawn = [torch.randint(size, (size,), generator=random) for size in sizes]
        samples.append(measure(*(d.bincount(minlength=len(d)).double() for d in drawn)))
    points = torch.tensor([0.025, 0.975], dtype=torch.float64)
    intervals: list[list[float]] = torch.stack(samples).quantile(points, dim=0).T.tolist()
    return intervals


def measure_calibration(
    classifier: Classifier, images: ImageSet, logits: Tensor
) -> dict[str, dict[str, Any]]:
    """Measure the probabilities of test images with logits (N, C), with and without temperature.

    Returns:
        By "as trained" and, if the model has a temperature, "calibrated": temperature, loss (nats)
        and ece (0 to 1) with their 95% intervals, and reliability, see `vit.evaluation.report`.
    """
    temperatures = {"as trained": 1.0}
    if classifier.calibration:
        temperatures["calibrated"] = classifier.calibration.temperature
    found, labels = {}, images.labels.cpu()
    for name, temperature in temperatures.items():
        scaled = logits / temperature
        result = report(scaled, labels, images.classes)
        kept = {key: result[key] for key in ("loss", "ece", "reliability")}
        found[name] = {"temperature": temperature, **kept, **intervals(scaled, labels)}
    return found


def intervals(logits: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Return loss_95 and ece_95, 95% intervals for logits (N, C) and labels (N,).

    Noise makes the calibration error of a sample too large, all the more in bootstrap samples. So
    its interval is reflected at the estimate, and reaches 0 unless the estimate exceeds that of
    most equally confident models that are perfectly calibrated.
    """
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    bins = F.one_hot(bin_of(confidence), CALIBRATION_BINS).double()
    gaps = bins * ((predicted == labels).double() - confidence)[:, None]

    def measure(weights: Tensor) -> Tensor:
        return torch.stack([weights @ losses, (weights @ gaps).abs().sum()]) / len(labels)

    loss, (low, high) = bootstrap(measure, len(labels))
    ece = gaps.mean(dim=0).abs().sum().item()
    # The gap of a bin of a calibrated model is normal, its absolute value half-normal.
    spread = ((confidence * (1 - confidence)) @ bins).sqrt() / len(labels)
    usual = 0.798 * spread.sum().item() + 1.96 * 0.603 * spread.norm().item()
    lowest = 0.0 if ece <= usual else max(0.0, 2 * ece - high)
    return {"loss_95": loss, "ece_95": [lowest, max(0.0, 2 * ece - low)]}


def calibration_table(measured: dict[str, dict[str, Any]]) -> str:
    """Format the result of `measure_calibration` as text."""
    rows = [["probabilities", "temperature", "log loss (95% interval)", "ECE (95% interval)"]]
    for name, row in measured.items():
        errors = [with_interval(row, key, ".4f") for key in ("loss", "ece")]
        rows.append([name, f"{row['temperature']:.3f}", *errors])
    missing = [] if "calibrated" in measured else [f"not calibrated: {UNCALIBRATED}"]
    return "\n".join(text_table(rows) + missing)


def make_sets(
    classifier: Classifier, logits: Tensor, uniform: Tensor, coverage: float
) -> dict[str, Tensor]:
    """Return `Calibration.sets` of a classifier.

    Raises:
        ValueError: It has no calibration, or not for these logits, or for this coverage.
    """
    if classifier.flip:
        raise ValueError("coverage: not together with --flip, because sets are calibrated without")
    if classifier.calibration is None:
        raise ValueError(f"coverage: the model is not calibrated: {UNCALIBRATED}")
    return classifier.calibration.sets(logits, uniform, coverage)


def measure_sets(
    classifier: Classifier, images: ImageSet, logits: Tensor, coverage: float
) -> dict[str, list[dict[str, Any]]]:
    """Measure the sets of test images with logits (N, C), see `vit.calibration.set_scores`.

    Returns:
        For each kind, rows of all images and of each class that has images: class, coverage (0 to
        1) and size (mean number of classes), with their 95% intervals.
    """
    uniform, labels = torch.rand(len(images), generator=generator(0, "test")), images.labels.cpu()
    groups = {"all": torch.ones_like(labels, dtype=torch.bool)}
    groups |= {images.classes[label]: labels == label for label in labels.unique().tolist()}
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, inside in make_sets(classifier, logits, uniform, coverage).items():
        found[kind] = []
        for name, chosen in groups.items():
            count, hits = int(chosen.sum()), int(inside[chosen, labels[chosen]].sum())
            size, half = mean_interval(inside[chosen].sum(dim=1).double())
            row = {"coverage": hits / count, "coverage_95": wilson_interval(hits, count)}
            row |= {"size": size, "size_95": (size - half, size + half)}
            found[kind].append({"class": name, **row})
    return found


def sets_table(measured: dict[str, list[dict[str, Any]]], coverage: float) -> str:
    """Format the result of `measure_sets` as text."""
    rows = [["true class"]]
    for kind in measured:
        rows[0] += [f"{kind.upper()} coverage", "classes in a set"]
    for found in zip(*measured.values(), strict=True):
        rows.append([found[0]["class"]])
        for row in found:
            rows[-1] += [with_interval(row, "coverage", ".1%"), with_interval(row, "size", ".2f")]
    title = f"sets with the true class of {coverage:.1%} of images, with 95% intervals"
    return "\n".join([title, *text_table(rows)])
