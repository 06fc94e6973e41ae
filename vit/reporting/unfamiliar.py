"""Images of no class: how well a model's outputs tell them from test images.

Shapes: N test images, M other images, D feature width.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.data.config import DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.photos import find_photos
from vit.data.sampling import balanced_subset
from vit.data.stream import ImageFiles
from vit.explain.charts import scores_picture
from vit.files import write_atomically
from vit.model_file import SavedModel
from vit.registry import DATASETS
from vit.reporting.calibration import RESAMPLES, percentiles
from vit.reporting.config import ReportConfig
from vit.reporting.loading import load_split
from vit.run.folder import REPORT_FILE
from vit.seeding import generator
from vit.settings import suggest

NOISE = 2000  # images of noise
TRAINING, NEIGHBOURS = 10_000, 10  # training images, and the neighbour whose distance counts
COMPARED_AT_ONCE = 500  # images; limits peak memory
METRICS = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR at 95% recall"}


def load_unfamiliar(name: str, saved: SavedModel, root: str | None) -> ImageSet:
    """Load images of no class, of the model's size: noise, a data set's test images, or a folder.

    Raises:
        ValueError: There are none, or the data set is missing and could not be downloaded.
    """
    preprocess, data = saved.classifier.preprocess, saved.config.data
    if name == "noise":
        shape = (NOISE, preprocess.channels, *preprocess.image_size)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator(0, name))
        return ImageSet(pixels, torch.zeros(NOISE, dtype=torch.int64), (name,))
    names = [known for known, entry in DATASETS.items() if not entry.own_files]
    if name in names:
        other = DataConfig(name=name, root=root or data.root)
        return open_images(other, train=False).resized(preprocess)
    if not Path(name).exists():
        raise ValueError(
            f"unfamiliar: {name} does not exist; it must be a folder of images, noise, or one of "
            f"{', '.join(names)}{suggest(name, names)}"
        )
    paths = find_photos([name], "unfamiliar")
    files = ImageFiles(tuple(map(str, paths)), preprocess, data.workers)
    return ImageSet(files, torch.zeros(len(paths), dtype=torch.int64), (name,))


def report_unfamiliar(
    saved: SavedModel,
    test: ImageSet,
    unfamiliar: ImageSet,
    folder: Path,
    result: dict[str, Any],
    options: ReportConfig,
) -> str:
    """Measure how well scores tell test images from others; add it to a report and draw it.

    Args:
        saved: The model.
        test: The N test images.
        unfamiliar: M images of no class.
        folder: The folder of the report.
        result: The report, which gets "unfamiliar": by score, the metrics of `detection`.
        options: The evaluation.

    Returns:
        The result as a table.

    Raises:
        ValueError: The training images cannot be read.
    """
    training = load_split(saved, options.data.root)[0]
    count = min(TRAINING, len(training))
    chosen = balanced_subset(training.labels, count, options.seed, "unfamiliar")
    training = training.select(chosen).resized(saved.classifier.preprocess)
    reference = _outputs(saved.classifier, training, "training images")[1]
    familiar = _scores(*_outputs(saved.classifier, test, "test images"), reference)
    others = _scores(*_outputs(saved.classifier, unfamiliar, "unfamiliar images"), reference)
    scores = {name: (familiar[name], others[name]) for name in familiar}
    found = {name: detection(*pair) for name, pair in scores.items()}
    result["unfamiliar"] = {"images": str(options.unfamiliar), "n": len(unfamiliar), **found}
    write_atomically(folder / REPORT_FILE, json.dumps(result, indent=1).encode())
    Image.fromarray(scores_picture(scores)).save(folder / "unfamiliar.png")
    lines = [f"{len(test):,} test images against {len(unfamiliar):,} of {options.unfamiliar}"]
    lines.append(f"{'score':<20}" + "".join(f"{title:<27}" for title in METRICS.values()).rstrip())
    for name, row in found.items():
        cells = (
            f"{row[key]:.3f} ({row[f'{key}_95'][0]:.3f} to {row[f'{key}_95'][1]:.3f})"
            for key in METRICS
        )
        lines.append(f"{name:<20}" + "".join(f"{cell:<27}" for cell in cells).rstrip())
    return "\n".join(lines)


def _outputs(classifier: Classifier, images: ImageSet, what: str) -> tuple[Tensor, Tensor]:
    """Return logits (N, C) and features of length 1 (N, D), on the CPU."""
    logits, features, size = [], [], classifier.part_size()
    for part in tqdm(images.parts(size), what, -(-len(images) // size), leave=False, disable=None):
        found = classifier.features(part)
        linear = classifier.has_linear_head
        out = classifier.logits_of_features(found) if linear else classifier.logits(part)
        logits.append(out.cpu())
        features.append(F.normalize(found, dim=1).cpu())
    return torch.cat(logits), torch.cat(features)


def _scores(logits: Tensor, features: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Return how familiar images look, (N,) each, more for larger values.

    The energy is that of arXiv 2010.03759, negated; the distance to the tenth nearest of the
    training features, that of arXiv 2204.06507, negated.
    """
    distances = [
        torch.cdist(part, reference).kthvalue(min(NEIGHBOURS, len(reference))).values
        for part in features.split(COMPARED_AT_ONCE)
    ]
    return {
        "maximum softmax": logits.double().softmax(dim=1).max(dim=1).values,
        "energy": logits.double().logsumexp(dim=1),
        "nearest neighbours": -torch.cat(distances).double(),
    }


def detection(familiar: Tensor, unfamiliar: Tensor) -> dict[str, Any]:
    """Measure how well a score tells familiar images from others, with bootstrap intervals.

    Args:
        familiar: Scores (N,) of images that are to be recognized.
        unfamiliar: Scores (M,) of the others, which should be smaller.

    Returns:
        auroc; aupr, the average precision; and fpr95, the fraction of the unfamiliar images among
        the accepted when at least 95% of the familiar ones are accepted. Each is from 0 to 1, with
        its 95% interval, such as auroc_95.
    """
    values, group = (-torch.cat([familiar, unfamiliar])).unique(return_inverse=True)

    def metrics(positives: Tensor, negatives: Tensor) -> Tensor:
        """Return the three for weights (N,) and (M,) of the images."""
        accepted = [
            torch.bincount(part, weight, len(values)).cumsum(0)
            for part, weight in zip(group.split(sizes), (positives, negatives), strict=True)
        ]
        tpr, fpr = (F.pad(counts / counts[-1], (1, 0)) for counts in accepted)
        precision = accepted[0] / (accepted[0] + accepted[1]).clamp(min=1)
        area = torch.trapezoid(tpr, fpr)
        return torch.stack(
            [area, (tpr.diff() * precision).sum(), fpr[(tpr >= 0.95).nonzero()[0, 0]]]
        )

    def draw(count: int) -> Tensor:
        drawn = torch.randint(count, (count,), generator=random)
        return torch.bincount(drawn, minlength=count).double()

    sizes, random = [len(familiar), len(unfamiliar)], generator(0, "unfamiliar")
    found = metrics(*(torch.ones(size, dtype=torch.float64) for size in sizes)).tolist()
    samples = torch.stack([metrics(*map(draw, sizes)) for _ in range(RESAMPLES)])
    result = dict(zip(METRICS, found, strict=True))
    return result | {f"{key}_95": percentiles(samples[:, i]) for i, key in enumerate(METRICS)}
