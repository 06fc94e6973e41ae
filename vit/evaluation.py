"""Metrics of a classifier: accuracy with its interval, metrics per class, calibration.

Shapes: B batch, C classes, N images.
"""

import math
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.hardware import autocast
from vit.training.config import Config

if TYPE_CHECKING:  # it imports tensorboard
    from vit.run.tracker import Logged

CALIBRATION_BINS = 15  # as in arXiv 1706.04599


class Evaluator(Protocol):
    """Measures or draws something at certain steps during training."""

    name: str  # what it does, for messages
    steps: Container[int]  # optimizer steps after which it runs; 0 is the untrained model

    def run(self, classifier: Classifier, step: int) -> "Iterator[tuple[str, Logged]]":
        """Yield tags with numbers, pictures (height, width, 3) uint8, or summaries."""


@dataclass(frozen=True)
class Setup:
    """What an evaluator is made from when a run begins, see `vit.registry.EVALUATORS`."""

    config: Config
    model: nn.Module  # in evaluation mode; the weights may change
    preprocess: Preprocess
    training: ImageSet
    held_out: ImageSet  # perhaps none
    epoch_ends: Container[int]  # steps after which an epoch ends, or the run
    total_steps: int


class Validation:
    """Evaluator that measures loss and accuracy on the held-out images after each epoch.

    If only the head of the model changes, what it gets is computed once.
    """

    name = "validation"

    def __init__(self, setup: Setup) -> None:
        self.images, self.steps = setup.held_out, setup.epoch_ends
        self.frozen = setup.config.train.freeze == "backbone"
        self._features: Tensor | None = None

    def run(self, classifier: Classifier, step: int) -> "Iterator[tuple[str, Logged]]":
        """Yield val/loss (nats) and val/accuracy (0 to 1)."""
        if not len(self.images):
            return
        logits = self._head_alone(classifier) if self.frozen else None
        if logits is None:
            result, _ = evaluate(classifier, self.images)
        else:
            result = report(logits.cpu(), self.images.labels.cpu(), self.images.classes)
        yield "val/loss", result["loss"]
        yield "val/accuracy", result["accuracy"]

    @torch.no_grad()
    def _head_alone(self, classifier: Classifier) -> Tensor | None:
        """Return logits (N, C), with features of the first call; None if the head is not linear."""
        model: Any = classifier.model  # ours and timm's have this method
        head = model.get_classifier()
        if not isinstance(head, nn.Linear):
            return None
        if self._features is None:
            self._features = classifier.features(self.images)
        with autocast(classifier.device, classifier.precision):
            return head(self._features).float()


def evaluate(
    classifier: Classifier, images: ImageSet, batch_size: int = 500
) -> tuple[dict[str, Any], Tensor]:
    """Classify labelled images, at most `batch_size` at once, and compute the metrics.

    Returns:
        The report, see `report`, with images_per_second, and with flip if logits are averaged with
        those of mirror images; and the logits (N, C) on the CPU.
    """
    start = time.perf_counter()
    logits = classifier.logits(images, batch_size).cpu()
    seconds = time.perf_counter() - start
    result = report(logits, images.labels.cpu(), images.classes)
    flip = {"flip": True} if classifier.flip else {}
    return {**result, **flip, "images_per_second": len(images) / seconds}, logits


def report(logits: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, Any]:
    """Compute the metrics of logits (N, C), labels (N,) int64 and C class names.

    Returns:
        n, accuracy (0 to 1) with its 95% interval accuracy_95, balanced_accuracy (mean recall of
        the classes that have images), macro_f1 (mean F1 score of the classes that have images or
        predictions), loss (cross entropy, nats), top5_accuracy, ece (0 to 1), per_class (recall,
        precision and n by class name), confusion_matrix (C rows of true classes, C columns of
        predicted ones, counts) and reliability (see `reliability`).
    """
    count, num_classes = logits.shape
    predicted = logits.argmax(dim=1)
    confusion = torch.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    confusion = confusion.view(num_classes, num_classes)
    hits, true, guessed = confusion.diag(), confusion.sum(dim=1), confusion.sum(dim=0)
    top = logits.topk(min(5, num_classes), dim=1).indices
    bins = reliability(logits.softmax(dim=1), labels)
    recall = hits.double() / true  # NaN for a class without images
    f1 = 2 * hits.double() / (true + guessed)  # NaN for a class without images and predictions
    return {
        "n": count,
        "accuracy": hits.sum().item() / count,
        "accuracy_95": wilson_interval(int(hits.sum()), count),
        "balanced_accuracy": recall.nanmean().item(),
        "macro_f1": f1.nanmean().item(),
        "loss": F.cross_entropy(logits, labels).item(),
        "top5_accuracy": (top == labels[:, None]).any(dim=1).float().mean().item(),
        "ece": sum(b["n"] * abs(b["accuracy"] - b["confidence"]) for b in bins) / count,
        "per_class": {
            name: {"recall": _ratio(hit, n), "precision": _ratio(hit, g), "n": n}
            for name, hit, n, g in zip(
                classes, hits.tolist(), true.tolist(), guessed.tolist(), strict=True
            )
        },
        "confusion_matrix": confusion.tolist(),
        "reliability": bins,
    }


def _ratio(part: int, total: int) -> float | None:
    return part / total if total else None


def wilson_interval(hits: float, count: float) -> tuple[float, float]:
    """Return the 95% confidence interval of a proportion (Wilson 1927, without correction)."""
    z = 1.959964
    rate = hits / count
    centre = rate + z * z / (2 * count)
    spread = z * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (centre - spread) / scale, (centre + spread) / scale
    # The proportion stays inside despite rounding.
    return max(0.0, min(low, rate)), min(1.0, max(high, rate))


def mcnemar(only_first: int, only_second: int) -> float:
    """Test whether two classifiers differ, of which each alone is right on some images.

    Returns:
        The p-value (McNemar 1947, exact): the probability of a split at least as uneven if both
        were equally good.
    """
    tries, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(tries, k) for k in range(fewer + 1))
    return min(1.0, 2 * tail / 2**tries)


def reliability(probabilities: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """Compare confidence with accuracy in 15 bins of equal width (arXiv 1706.04599).

    The mean gap, weighted by n, is the expected calibration error (ECE).

    Returns:
        For each bin that contains images: n, mean confidence, accuracy, and accuracy_95.
    """
    confidence, predicted = probabilities.max(dim=1)
    right, where, bins = predicted == labels, bin_of(confidence), []
    for number in where.unique().tolist():
        inside = where == number
        hits, count = int((right & inside).sum()), int(inside.sum())
        mean = confidence[inside].double().mean().item()
        accuracy = {"accuracy": hits / count, "accuracy_95": wilson_interval(hits, count)}
        bins.append({"n": count, "confidence": mean, **accuracy})
    return bins


def bin_of(confidence: Tensor) -> Tensor:
    """Return the bin, 0 to 14, of each of the confidences (N,)."""
    return (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
