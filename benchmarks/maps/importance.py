"""Do statistics of a head's attention tell how much the model needs it?

    python -m benchmarks.maps.importance RUN [RUN ...] [--images 500] [--seed 0]

Mutes each head of each run, as `eval.py RUN heads` does, and prints Spearman's rank correlation
between the fall of the true class's probability and, on the same held-out images, the head's
entropy, attention distance, sink, and weight in attention rollout: how far rollout moves without
that head (mean absolute difference, in units of uniform attention). A correlation of 1 means that
the statistic ranks the heads as muting them does. The last row is the mean over the runs with its
95% t interval.

Expect sinks to rank heads best, at about 0.6, and weight in rollout to say little.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks.tables import markdown, mean_of_runs, plus_minus
from vit.classifier import Classifier
from vit.commands.config import HeadsConfig
from vit.commands.heads import load_held_out
from vit.explain.maps import layout_of
from vit.explain.rollout import attention_rollout
from vit.explain.statistics import attention_distance, attention_entropy, sink_mass
from vit.hardware import cores_to_use
from vit.model.attention_model import require_attention
from vit.pretrained.load import load
from vit.reporting.heads import as_grid, measure_groups

BATCH = 50  # images whose attention weights are in memory at once


def weight_in_rollout(weights: Sequence[Tensor], readout: str, prefix: int) -> Tensor:
    """Return how far attention rollout moves without each head, (L, H).

    Args:
        weights: L attention weights (B, H, N, N).
        readout: See `vit.explain.rollout.attention_rollout`.
        prefix: Tokens before the patches.
    """
    layers, (count, tokens) = len(weights), weights[0].shape[1:3]
    layout: dict[str, Any] = {"readout": readout, "num_prefix_tokens": prefix}
    with_all, moved = attention_rollout(weights, **layout), torch.zeros(layers, count)
    for layer in range(layers):
        for head in range(count):
            others = [n for n in range(count) if n != head]
            fewer = [w[:, others] if n == layer else w for n, w in enumerate(weights)]
            difference = attention_rollout(fewer, **layout) - with_all
            moved[layer, head] = tokens * difference.abs().mean()
    return moved


@torch.no_grad()
def statistics_of(classifier: Classifier, pixels: Tensor) -> dict[str, Tensor]:
    """Return the statistics of the heads, (L, H) each, mean over images (N, channels, H, W)."""
    model = require_attention(classifier.model)
    grid = model.patch_embed.grid(*pixels.shape[-2:])
    size, prefix = model.patch_embed.patch_size, model.num_prefix_tokens
    sums: dict[str, Tensor] = {}
    for part in pixels.split(BATCH):
        _, weights, _ = model.forward_intermediates(classifier.normalize(part))
        found = {
            "entropy": attention_entropy(weights),
            "distance": attention_distance(weights, grid, size, prefix),
            "sink": sink_mass(weights),
            "weight in rollout": weight_in_rollout(
                weights, layout_of(model, size, size).readout, prefix
            ),
        }
        for name, values in found.items():
            sums[name] = sums.get(name, torch.zeros(())) + values.cpu() * len(part) / len(pixels)
    return sums


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders or included models")
    parser.add_argument("--images", type=int, default=500, help="held-out images (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="choice of the images (default: 0)")
    given = parser.parse_args()
    options = HeadsConfig(images=given.images, seed=given.seed)
    torch.set_num_threads(cores_to_use())
    rows, correlations = [], dict[str, list[float]]()
    for run in given.runs:
        saved = load(run, options.device, options.precision)
        images = load_held_out(saved, options)
        falls = as_grid(measure_groups(saved, images)["heads"]).flatten()
        cells = [saved.name, str(len(falls)), f"{falls.min():.4f} to {falls.max():.4f}"]
        for name, values in statistics_of(saved, images.pixels()).items():
            correlation = float(spearmanr(falls, values.flatten()).statistic)
            correlations.setdefault(name, []).append(correlation)
            cells.append(f"{correlation:+.2f}")
        rows.append(cells)
    means = [plus_minus(*mean_of_runs(found), "+.2f") for found in correlations.values()]
    rows.append(["mean", "", "", *means])
    print(markdown(["run", "heads", "fall when muted", *correlations], rows))


if __name__ == "__main__":
    main()
