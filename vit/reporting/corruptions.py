"""The report's part on corrupted images: accuracy by kind and severity, each with its interval.

Shapes: N images.
"""

import functools
import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vit.classifier import PART, Classifier
from vit.data.corruptions import corrupt
from vit.data.datasets import choose_probes
from vit.data.images import ImageSet
from vit.evaluation import wilson_interval
from vit.explain.charts import corruption_chart, corruption_picture
from vit.files import write_atomically
from vit.model_file import SavedModel
from vit.parallel import map_on_cores
from vit.registry import CORRUPTIONS
from vit.reporting.config import ReportConfig
from vit.reporting.loading import is_ours
from vit.run.folder import CORRUPTIONS_FILE, REPORT_FILE
from vit.run.tracker import picture_tag

SEVERITIES = range(1, 6)


def report_corruptions(
    saved: SavedModel, test: ImageSet, folder: Path, result: dict[str, Any], options: ReportConfig
) -> str:
    """Measure the accuracy on corrupted test images, add it to a report, and draw it.

    Args:
        saved: The model.
        test: The test images, with labels.
        folder: The folder of the report.
        result: The report, which gets `summarize`'s result as "corruptions".
        options: The evaluation.

    Returns:
        The table.

    Raises:
        ValueError: The folder contains a corruptions.json that is not one of ours.
    """
    path, seed, clean = folder / CORRUPTIONS_FILE, options.seed, result["accuracy"]
    correct = classify_corrupted(saved.classifier, test, path, seed, options.batch_size)
    result["corruptions"] = found = summarize(correct)
    write_atomically(folder / REPORT_FILE, json.dumps(result, indent=1).encode())
    image = choose_probes(test, 1, seed).pixels()
    corrupted = {
        kind: [corrupt(image, kind, severity, seed)[0] for severity in SEVERITIES]
        for kind in CORRUPTIONS
    }
    pictures = {
        "corruptions": corruption_chart(found, clean),
        "corrupted_images": corruption_picture(image[0], corrupted),
    }
    with SummaryWriter(str(folder)) as writer:
        writer.add_scalar("test/corrupted_accuracy", found["mean"], saved.step)
        for kind, row in found["kinds"].items():
            writer.add_scalar(f"test/corruptions/{kind}", row["mean"], saved.step)
        for tag, pixels in pictures.items():
            writer.add_image(picture_tag(f"test/{tag}"), pixels, saved.step, dataformats="HWC")
            Image.fromarray(pixels).save(folder / f"{tag}.png")
    return as_table(found)


def classify_corrupted(
    classifier: Classifier, images: ImageSet, path: Path, seed: int = 0, batch_size: int = 500
) -> dict[str, Tensor]:
    """Classify images with each corruption.

    Args:
        classifier: The model.
        images: The images, with labels.
        path: A file for the results of each kind. Those of an earlier call that was interrupted are
            used if the logits of the clean images and the first corrupted image are the same.
        seed: Seed of the corruptions.
        batch_size: Most images at once.

    Returns:
        Which images are classified correctly: (1, N) bool for "clean", (5, N) for each kind.

    Raises:
        ValueError: The file is not one of ours.
    """
    labels, size = images.labels.cpu(), min(PART, batch_size)
    clean = classifier.logits_of_parts(images.parts(size), -(-len(images) // size)).cpu()
    digest, sample = hashlib.sha256(clean.numpy().tobytes()), next(images.parts(1))
    for kind, severity in itertools.product(CORRUPTIONS, SEVERITIES):
        digest.update(corrupt(sample, kind, severity, seed).numpy().tobytes())
    settings = digest.hexdigest()
    if path.exists() and not is_ours(path, {"settings", "correct"}):
        raise ValueError(f"out: {path} is not a file of a report; use another --out")
    stored = json.loads(path.read_text()) if path.exists() else {}
    finished = stored["correct"] if stored.get("settings") == settings else {}
    found = {"clean": (clean.argmax(dim=1) == labels)[None]}
    per_kind = len(SEVERITIES) * len(images)
    with tqdm(  # disable=None shows the bar on terminals only
        total=per_kind * len(CORRUPTIONS), initial=per_kind * len(finished), desc="corruptions",
        unit="image", unit_scale=True, leave=False, disable=None,
    ) as bar:  # fmt: skip

        def classify(part: Tensor, kind: str) -> Tensor:
            guesses = []
            for severity in SEVERITIES:
                corrupted = corrupt(part, kind, severity, seed)
                guesses.append(classifier.logits(corrupted, batch_size).argmax(dim=1).cpu())
                bar.update(len(part))
            return torch.stack(guesses)

        for kind in CORRUPTIONS:
            if kind not in finished:
                work, threads = functools.partial(classify, kind=kind), torch.get_num_threads()
                guesses = torch.cat(map_on_cores(work, images.parts(size), threads), dim=1)
                rows = np.packbits((guesses == labels).numpy(), axis=1)
                finished[kind] = [row.tobytes().hex() for row in rows]
                content = {"settings": settings, "correct": finished}
                write_atomically(path, json.dumps(content).encode())
            bits = np.array([list(bytes.fromhex(row)) for row in finished[kind]], dtype=np.uint8)
            rows = np.unpackbits(bits, axis=1, count=len(images))
            found[kind] = torch.from_numpy(rows).bool()
    return found


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


def as_table(summary: dict[str, Any]) -> str:
    """Format a summary as text, a row for each kind."""
    lines = [
        f"{'corruption':<16}{'severity 1':>11}{'2':>8}{'3':>8}{'4':>8}{'5':>8}"
        f"{'mean (95% interval)':>28}{'relative to clean':>26}"
    ]
    for kind, row in [*summary["kinds"].items(), ("mean", summary)]:
        cells = [f"{value:.1%}" for value in row.get("accuracy", [])] or [""] * len(SEVERITIES)
        low, high = row["mean_95"]
        line = f"{kind.replace('_', ' '):<16}{cells[0]:>11}"
        line += "".join(f"{cell:>8}" for cell in cells[1:])
        line += f"{row['mean']:>12.2%} ({low:.1%} to {high:.1%})"
        if row["relative"] is not None:
            low, high = row["relative_95"]
            line += f"{row['relative']:>10.3f} ({low:.3f} to {high:.3f})"
        lines.append(line)
    return "\n".join(lines)
