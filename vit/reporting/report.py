"""The report on the test images: metrics and figures. Training ends with the same report."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.classifier import Classifier, most_with_weights
from vit.console import warn
from vit.data.images import ImageSet
from vit.evaluation import evaluate, intervals
from vit.explain.charts import confusion_picture, reliability_picture
from vit.explain.figures import captions_of, gallery_picture
from vit.explain.lrp import propagate
from vit.files import require_file, write_json, write_picture, write_table
from vit.model.attention_model import require_attention
from vit.model_file import weights_digest
from vit.reporting.calibration import make_sets, measure_calibration, measure_sets, with_sets
from vit.reporting.loading import require_own
from vit.reporting.tables import TOP, StoredParts, columns_of
from vit.run.folder import PREDICTIONS_FILE, REPORT_FILE, REPORT_FILES
from vit.run.tracker import event_writer, picture_tag
from vit.seeding import generator
from vit.settings import parse

MISTAKES = 16  # images in the gallery
SCALARS = ("accuracy", "top5_accuracy", "balanced_accuracy", "macro_f1", "loss", "ece")


def write_report(
    classifier: Classifier,
    images: ImageSet,
    folder: Path,
    step: int,
    batch_size: int = 500,
    coverage: float | None = None,
    source: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a classifier after training `step` steps; write report, predictions and figures.

    An earlier report is replaced, except for its optional parts if they are of the same model and
    images, and for what training took if the model is the same. With a coverage, perhaps from the
    earlier report, there are sets, see `Calibration.sets`. `source` has data and root of the
    images, and whether they are the run's; `training` says what training took.

    Returns:
        The report and `intervals`, see `vit.evaluation`, with the most confident mistakes,
        calibration, see `measure_calibration`, and perhaps sets, see `measure_sets`. All other
        numbers are of the logits as trained.
    """
    result, logits = evaluate(classifier, images, batch_size)
    result |= intervals(logits, images.labels.cpu())
    about = {"date": str(date.today()), "precision": str(classifier.precision).split(".")[1]}
    digest, weights = _digest(classifier, images, logits), weights_digest(classifier.model)
    kept = _kept_parts(folder, digest, weights)
    kept |= {} if training is None else {"training": training}
    result |= {**about, "source": source, "digest": digest, "weights": weights, **kept}
    result["calibration"] = measure_calibration(classifier, images, logits, result)
    rows = prediction_rows(classifier, images, logits, torch.arange(len(images)))
    if coverage := coverage or kept.get("sets", {}).get("coverage"):
        uniform = torch.rand(len(images), generator=generator(0, "test"))
        sets = make_sets(classifier, logits, uniform, coverage)
        result["sets"] = {**about, "coverage": coverage, **measure_sets(sets, images)}
        rows = with_sets(rows, sets, logits, images.classes)
    pictures = {"reliability": reliability_picture(result["calibration"])}
    if (confusion := result["confusion_matrix"]) is not None:
        pictures["confusion_matrix"] = confusion_picture(confusion, images.classes)
    wrong = worst_mistakes(classifier.scaled(logits), images.labels, MISTAKES)
    mistakes = prediction_rows(classifier, images, logits, wrong)
    result["mistakes"] = [{k: row[k] for k in row if "_" not in k} for row in mistakes]
    if len(wrong):
        chosen = images.select(wrong).in_memory()
        pictures["mistakes"] = draw_gallery(classifier, chosen, classifier.scaled(logits[wrong]))
    folder.mkdir(parents=True, exist_ok=True)
    if kept.keys() <= {"sets", "training"}:  # no figures of optional parts are kept
        for old in (file for pattern in REPORT_FILES for file in folder.glob(pattern)):
            old.unlink()
    write_part(result, {key: result[key] for key in SCALARS}, pictures, folder, step)
    write_table(folder / PREDICTIONS_FILE, rows)
    return result


def _digest(classifier: Classifier, images: ImageSet, logits: Tensor) -> str:
    """Identify a model with its calibration, its test images, and the views of them."""
    views = 6 if classifier.shift else classifier.flip
    # Files of the same names may be of other images.
    predicted = logits.argmax(dim=1).tolist() if images.fingerprint else None
    about = images.fingerprint, images.labels.tolist(), predicted, views, classifier.calibration
    return weights_digest(classifier.model, repr(about))


def _kept_parts(folder: Path, digest: str, weights: str) -> dict[str, Any]:
    """Return the optional parts of an earlier report if it is of the same model and images.

    What training took is kept with other images too.
    """
    try:
        data = require_file(folder / REPORT_FILE).read_bytes()
        parts = parse(StoredParts, data, REPORT_FILE).model_dump(exclude_none=True)
    except (OSError, ValueError):  # no earlier report
        return {}
    same_model = parts.pop("weights") == weights
    if parts.pop("digest") == digest:
        return parts
    kept = {"training": parts.pop("training")} if same_model and "training" in parts else {}
    if parts:
        dropped = " and ".join(parts)
        warn(f"{folder}: dropped from the earlier report, of another model or images: {dropped}")
    return kept


def write_part(
    result: dict[str, Any],
    scalars: dict[str, float],
    pictures: dict[str, np.ndarray],
    folder: Path,
    step: int,
) -> None:
    """Write a report, and log and draw what it consists of."""
    # Before the figures, so that a folder with a part of a report is recognized as one.
    write_json(folder / REPORT_FILE, result)
    with event_writer(folder) as writer:
        for key, value in scalars.items():
            writer.add_scalar(f"test/{key}", value, step)
        for name, pixels in pictures.items():
            writer.add_image(picture_tag(f"test/{name}"), pixels, step, dataformats="HWC")
            write_picture(folder / f"{name}.png", pixels)


def worst_mistakes(logits: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the indices of at most `count` misclassified images, the most confident first."""
    confidence, predicted = logits.softmax(dim=1).max(dim=1)
    confidence = confidence.masked_fill(predicted == labels, -1.0)
    wrong = int((predicted != labels).sum())
    return confidence.topk(min(count, wrong)).indices


def prediction_rows(
    classifier: Classifier, images: ImageSet, logits: Tensor, indices: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield the row in predictions.csv of each of the images (N) with logits (N, C) at indices."""
    rankings = classifier.ranked(logits[indices], TOP)
    for index, ranking in zip(indices.tolist(), rankings, strict=True):
        label = {"label": images.classes[images.labels[index]]}
        yield images.entry(index) | label | columns_of("prediction", ranking)


def draw_gallery(classifier: Classifier, mistakes: ImageSet, logits: Tensor) -> np.ndarray:
    """Draw misclassified images, with logits (B, C), and maps of `contrast` if there are any."""
    pixels, classes, title = mistakes.pixels(), mistakes.classes, "most confident mistakes"
    captions = captions_of(logits, mistakes.labels, classes)
    captions = [caption.replace("\npredicted", "\nas") for caption in captions]
    names = [mistakes.name(number) for number in range(len(mistakes))]
    if not classifier.has_maps:
        return gallery_picture(title, pixels, names, captions)
    predicted = logits.argmax(dim=1)
    maps = contrast(classifier, pixels, predicted, mistakes.labels)
    title += (
        ", with what speaks for (red) and against (blue) the predicted and the true class\n"
        "layer-wise relevance of pixels, in units of its mean size for the predicted class"
    )
    headings = [
        [f"for {classes[guess]}\n(predicted)", f"for {classes[label]}\n(true)"]
        for guess, label in zip(predicted, mistakes.labels, strict=True)
    ]
    return gallery_picture(title, pixels, names, captions, maps, headings)


def contrast(classifier: Classifier, images: Tensor, predicted: Tensor, labels: Tensor) -> Tensor:
    """Return relevance of pixels, (B, 2, H, W), for the predicted and the true class, (B,) each.

    Unlike in `Classifier.maps`, both are in units of the mean absolute value for the predicted
    class, so their difference is the relevance of the difference of the two logits.
    """
    reader, inputs = require_attention(classifier.model), classifier.normalize(images)
    size = most_with_weights(classifier.model, len(images), *images.shape[2:])

    def explain(target: Tensor) -> Tensor:
        pairs = zip(inputs.split(size), target.to(inputs.device).split(size), strict=True)
        # Only with the weights are the insides of torch's module seen.
        maps = [propagate(lambda x: reader.forward_intermediates(x)[0], *pair)[1] for pair in pairs]
        return torch.cat(maps).sum(dim=1)

    relevance = torch.stack([explain(predicted), explain(labels)], dim=1)
    return relevance / relevance[:, :1].abs().mean(dim=(2, 3), keepdim=True).clamp(min=1e-30)


def require_own_report(folder: Path) -> None:
    """Raise ValueError if a report would replace files that are not of an earlier one."""
    keys = {"accuracy", "confusion_matrix", "ece"}
    require_own(folder, REPORT_FILE, keys, (REPORT_FILE, *REPORT_FILES), "a report")
