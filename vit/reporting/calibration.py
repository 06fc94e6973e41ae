"""How good a classifier's probabilities are on test images, and its sets of classes."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.evaluation import intervals, report
from vit.intervals import average, fraction
from vit.reporting.tables import text_table, with_interval

MEASURES = ("temperature", "loss", "loss_95", "ece", "ece_95", "reliability")
UNCALIBRATED = (
    "it is a checkpoint, an older file, or trained without held-out images; a run with "
    "data.val_size above 0 ends with a calibrated model.safetensors"
)


def measure_calibration(
    classifier: Classifier, images: ImageSet, logits: Tensor, result: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Measure the probabilities of test images with logits (N, C), whose report is `result`.

    Returns the `MEASURES` of "as trained" and, if the model has a temperature, "calibrated".
    """
    rows = {"as trained": {"temperature": 1.0, **result}}
    if classifier.calibration:
        scaled, labels = classifier.scaled(logits), images.labels.cpu()
        calibrated = report(scaled, labels, images.classes) | intervals(scaled, labels)
        rows["calibrated"] = {"temperature": classifier.calibration.temperature, **calibrated}
    return {name: {key: row[key] for key in MEASURES} for name, row in rows.items()}


def calibration_table(measured: dict[str, dict[str, Any]]) -> str:
    """Format the result of `measure_calibration` as text."""
    rows = [["probabilities", "temperature", "log loss (95% interval)", "calibration error (95%)"]]
    for name, row in measured.items():
        errors = [with_interval(row, key, ".4f") for key in ("loss", "ece")]
        rows.append([name, f"{row['temperature']:.3f}", *errors])
    missing = [] if "calibrated" in measured else [f"not calibrated: {UNCALIBRATED}"]
    return "\n".join(text_table(rows) + missing)


def make_sets(
    classifier: Classifier, logits: Tensor, uniform: Tensor, coverage: float
) -> dict[str, Tensor]:
    """Return `Calibration.sets`; ValueError without a calibration for the logits and coverage."""
    if classifier.views > 1:
        raise ValueError(
            "coverage: not together with --flip and --views, because sets are calibrated without"
        )
    if classifier.calibration is None:
        raise ValueError(f"coverage: the model is not calibrated: {UNCALIBRATED}")
    return classifier.calibration.sets(logits, uniform, coverage)


def measure_sets(sets: dict[str, Tensor], images: ImageSet) -> dict[str, list[dict[str, Any]]]:
    """Measure the `Calibration.sets` of test images, for each kind all together and by class.

    Each row has class, coverage (0 to 1) and size (mean number of classes), with 95% intervals.
    """
    labels = images.labels.cpu()
    groups = {"all": labels >= 0}
    groups |= {images.classes[label]: labels == label for label in labels.unique().tolist()}

    def measure(inside: Tensor, rows: Tensor) -> dict[str, Any]:
        count, hits = int(rows.sum()), int(inside[rows, labels[rows]].sum())
        return fraction("coverage", hits, count) | average("size", inside[rows].sum(dim=1))

    return {
        kind: [{"class": name, **measure(inside, rows)} for name, rows in groups.items()]
        for kind, inside in sets.items()
    }


def with_sets(
    rows: Iterable[dict[str, Any]], sets: dict[str, Tensor], logits: Tensor, classes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Add the columns set_lac and set_raps to rows: classes, best first, separated by |."""
    for number, row in enumerate(rows):
        for kind, inside in sets.items():
            chosen = inside[number].nonzero().squeeze(1)
            best = chosen[logits[number, chosen].argsort(descending=True, stable=True)]
            row[f"set_{kind}"] = "|".join(classes[index] for index in best.tolist())
        yield row


def sets_table(measured: dict[str, list[dict[str, Any]]], coverage: float) -> str:
    """Format the result of `measure_sets` as text."""
    rows = [["true class"]]
    for kind in measured:
        rows[0] += [f"{kind.upper()} coverage", "classes in a set"]
    for kinds in zip(*measured.values(), strict=True):
        rows.append([kinds[0]["class"]])
        for row in kinds:
            rows[-1] += [with_interval(row, "coverage", ".1%"), with_interval(row, "size", ".2f")]
    title = f"sets with the true class of {coverage:.1%} of images, with 95% intervals"
    about = "LAC has the smallest sets; RAPS enlarges those of unclear images"
    return "\n".join([title, *text_table(rows), about])
