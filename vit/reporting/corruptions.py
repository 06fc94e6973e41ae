"""The report's part on corrupted images: accuracy by kind and severity, each with its interval.

Shapes: N images.
"""

import functools
import hashlib
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vit.classifier import PART, Classifier
from vit.data.corruptions import corrupt
from vit.data.datasets import choose_probes
from vit.data.images import ImageSet
from vit.evaluation import wilson_interval
from vit.explain.charts import corruption_chart
from vit.explain.faithfulness import mean_interval
from vit.explain.figures import corruption_picture
from vit.files import write_atomically
from vit.model_file import SavedModel
from vit.parallel import map_on_cores
from vit.registry import CORRUPTIONS
from vit.reporting.config import CompareConfig, ReportConfig
from vit.reporting.tables import Part, text_table, with_interval
from vit.run.folder import CORRUPTIONS_FILE

SEVERITIES = range(1, 6)


def report_corruptions(
    saved: SavedModel, test: ImageSet, folder: Path, clean: float, options: ReportConfig
) -> Part:
    """Measure the accuracy on corrupted test images, and draw it, see `summarize`.

    Args:
        saved: The model.
        test: The test images, with labels.
        folder: The folder of the report.
        clean: Accuracy on clean images, 0 to 1.
        options: The evaluation.
    """
    path, seed = folder / CORRUPTIONS_FILE, options.seed
    found = summarize(classify_corrupted(saved.classifier, test, path, seed, options.batch_size))
    image = choose_probes(test, 1, seed).pixels()
    corrupted = {
        kind: [corrupt(image, kind, severity, seed)[0] for severity in SEVERITIES]
        for kind in CORRUPTIONS
    }
    pictures = {
        "corruptions": corruption_chart(found, clean),
        "corrupted_images": corruption_picture(image[0], corrupted),
    }
    scalars = {f"corruptions/{kind}": row["mean"] for kind, row in found["kinds"].items()}
    scalars["corrupted_accuracy"] = found["mean"]
    return Part("corruptions", found, as_table(found), pictures, scalars)


def classify_corrupted(
    classifier: Classifier, images: ImageSet, path: Path, seed: int = 0, batch_size: int = 500
) -> dict[str, Tensor]:
    """Classify images with each corruption.

    Args:
        classifier: The model.
        images: The images, with labels.
        path: A file for the results of each kind. Those of an earlier call that was interrupted are
            used if the seed and the logits of the clean images are the same.
        seed: Seed of the corruptions.
        batch_size: Most images at once.

    Returns:
        Which images are classified correctly: (1, N) bool for "clean", (5, N) for each kind.
    """
    labels, size = images.labels.cpu(), min(PART, batch_size)
    clean = classifier.logits_of_parts(images.parts(size), -(-len(images) // size)).cpu()
    settings = f"seed {seed}, SHA-256 {hashlib.sha256(clean.numpy().tobytes()).hexdigest()}"
    found = {"clean": (clean.argmax(dim=1) == labels)[None]} | _stored(path, settings)

    def classify(part: Tensor, kind: str) -> Tensor:
        guesses = []
        for severity in SEVERITIES:
            corrupted = corrupt(part, kind, severity, seed)
            guesses.append(classifier.logits(corrupted, batch_size).argmax(dim=1).cpu())
            bar.update(len(part))
        return torch.stack(guesses)

    missing = [kind for kind in CORRUPTIONS if kind not in found]
    total = len(missing) * len(SEVERITIES) * len(images)
    # disable=None shows the bar on terminals only.
    with tqdm(total=total, desc="corruptions", unit="image", leave=False, disable=None) as bar:
        for kind in missing:
            work, threads = functools.partial(classify, kind=kind), torch.get_num_threads()
            guesses = torch.cat(map_on_cores(work, images.parts(size), threads), dim=1)
            found[kind] = guesses == labels
            file = io.BytesIO()
            np.savez_compressed(file, settings=settings, **found)  # type: ignore[arg-type]
            write_atomically(path, file.getvalue())
    return found


def _stored(path: Path, settings: str) -> dict[str, Tensor]:
    """Read the finished results of `classify_corrupted` with the same settings."""
    if not path.exists():
        return {}
    with np.load(path) as file:
        if file["settings"] != settings:
            return {}
        return {kind: torch.from_numpy(file[kind]) for kind in file if kind != "settings"}


def summarize(correct: dict[str, Tensor]) -> dict[str, Any]:
    """Summarize the result of `classify_corrupted`.

    Returns:
        For each of "kinds" its accuracy at the five severities and the intervals accuracy_95, and
        what `_mean` returns; the latter over all kinds too.
    """
    clean = correct["clean"][0].double()
    rows = {kind: correct[kind].double() for kind in CORRUPTIONS}
    kinds = {}
    for kind, hits in rows.items():
        means = [_mean(row, clean) for row in hits]
        kinds[kind] = {
            "accuracy": [mean["mean"] for mean in means],
            "accuracy_95": [mean["mean_95"] for mean in means],
            **_mean(hits.mean(dim=0), clean),
        }
    return {**_mean(torch.cat([*rows.values()]).mean(dim=0), clean), "kinds": kinds}


def _mean(correct: Tensor, clean: Tensor) -> dict[str, Any]:
    """Average what fraction of its corruptions each image survives, (N,), 0 to 1.

    Returns:
        mean and its 95% interval mean_95, where an image counts once, however often it is
        corrupted; relative, its ratio to the accuracy on clean images, and relative_95 by the delta
        method, as both are of the same images (None if no clean image is classified correctly).
    """
    mean, spread, count = correct.mean().item(), correct.var(correction=0).item(), len(correct)
    # The number of independent images that would vary as much; N for a single severity.
    effective = count * mean * (1 - mean) / spread if spread > 1e-12 else count
    result = {"mean": mean, "mean_95": wilson_interval(mean * effective, effective)}
    if not clean.any():
        return {**result, "relative": None, "relative_95": None}
    ratio = mean / clean.mean().item()
    error = (correct - ratio * clean).square().mean().sqrt().item() / clean.mean().item()
    half = 1.959964 * error / math.sqrt(count)
    return {**result, "relative": ratio, "relative_95": (max(0.0, ratio - half), ratio + half)}


def compare_corrupted(
    models: dict[str, tuple[Classifier, ImageSet]], folder: Path, options: CompareConfig
) -> tuple[dict[str, Any], str]:
    """Compare the accuracy of models by name with the same corruptions, image by image.

    Args:
        models: The models, each with the test images of its size; all are compared with the first.
        folder: A folder for the results of each model, see `classify_corrupted`.
        options: The evaluation.

    Returns:
        For each model, kind of corruption, and the "mean" over kinds: what `_mean` returns, and
        the difference to the first model with its 95% interval difference_95; and a table.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in models}
    survived: dict[str, Tensor] = {}  # of the first model
    for number, (name, (classifier, images)) in enumerate(models.items(), start=1):
        path = folder / f"corruptions_{number}.npz"
        correct = classify_corrupted(classifier, images, path, options.seed, options.batch_size)
        clean, *hits = (correct[kind].double().mean(dim=0) for kind in ("clean", *CORRUPTIONS))
        means = dict(
            zip([*CORRUPTIONS, "mean"], [*hits, torch.stack(hits).mean(dim=0)], strict=True)
        )
        for kind, fraction in means.items():
            mean, half = mean_interval(fraction - survived.setdefault(kind, fraction))
            interval = {"difference": mean, "difference_95": (mean - half, mean + half)}
            found[name][kind] = _mean(fraction, clean) | interval
    name, *names = models
    first, *others = found.values()
    rows = [["corruption", f"{name} (95% interval)", *(f"{other} − {name}" for other in names)]]
    for kind, row in first.items():
        cells = [with_interval(other[kind], "difference", "+.1%") for other in others]
        rows.append([kind.replace("_", " "), with_interval(row, "mean", ".1%"), *cells])
    return found, "\n".join(text_table(rows))


def as_table(summary: dict[str, Any]) -> str:
    """Format a summary as text, a row for each kind."""
    rows = [["corruption", "severity 1", "2", "3", "4", "5", "mean (95% interval)"]]
    rows[0].append("relative to clean")
    for kind, row in [*summary["kinds"].items(), ("mean", summary)]:
        cells = [f"{value:.1%}" for value in row.get("accuracy", [])] or [""] * len(SEVERITIES)
        relative = "–" if row["relative"] is None else with_interval(row, "relative", ".3f")
        rows.append([kind.replace("_", " "), *cells, with_interval(row, "mean", ".1%"), relative])
    return "\n".join(text_table(rows))
