"""Metrics of a classifier: accuracy, metrics per class, calibration.

Shapes: C classes, N images.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.classifier import MOST_PIXELS, Classifier
from vit.config import Config
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.hardware import autocast
from vit.intervals import Z, bootstrap, fraction, interval_of_mean
from vit.model.copying import copy_module
from vit.run.length import Length
from vit.settings import require

if TYPE_CHECKING:  # it imports tensorboard
    from vit.run.tracker import Logged

CALIBRATION_BINS = 15  # as in arXiv 1706.04599
MATRIX_CLASSES = 1000  # largest number of classes with a confusion matrix
SAMPLE = 512  # training images for the statistics of batch norm


class Evaluator(Protocol):
    """Measures or draws something at certain steps during training."""

    @property
    def name(self) -> str:
        """What it does, for messages."""

    @property
    def steps(self) -> Container[int]:
        """Optimizer steps after which it runs; 0 is the untrained model."""

    def run(self, classifier: Classifier, step: int) -> "Iterator[tuple[str, Logged]]":
        """Yield tags with numbers, pictures (height, width, 3) uint8, or summaries."""


@dataclass(frozen=True)
class Setup:
    """What an evaluator is made from when a run begins, see `vit.commands.train.EVALUATORS`."""

    config: Config
    model: nn.Module  # in evaluation mode; the weights may change
    preprocess: Preprocess
    training: ImageSet
    held_out: ImageSet  # perhaps none
    epoch_ends: Container[int]  # steps after which an epoch ends, or the run
    length: Length  # of the run, which may change
    size_of: Callable[[int], tuple[int, int]]  # height and width that a step trains on, in pixels


class Validation:
    """Evaluator that measures loss and accuracy on the held-out images after each epoch.

    They have their full size. Where training has smaller images, batch norm first gets the
    statistics of training images of full size. With a frozen backbone, features are computed once.
    """

    name = "validation"

    def __init__(self, setup: Setup) -> None:
        self.setup, self.images = setup, setup.held_out
        self.steps: Container[int] = setup.epoch_ends if len(setup.held_out) else ()
        self._features: Tensor | None = None  # of the held-out images

    def run(self, classifier: Classifier, step: int) -> "Iterator[tuple[str, Logged]]":
        """Yield val/loss (nats) and val/accuracy (0 to 1)."""
        model: Any = classifier.model
        head = model.get_classifier()  # ours and timm's have this method
        if self.setup.config.train.freeze == "backbone" and isinstance(head, nn.Linear):
            if self._features is None:
                self._features = classifier.features(self.images)
            with torch.no_grad(), autocast(classifier.device, classifier.precision):
                logits = head(self._features).float().cpu()
            result = report(logits, self.images.labels.cpu(), self.images.classes)
        else:
            if self.setup.size_of(step - 1) != self.setup.preprocess.image_size:
                classifier = with_statistics(classifier, self._sample)
            result, _ = evaluate(classifier, self.images)
        yield "val/loss", result["loss"]
        yield "val/accuracy", result["accuracy"]

    @functools.cached_property
    def _sample(self) -> ImageSet:
        training, seed = self.setup.training, self.setup.config.train.seed
        count = sample_size(len(training))
        return choose_images(training, count, seed, "batch norm").resized(self.setup.preprocess)


def sample_size(num_images: int) -> int:
    """Return the number of training images for the statistics of batch norm."""
    return max(64, min(SAMPLE, num_images // 8))


@torch.no_grad()
def with_statistics(classifier: Classifier, images: ImageSet) -> Classifier:
    """Return a classifier whose batch norm, if there is any, has the statistics of images."""
    kind = nn.modules.batchnorm._BatchNorm
    if not any(isinstance(module, kind) for module in classifier.model.modules()):
        return classifier
    model = copy_module(classifier.model)
    for module in model.modules():
        if isinstance(module, kind):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
            module.train()
    most = MOST_PIXELS // math.prod(classifier.preprocess.image_size)
    for part in images.images.split(max(1, min(SAMPLE // 4, most))):
        with autocast(classifier.device, classifier.precision):
            model(classifier.normalize(part))
    return dataclasses.replace(classifier, model=model.eval())


def evaluate(
    classifier: Classifier, images: ImageSet, batch_size: int = 500
) -> tuple[dict[str, Any], Tensor]:
    """Classify images, at most `batch_size` at once; return metrics and logits (N, C) on the CPU.

    The metrics are those of `report`, and images_per_second; with several views, also views and
    flip.
    """
    require(len(images) > 0, "images", len(images), "at least one")
    start = time.perf_counter()
    logits = classifier.logits(images, batch_size).cpu()
    seconds = time.perf_counter() - start
    result = report(logits, images.labels.cpu(), images.classes)
    views = {"flip": classifier.flip, "views": classifier.views} if classifier.views > 1 else {}
    return {**result, **views, "images_per_second": len(images) / seconds}, logits


def report(logits: Tensor, labels: Tensor, classes: tuple[str, ...]) -> dict[str, Any]:
    """Compute the metrics of logits (N, C), labels (N,) int64 and C class names.

    Returns:
        n, accuracy and top5_accuracy (0 to 1) with their 95% intervals accuracy_95 and
        top5_accuracy_95, balanced_accuracy (mean recall of the classes that have images), macro_f1
        (mean F1 score of the classes that have images or predictions), loss (cross entropy, nats),
        ece (0 to 1), per_class (recall and precision with their intervals, and n, by class name),
        confusion_matrix (counts: C true classes, C predicted ones; None above `MATRIX_CLASSES`) and
        reliability, see `reliability`. For the other intervals see `intervals`.
    """
    count, num_classes = logits.shape
    predicted = logits.argmax(dim=1)
    kinds = labels[predicted == labels], labels, predicted
    hits, true, guessed = (kind.bincount(minlength=num_classes) for kind in kinds)
    confusion = None
    if num_classes <= MATRIX_CLASSES:
        pairs = (labels * num_classes + predicted).bincount(minlength=num_classes**2)
        confusion = pairs.view(num_classes, num_classes).tolist()
    counts = torch.stack([hits, true, guessed], dim=1).tolist()
    top = logits.topk(min(5, num_classes), dim=1).indices
    bins = reliability(logits.softmax(dim=1), labels)
    recall, f1 = _means_of_classes(hits.double(), true, guessed).tolist()
    return {
        "n": count,
        **fraction("accuracy", int(hits.sum()), count),
        "balanced_accuracy": recall,
        "macro_f1": f1,
        "loss": F.cross_entropy(logits, labels).item(),
        **fraction("top5_accuracy", int((top == labels[:, None]).sum()), count),
        "ece": sum(b["n"] * abs(b["accuracy"] - b["confidence"]) for b in bins) / count,
        "per_class": {
            name: {**fraction("recall", hit, n), **fraction("precision", hit, guess), "n": n}
            for name, (hit, n, guess) in zip(classes, counts, strict=True)
        },
        "confusion_matrix": confusion,
        "reliability": bins,
    }


def _means_of_classes(hits: Tensor, true: Tensor, guessed: Tensor) -> Tensor:
    """Return mean recall and F1 score from numbers of images (C,), without classes of 0 images."""
    return torch.stack([(hits / true).nanmean(), (2 * hits / (true + guessed)).nanmean()])


def intervals(logits: Tensor, labels: Tensor) -> dict[str, tuple[float, float]]:
    """Return loss_95, ece_95, balanced_accuracy_95 and macro_f1_95 by bootstrap, as for `report`.

    Noise makes the calibration error of a sample too large, even more so in bootstrap samples. So
    its interval is reflected at the estimate, and reaches 0 unless the estimate exceeds the one of
    most equally confident models that are perfectly calibrated.
    """
    count, num_classes = logits.shape
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    confidence, predicted = logits.double().softmax(dim=1).max(dim=1)
    right = (predicted == labels).double()
    bins = F.one_hot(bin_of(confidence), CALIBRATION_BINS).double()
    gaps = bins * (right - confidence)[:, None]

    def measure(weights: Tensor) -> Tensor:
        errors = torch.stack([weights @ losses, (weights @ gaps).abs().sum()]) / count
        pairs = ((labels, weights * right), (labels, weights), (predicted, weights))
        counts = (classes.bincount(values, num_classes) for classes, values in pairs)
        return torch.cat([errors, _means_of_classes(*counts)])

    loss, (low, high), *of_classes = bootstrap(measure, count).tolist()
    _, ece, *means = measure(torch.ones_like(losses)).tolist()
    # The gap of a bin of a calibrated model is normal, its absolute value half-normal.
    spread = ((confidence * (1 - confidence)) @ bins).sqrt() / count
    mean = math.sqrt(2 / math.pi)  # of a half-normal variable, whose variance is 1 - mean^2
    usual = mean * spread.sum().item() + Z * math.sqrt(1 - mean**2) * spread.norm().item()
    lowest = 0.0 if ece <= usual else max(0.0, 2 * ece - high)
    recall, f1 = (
        interval_of_mean(mean, (above - below) / (2 * Z), count)
        for mean, (below, above) in zip(means, of_classes, strict=True)
    )
    errors = {"loss_95": loss, "ece_95": (lowest, max(0.0, 2 * ece - low))}
    return errors | {"balanced_accuracy_95": recall, "macro_f1_95": f1}


def reliability(probabilities: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """Compare confidence with accuracy in 15 bins of equal width (arXiv 1706.04599).

    Returns n, mean confidence, accuracy and accuracy_95 for each bin that contains images. The mean
    gap, weighted by n, is the expected calibration error (ECE).
    """
    confidence, predicted = probabilities.max(dim=1)
    right, bins, rows = predicted == labels, bin_of(confidence), []
    for number in bins.unique().tolist():
        inside = bins == number
        hits, count = int((right & inside).sum()), int(inside.sum())
        mean = confidence[inside].double().mean().item()
        rows.append({"n": count, "confidence": mean, **fraction("accuracy", hits, count)})
    return rows


def bin_of(confidence: Tensor) -> Tensor:
    """Return the bin, 0 to 14, of each of the confidences (N,)."""
    return (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
