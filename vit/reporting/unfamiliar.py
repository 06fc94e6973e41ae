"""Images of no class: how well a model's outputs tell them from test images."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from vit.calibration import energy
from vit.classifier import Classifier
from vit.data.config import DATASETS, DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.layout import recognize
from vit.data.photos import find_photos
from vit.data.sampling import balanced_subset
from vit.data.stream import ImageFiles
from vit.explain.charts import scores_picture
from vit.intervals import bootstrap
from vit.model_file import SavedModel
from vit.reporting.loading import warn_skipped
from vit.reporting.tables import Part, text_table, with_interval
from vit.seeding import generator
from vit.settings import require, suggest

NOISE = 2000  # images of noise
FEWEST = 10  # images in a folder
TRAINING, NEIGHBOURS = 10_000, 10  # training images, and the neighbour whose distance counts
METRICS = {"auroc": "AUROC", "aupr": "AUPR", "fpr95": "FPR at 95% recall"}


def load_unfamiliar(name: str, saved: SavedModel, root: str | None) -> ImageSet:
    """Load images of no class, of the model's size: noise, a data set's test images, or a folder.

    ValueError if they are fewer than 10, missing, or of the data set of the test images.
    """
    preprocess, data = saved.preprocess, saved.config.data
    known = ["noise", *(key for key, spec in DATASETS.items() if not spec.own_files)]
    require(name != data.name, "unfamiliar", name, "images of other classes")
    if name in known[1:]:
        # Where the user's own images are, nothing is downloaded.
        own = data.spec.own_files or (root and recognize(Path(root)))
        other = DataConfig(name=name, root=DataConfig.root if own else root or data.root)
        return open_images(other, train=False).resized(preprocess)
    images: Tensor | ImageFiles
    if name == "noise":
        shape = (NOISE, preprocess.channels, *preprocess.image_size)
        images = torch.randint(256, shape, dtype=torch.uint8, generator=generator(0, name))
    else:
        allowed = f"a folder of images or one of {', '.join(known)}{suggest(name, known)}"
        require(Path(name).is_dir(), "unfamiliar", name, allowed)
        images = ImageFiles(
            tuple(map(str, find_photos([name], "unfamiliar"))), preprocess, data.workers
        )
        problems = dict(images.problems())
        for problem in problems.values():
            warn_skipped(problem)
        readable = [number for number in range(len(images)) if number not in problems]
        images = images[torch.tensor(readable, dtype=torch.int64)]
        enough = f"a folder of at least {FEWEST} images, for meaningful intervals"
        require(len(images) >= FEWEST, "unfamiliar", name, enough)
    return ImageSet(images, torch.zeros(len(images), dtype=torch.int64), ("none",))


def report_unfamiliar(
    classifier: Classifier,
    test: ImageSet,
    others: ImageSet,
    training: ImageSet,
    name: str,
    seed: int,
    batch_size: int,
) -> Part:
    """Measure how well scores tell test images from others, see `detection`."""
    chosen = balanced_subset(training.labels, TRAINING, seed, "unfamiliar")
    sets = (training.select(chosen).resized(classifier.preprocess), test, others)
    bar = tqdm(sets, "features", unit="set", leave=False, disable=None)  # on terminals only
    vectors = (classifier.features(images, batch_size) for images in bar)
    reference, *features = (F.normalize(part, dim=1).cpu() for part in vectors)
    familiar, unfamiliar = (
        _scores(classifier.logits(images, batch_size).cpu(), part, reference)
        for images, part in zip(sets[1:], features, strict=True)
    )
    scores = {score: (familiar[score], unfamiliar[score]) for score in familiar}
    measured = {score: detection(*pair) for score, pair in scores.items()}
    rows = [["score", *METRICS.values()]]
    for score, metrics in measured.items():
        rows.append([score, *(with_interval(metrics, key, ".3f") for key in METRICS)])
    title = f"{len(test):,} test images against {len(others):,} of {name}"
    random = len(test) / (len(test) + len(others))
    about = (
        f"perfect: AUROC 1, AUPR 1, FPR 0; random: 0.500, {random:.3f}, 0.950; FPR is the "
        "fraction of unfamiliar images that are accepted with 95% of the test images"
    )
    numbers = {"images": name, "n": len(others), "seed": seed, **measured}
    pictures = {"unfamiliar": scores_picture(scores)}
    return Part("unfamiliar", numbers, "\n".join([title, *text_table(rows), about]), pictures, {})


def _scores(logits: Tensor, features: Tensor, reference: Tensor) -> dict[str, Tensor]:
    """Return scores, (N,) each, that are larger for images that look more familiar.

    "nearest neighbours" is from arXiv 2204.06507, with features (N, D) of length 1.
    """
    nearest = [
        torch.cdist(part, reference).kthvalue(min(NEIGHBOURS, len(reference))).values
        for part in features.split(500)  # limits peak memory
    ]
    return {
        "maximum softmax": logits.double().softmax(dim=1).max(dim=1).values,
        "energy": energy(logits),
        "nearest neighbours": -torch.cat(nearest).double(),
    }


def detection(familiar: Tensor, unfamiliar: Tensor) -> dict[str, Any]:
    """Measure how well scores (N,) tell familiar images, of larger scores, from unfamiliar ones.

    Returns auroc; aupr, the average precision; and fpr95, the fraction of unfamiliar images that
    are accepted with 95% of the familiar ones: 0 to 1, with 95% intervals such as auroc_95.
    """
    values, groups = (-torch.cat([familiar, unfamiliar])).unique(return_inverse=True)
    sizes = [len(familiar), len(unfamiliar)]

    def measure(*weights: Tensor) -> Tensor:
        hits, errors = (  # by threshold
            group.bincount(weight, len(values)).cumsum(0)
            for group, weight in zip(groups.split(sizes), weights, strict=True)
        )
        tpr, fpr = F.pad(hits / hits[-1], (1, 0)), F.pad(errors / errors[-1], (1, 0))
        precision = hits / (hits + errors).clamp(min=1)
        fpr95 = fpr[(tpr >= 0.95).nonzero()[0, 0]]
        return torch.stack([torch.trapezoid(tpr, fpr), tpr.diff() @ precision, fpr95])

    ones = (torch.ones(size, dtype=torch.float64) for size in sizes)
    points, intervals = measure(*ones).tolist(), bootstrap(measure, *sizes).tolist()
    keys = (*METRICS, *(f"{key}_95" for key in METRICS))
    return dict(zip(keys, points + intervals, strict=True))
