"""Faithfulness of kinds of map: how the prediction changes when important patches are hidden.

Hidden patches get the mean colour of the training images, which is 0 after normalization, or
another filling (`benchmarks/maps/filling.py` has some). Inserting the k most important patches into
an image that is filled everywhere is the same as deleting all others, so one set of forward passes
gives both curves. Compare every map with `baselines`: objects are usually in the middle.

Shapes: B images, K levels, P patches.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.maps import DEFAULTS, title_of
from vit.explain.references import mean_colour, to_patches, to_pixels
from vit.intervals import mean_interval
from vit.model.attention_model import require_attention
from vit.reporting.tables import text_table
from vit.seeding import generator

LEVELS = tuple(percent / 100 for percent in range(10, 100, 10))  # fractions of hidden patches
BASELINES = {"random": "random", "centred": "centred Gaussian"}
METRICS = {  # the arrow says whether lower or higher is better
    "deletion": "deletion ↓",
    "insertion": "insertion ↑",
    "lerf_morf": "(LeRF−MoRF)/2 ↑",
    "over_centred": "over centred ↑",
    "pointing": "pointing ↑",
}

Filling = Callable[[Tensor, Tensor], Tensor]  # images, hidden pixels (B, 1, H, W) -> images
Table = dict[str, dict[str, tuple[float, float]]]  # mean and half the width of its 95% interval


def score_maps(
    classifier: Classifier,
    images: ImageSet,
    maps: Mapping[str, Tensor],
    target: Tensor,
    batch_size: int,
    seed: int,
    fill: Filling = mean_colour,
) -> Table:
    """Measure the faithfulness of maps (B, rows, columns) by kind, and of two baselines.

    The maps explain the classes `target`, (B,) int64. Maps of pixels are averaged over each patch
    before patches are hidden. If the B images have masks, the maps are compared with them too. The
    seed is for the random baseline. "over_centred" is the paired difference to the centred map in
    (LeRF - MoRF) / 2.
    """
    inputs = classifier.normalize(images.pixels())
    grid = require_attention(classifier.model).patch_embed.grid(*inputs.shape[-2:])
    by_patch = {kind: to_patches(values.cpu(), grid) for kind, values in maps.items()}
    by_patch |= baselines(len(images), grid, seed)
    passes = 2 * len(LEVELS) * len(by_patch) * len(images)
    scores = {}
    with tqdm(total=passes, desc="faithfulness", unit="image", leave=False, disable=None) as bar:

        def classify(part: Tensor) -> Tensor:
            bar.update(len(part))
            return classifier.forward(part)

        for kind, values in by_patch.items():
            curves = hiding_curves(classify, inputs, values, target, LEVELS, batch_size, fill)
            scores[kind] = faithfulness(*curves)
    for kind, metrics in scores.items():
        if kind != "centred":
            metrics["over_centred"] = metrics["lerf_morf"] - scores["centred"]["lerf_morf"]
        if images.masks is not None:
            metrics["pointing"] = pointing_game({**by_patch, **maps}[kind].cpu(), images.masks)
    return {
        kind: {metric: mean_interval(values) for metric, values in metrics.items()}
        for kind, metrics in scores.items()
    }


def baselines(count: int, grid: tuple[int, int], seed: int) -> dict[str, Tensor]:
    """Return maps that know nothing of an image, (count, rows, columns) each, 0 to 1.

    "random" is noise; "centred" is a Gaussian whose deviation is a quarter of each side.
    """
    places = [(torch.arange(n) + 0.5 - n / 2) / (n / 4) for n in grid]
    down, across = (torch.exp(-0.5 * place**2) for place in places)
    return {
        "random": torch.rand(count, *grid, generator=generator(seed, "random maps")),
        "centred": (down[:, None] * across).expand(count, -1, -1),
    }


@torch.no_grad()
def hiding_curves(
    classify: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    target: Tensor,
    levels: Sequence[float] = LEVELS,
    batch_size: int = 500,
    fill: Filling = mean_colour,
) -> tuple[Tensor, Tensor]:
    """Measure the probability of a class while more and more patches are hidden.

    Args:
        classify: Maps normalized images to logits, such as `Classifier.forward`.
        images: (B, channels, H, W), normalized.
        maps: (B, rows, columns); of equally important patches, the first counts as more important.
        target: (B,) int64, the class.
        levels: K fractions of the patches to hide, 0 to 1.
        fill: Replaces hidden pixels of all B images.

    Returns:
        The class's probability with the most important patches hidden first (MoRF), and with the
        least important hidden first (LeRF), each (K, B), on the CPU.
    """
    count = maps[0].numel()
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1).unflatten(1, maps.shape[1:]).to(images.device)
    rank = to_pixels(rank, images.shape[-2:])
    target = target.to(images.device)

    def probability(hidden: Tensor) -> Tensor:
        filled = fill(images, hidden).split(batch_size)
        probabilities = torch.cat([classify(part).softmax(dim=1) for part in filled])
        return probabilities.gather(1, target[:, None])[:, 0].cpu()

    hidden = [round(level * count) for level in levels]
    morf = torch.stack([probability(rank < number) for number in hidden])
    lerf = torch.stack([probability(rank >= count - number) for number in hidden])
    return morf, lerf


def faithfulness(morf: Tensor, lerf: Tensor) -> dict[str, Tensor]:
    """Compute the faithfulness (B,) of each image's map from its curves, see `hiding_curves`.

    "deletion" is the mean over levels of the MoRF curve (lower is better), and "insertion" that of
    the LeRF curve (higher is better), which is the insertion curve read backwards if the levels are
    symmetric around 0.5. "lerf_morf" is half their difference, -0.5 to 0.5: 0 on average for a
    random map.
    """
    deletion, insertion = morf.mean(dim=0), lerf.mean(dim=0)
    return {"deletion": deletion, "insertion": insertion, "lerf_morf": (insertion - deletion) / 2}


def pointing_game(maps: Tensor, masks: Tensor) -> Tensor:
    """Test whether the strongest patch is on the object (arXiv 1608.00507, for patches).

    Maps are (B, rows, columns), and masks (B, H, W) bool, True on the object. The result (B,) is 1
    if the object covers at least half of the strongest patch, otherwise 0, and the mean over
    patches that are equally strong.
    """
    covered = to_patches(masks.float(), (maps.shape[1], maps.shape[2])) >= 0.5
    strongest = maps == maps.amax(dim=(1, 2), keepdim=True)
    return (strongest & covered).sum(dim=(1, 2)) / strongest.sum(dim=(1, 2))


def as_table(table: Table, count: int, rollout: RolloutOptions = DEFAULTS) -> str:
    """Format the result of `score_maps` as text."""
    metrics = [m for m in METRICS if any(m in values for values in table.values())]
    rows = [["map", *(METRICS[metric] for metric in metrics)]]
    for kind, values in table.items():
        if entry := ALL_KINDS.get(kind):
            name = title_of(kind, rollout) + ("" if entry.class_specific else ", class-agnostic")
        else:
            name = f"{BASELINES[kind]} (baseline)"
        pairs = (values.get(metric) for metric in metrics)
        rows.append([name, *("{:.3f} ± {:.3f}".format(*pair) if pair else "–" for pair in pairs)])
    title = f"faithfulness of the maps for the predicted class: {count:,} test images, "
    return "\n".join([f"{title}mean ± 95% interval", *text_table(rows)])
