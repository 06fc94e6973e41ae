"""Accuracy on corrupted images, for the report and for comparisons, each with its interval."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vit.classifier import PART, Classifier
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.data.severities import CORRUPTIONS
from vit.explain.charts import corruption_chart
from vit.explain.figures import corruption_picture
from vit.files import open_atomically, require_file
from vit.hardware import map_on_cores
from vit.intervals import Z, average, fraction, interval_of_mean
from vit.model.whole_attention import stores_results
from vit.reporting.tables import Part, markdown_table, text_table, with_interval
from vit.run.folder import CORRUPTIONS_FILE

SEVERITIES = range(1, 6)


def report_corruptions(
    classifier: Classifier, test: ImageSet, folder: Path, seed: int, batch_size: int
) -> Part:
    """Measure the accuracy on corrupted test images, and draw it beside that on clean ones."""
    from vit.data.corruptions import corrupt

    correct = classify_corrupted(classifier, test, folder / CORRUPTIONS_FILE, seed, batch_size)
    summary, clean = summarize(correct), correct["clean"].double().mean().item()
    image = choose_images(test, 1, seed).pixels()
    corrupted = {
        kind: [corrupt(image, kind, severity, seed)[0] for severity in SEVERITIES]
        for kind in CORRUPTIONS
    }
    pictures = {
        "corruptions": corruption_chart(summary, clean),
        "corrupted_images": corruption_picture(image[0], corrupted),
    }
    scalars = {f"corruptions/{kind}": row["mean"] for kind, row in summary["kinds"].items()}
    scalars["corrupted_accuracy"] = summary["mean"]
    return Part("corruptions", {**summary, "seed": seed}, as_table(summary), pictures, scalars)


def classify_corrupted(
    classifier: Classifier, images: ImageSet, path: Path, seed: int = 0, batch_size: int = 500
) -> dict[str, Tensor]:
    """Return which images are classified correctly: (5, N) bool by corruption, (1, N) for "clean".

    The file at `path` keeps the results. They are used again if the seed, the labels and the
    logits of the clean images are the same.
    """
    from vit.data.corruptions import corrupt  # with SciPy, which is optional

    labels, size = images.labels.cpu(), min(PART, batch_size)
    cores = 1 if stores_results(classifier.model) else torch.get_num_threads()
    clean = classifier.logits(images, batch_size).cpu()
    inputs = clean.numpy().tobytes() + labels.numpy().tobytes()
    settings = f"seed {seed}, SHA-256 {hashlib.sha256(inputs).hexdigest()}"
    correct = {"clean": (clean.argmax(dim=1) == labels)[None]}
    correct |= _read_stored(path, settings, len(images))
    # disable=None shows the bar on terminals only.
    with tqdm(CORRUPTIONS, "corruptions", unit="kind", leave=False, disable=None) as bar:
        for kind in bar:
            if kind in correct:
                continue

            def classify(part: Tensor, kind: str = kind) -> Tensor:
                changed = (corrupt(part, kind, severity, seed) for severity in SEVERITIES)
                logits = [classifier.logits(images, batch_size) for images in changed]
                return torch.stack(logits).argmax(dim=2).cpu()

            parts = map_on_cores(classify, images.images.split(size), cores)
            correct[kind] = torch.cat(parts, dim=1) == labels
            with open_atomically(path) as file:
                np.savez_compressed(file, settings=settings, **correct)  # type: ignore[arg-type]
    return correct


def _read_stored(path: Path, settings: str, count: int) -> dict[str, Tensor]:
    """Read the results of an earlier call; none, unless the file is exactly what a call writes."""
    shapes = {"clean": (1, count), **{kind: (len(SEVERITIES), count) for kind in CORRUPTIONS}}
    largest = len(SEVERITIES) * count + 1000  # bytes of results, or of the settings, and a header
    try:
        with require_file(path).open("rb") as content, np.load(content) as file:
            if any(member.file_size > largest for member in file.zip.infolist()):
                return {}
            stored = dict(file)
        fits = np.array_equal(stored.pop("settings"), settings)
        for kind, hits in stored.items():
            fits &= hits.shape == shapes[kind] and hits.dtype == np.bool_
    except Exception:  # zipfile, zlib and NumPy raise many kinds for missing and damaged files
        return {}
    return {kind: torch.from_numpy(hits) for kind, hits in stored.items()} if fits else {}


def summarize(correct: dict[str, Tensor]) -> dict[str, Any]:
    """Summarize the result of `classify_corrupted`: the mean over all corruptions, see `_mean`.

    For each of "kinds" there are also accuracy and accuracy_95, lists for the five severities.
    """
    clean = correct["clean"][0].double()
    rows = {kind: _mean(survived, clean) for kind, survived in _survived(correct).items()}
    for kind in CORRUPTIONS:
        levels = [fraction("accuracy", int(hits.sum()), len(hits)) for hits in correct[kind]]
        rows[kind] |= {key: [level[key] for level in levels] for key in levels[0]}
    return {**rows.pop("mean"), "kinds": rows}


def _survived(correct: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the fraction of corruptions that images survive, (N,), for each kind, and "mean"."""
    fractions = {kind: correct[kind].double().mean(dim=0) for kind in CORRUPTIONS}
    return fractions | {"mean": torch.stack([*fractions.values()]).mean(dim=0)}


def _mean(survived: Tensor, clean: Tensor) -> dict[str, Any]:
    """Average the fraction of its corruptions that each image survives, (N,), 0 to 1.

    Returns mean with its interval mean_95, in which an image counts once; relative, the ratio to
    the accuracy on clean images, and relative_95 by the delta method; both None if that is 0.
    """
    mean, count = survived.mean().item(), len(survived)
    error = survived.std(correction=0).item() / math.sqrt(count)
    result = {"mean": mean, "mean_95": interval_of_mean(mean, error, count)}
    on_clean = clean.mean().item()
    if on_clean == 0:
        return {**result, "relative": None, "relative_95": None}
    ratio = mean / on_clean
    error_of_ratio = (survived - ratio * clean).square().mean().sqrt().item() / on_clean
    half = Z * error_of_ratio / math.sqrt(count)
    return {**result, "relative": ratio, "relative_95": (max(0.0, ratio - half), ratio + half)}


def compare_corrupted(
    models: Mapping[str, tuple[Classifier, ImageSet]], folder: Path, seed: int, batch_size: int
) -> tuple[dict[str, Any], str]:
    """Compare the first of the models by name with the others on the same corruptions.

    Returns the result of `_mean` for each model, kind of corruption and the "mean" over kinds, with
    the difference to the first model, image by image, and difference_95; and a table in Markdown.
    """
    results: dict[str, dict[str, Any]] = {name: {} for name in models}
    survived: dict[str, Tensor] = {}  # of the first model
    for number, (name, (classifier, images)) in enumerate(models.items(), start=1):
        path = folder / f"corruptions_{number}.npz"
        correct = classify_corrupted(classifier, images, path, seed, batch_size)
        for kind, fractions in _survived(correct).items():
            difference = average("difference", fractions - survived.setdefault(kind, fractions))
            results[name][kind] = _mean(fractions, correct["clean"][0].double()) | difference
    name, *names = models
    first, *others = results.values()
    rows = [["corruption", f"{name} (95% interval)", *(f"{other} − {name}" for other in names)]]
    for kind, row in first.items():
        cells = [with_interval(other[kind], "difference", "+.1%") for other in others]
        rows.append([kind.replace("_", " "), with_interval(row, "mean", ".1%"), *cells])
    return results, markdown_table(rows)


def as_table(summary: dict[str, Any]) -> str:
    """Format a summary as text, a row for each kind."""
    heads = ["severity 1", "2", "3", "4", "5", "mean (95% interval)", "relative to clean"]
    rows = [["corruption", *heads]]
    for kind, row in [*summary["kinds"].items(), ("mean", summary)]:
        cells = [f"{value:.1%}" for value in row.get("accuracy", [])] or [""] * len(SEVERITIES)
        means = [with_interval(row, "mean", ".1%"), with_interval(row, "relative", ".3f")]
        rows.append([kind.replace("_", " "), *cells, *means])
    return "\n".join(text_table(rows))
