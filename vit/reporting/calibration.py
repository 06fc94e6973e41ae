"""How good a classifier's probabilities are on test images, and its sets of classes.

Shapes: N images, C classes.
"""

from typing import Any

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.evaluation import average, fraction, intervals, report
from vit.reporting.tables import text_table, with_interval
from vit.seeding import generator

MEASURES = ("temperature", "loss", "loss_95", "ece", "ece_95", "reliability")
UNCALIBRATED = "no images were held out (data.val_size=0), or it is a checkpoint or an older file"


def measure_calibration(
    classifier: Classifier, images: ImageSet, logits: Tensor, result: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Measure the probabilities of test images with logits (N, C), with and without temperature.

    Returns:
        By "as trained" and, if the model has a temperature, "calibrated": temperature, and some of
        the `report` of the logits, which is `result`, and of their `intervals`, see `MEASURES`.
    """
    found = {"as trained": {"temperature": 1.0, **result}}
    if classifier.calibration:
        scaled, labels = classifier.scaled(logits), images.labels.cpu()
        calibrated = {**report(scaled, labels, images.classes), **intervals(scaled, labels)}
        found["calibrated"] = {"temperature": classifier.calibration.temperature, **calibrated}
    return {name: {key: row[key] for key in MEASURES} for name, row in found.items()}


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
            row = fraction("coverage", hits, count) | average("size", inside[chosen].sum(dim=1))
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
