"""Faithfulness of kinds of map on test images, as a table."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.faithfulness import (
    LEVELS,
    Filling,
    baselines,
    faithfulness,
    hiding_curves,
    mean_colour,
    pointing_game,
    to_patches,
)
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.maps import DEFAULTS
from vit.intervals import mean_interval
from vit.model.attention_model import require_attention
from vit.reporting.tables import text_table

BASELINES = {"random": "random", "centred": "centred Gaussian"}
METRICS = {  # the arrow says whether lower or higher is better
    "deletion": "deletion ↓",
    "insertion": "insertion ↑",
    "lerf_morf": "(LeRF−MoRF)/2 ↑",
    "over_centred": "over centred ↑",
    "pointing": "pointing ↑",
}

Table = dict[str, dict[str, tuple[float, float]]]  # mean and half the width of its 95% interval


def measure_maps(
    classifier: Classifier,
    images: ImageSet,
    kinds: Sequence[str],
    batch_size: int,
    seed: int,
    rollout: RolloutOptions = DEFAULTS,
) -> Table:
    """Measure the faithfulness of kinds of map for the predicted class, see `score_maps`."""
    logits, maps = classifier.maps(
        images.pixels(), kinds, None, classifier.precision, batch_size, rollout
    )
    return score_maps(classifier, images, maps, logits.argmax(dim=1), batch_size, seed)


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
            values = maps[kind].cpu() if kind in maps else by_patch[kind]
            metrics["pointing"] = pointing_game(values, images.masks)
    return {
        kind: {metric: mean_interval(values) for metric, values in metrics.items()}
        for kind, metrics in scores.items()
    }


def as_table(table: Table, count: int) -> str:
    """Format the result of `measure_maps` as text."""
    metrics = [m for m in METRICS if any(m in values for values in table.values())]
    rows = [["map", *(METRICS[metric] for metric in metrics)]]
    for kind, values in table.items():
        if entry := ALL_KINDS.get(kind):
            name = entry.title + ("" if entry.class_specific else ", class-agnostic")
        else:
            name = f"{BASELINES[kind]} (baseline)"
        pairs = (values.get(metric) for metric in metrics)
        rows.append([name, *("{:.3f} ± {:.3f}".format(*pair) if pair else "–" for pair in pairs)])
    title = f"faithfulness of the maps for the predicted class: {count:,} test images, "
    return "\n".join([f"{title}mean ± 95% interval", *text_table(rows)])
