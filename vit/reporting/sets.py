"""Sets of classes that contain the true one as often as asked, measured on test images."""

from typing import Any

import torch
from torch import Tensor

from vit.calibration import Calibration
from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.evaluation import wilson_interval
from vit.explain.faithfulness import mean_interval
from vit.seeding import generator


def require_calibration(classifier: Classifier) -> Calibration:
    """Return what sets of classes are made from.

    Raises:
        ValueError: The model has no calibration, or logits are not those that were calibrated.
    """
    if classifier.flip:
        raise ValueError("coverage: not together with --flip, because sets are calibrated without")
    if classifier.calibration is None:
        raise ValueError(
            "coverage: the model file has no scores of held-out images: none were held out "
            "(data.val_size=0), or this is a checkpoint or an older file; train the model again"
        )
    return classifier.calibration


def measure_sets(
    classifier: Classifier, images: ImageSet, logits: Tensor, coverage: float
) -> dict[str, Any]:
    """Measure the sets of test images (N) with logits (N, C), see `vit.calibration.set_scores`.

    Returns:
        For each kind, and in its per_class for each class that has images: coverage (0 to 1) and
        size (mean number of classes) with their 95% intervals coverage_95 and size_95.
    """
    uniform = torch.rand(len(images), generator=generator(0, "test"))
    sets = require_calibration(classifier).sets(logits, uniform, coverage)
    found, labels = {}, images.labels.cpu()
    for kind, inside in sets.items():
        hits, sizes = inside.gather(1, labels[:, None]).squeeze(1), inside.sum(dim=1)
        rows = {images.classes[label]: labels == label for label in labels.unique().tolist()}
        per_class = {name: _summary(hits[chosen], sizes[chosen]) for name, chosen in rows.items()}
        found[kind] = {**_summary(hits, sizes), "per_class": per_class}
    return {"asked": coverage, **found}


def _summary(hits: Tensor, sizes: Tensor) -> dict[str, Any]:
    covered, (size, half) = int(hits.sum()), mean_interval(sizes.double())
    return {
        "coverage": covered / len(hits),
        "coverage_95": wilson_interval(covered, len(hits)),
        "size": size,
        "size_95": (size - half, size + half),
    }


def sets_table(measured: dict[str, Any]) -> str:
    """Format the result of `measure_sets` as text."""
    lines = [f"sets with the true class for {measured['asked']:.1%} of images, 95% intervals"]
    for kind in ("lac", "raps"):
        lines.append(f"{kind.upper() + ' coverage':<28}{'classes in a set':<23}true class")
        for name, row in {"all": measured[kind], **measured[kind]["per_class"]}.items():
            (low, high), (small, large) = row["coverage_95"], row["size_95"]
            covered = f"{row['coverage']:.1%} ({low:.1%} to {high:.1%})"
            size = f"{row['size']:.2f} ({small:.2f} to {large:.2f})"
            lines.append(f"{covered:<28}{size:<23}{name}")
    return "\n".join(lines)
