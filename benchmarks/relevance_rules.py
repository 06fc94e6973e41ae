"""Rules of layer-wise relevance, compared on held-out training images.

    python benchmarks/relevance_rules.py RUN ... [--images 400]

For each run and variant of the rules: (LeRF - MoRF) / 2 over a centred Gaussian, image by image, of
the relevance of tokens as it is and averaged over neighbours, of relevance x rollout, and of the
relevance of pixels, summed over patches; for data with masks, the pointing game too. A gamma rule
adds gamma times the terms that have the sign of their sum to all terms (arXiv 1910.09840).
"""

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.cli import user_errors
from vit.data.datasets import load_training
from vit.explain.faithfulness import mean_interval, pointing_game, score_maps, with_baselines
from vit.explain.filling import to_patches
from vit.explain.lrp import RULES, propagate, smooth, token_relevance
from vit.explain.maps import attention_maps
from vit.model.attention_model import require_attention
from vit.reporting.config import EvalConfig
from vit.reporting.loading import load_run

Rule = Callable[..., Tensor]


def gamma_rule(gamma: float) -> Rule:
    """Return a rule for linear layers and convolutions; 0 is plain proportion."""
    emphasis = gamma / (2 + gamma)  # terms of one sign are half of all terms and their sizes

    def rule(
        function: Rule,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        y = function(x, weight, bias, *args, **kwargs)
        size = function(
            x.abs(), weight.abs(), bias if bias is None else bias.abs(), *args, **kwargs
        )
        raised = y + emphasis * y.detach().sign() * size
        return raised * (y / raised).detach().nan_to_num(1.0)

    return rule


ATTENTION = (F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax)
VARIANTS: dict[str, tuple[dict[Rule, Rule], tuple[Rule, ...]]] = {  # rules added, and left out
    "the rules of vit.explain.lrp": ({}, ()),
    "convolutions: plain proportion": ({}, (F.conv2d, F.batch_norm)),
    "linear layers: gamma 0.05": ({F.linear: gamma_rule(0.05)}, ()),
    "linear layers: gamma 0.25": ({F.linear: gamma_rule(0.25)}, ()),
    "attention: weights not fixed": ({}, ATTENTION),
    "layer norm: deviation not fixed": ({}, (F.layer_norm,)),
    "GELU: ratio not fixed": ({}, (F.gelu,)),
    "input x gradient: no rule": ({}, tuple(RULES)),
}


@contextlib.contextmanager
def rules_changed(added: dict[Rule, Rule], left_out: tuple[Rule, ...]) -> Iterator[None]:
    """Change the rules for a while."""
    changed = {function: rule for function, rule in RULES.items() if function not in left_out}
    with patch.dict(RULES, changed | added, clear=True):
        yield


def relevance_maps(model: torch.nn.Module, images: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Compute the maps that are compared, (B, rows, columns) each."""
    reader = require_attention(model)
    grid = reader.patch_embed.grid(*images.shape[-2:])
    _, (relevance,), _ = token_relevance(reader, images, [target])
    tokens = relevance[0][:, reader.num_prefix_tokens :].unflatten(1, grid)
    return {
        "tokens": tokens,
        "tokens, averaged": smooth(tokens),
        "x rollout": attention_maps(model, images, ["lrp_rollout"], target)[1]["lrp_rollout"],
        "pixels": to_patches(propagate(model, images, target)[1].sum(dim=1), grid),
    }


def compare(run: str, count: int) -> None:
    """Print a table for a run."""
    saved = load_run(run, EvalConfig())
    classifier, config = saved.classifier, saved.config
    _, held_out = load_training(config.data, config.train.seed, classifier.preprocess)
    images = held_out.select(torch.arange(min(count, len(held_out)))).in_memory()
    inputs = classifier.normalize(images.pixels())
    target = classifier.forward(inputs).argmax(dim=1)
    print(f"\n{saved.describe()}: {len(images)} held-out training images\n")
    shown = ["tokens", "tokens, averaged", "x rollout", "pixels"]
    print("| rules | " + " | ".join(shown) + " |\n" + "|---" * (1 + len(shown)) + "|")
    for name, (added, left_out) in VARIANTS.items():
        with rules_changed(added, left_out):
            maps = relevance_maps(classifier.model, inputs, target)
        scores = score_maps(classifier.forward, inputs, with_baselines(maps, 0), target)
        cells = []
        for kind in shown:
            over = scores[kind]["lerf_morf"] - scores["centred"]["lerf_morf"]
            cell = "{:+.3f} ± {:.3f}".format(*mean_interval(over))
            if images.masks is not None:
                cell += f", {pointing_game(maps[kind], images.masks).mean():.3f}"
            cells.append(cell)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    """Compare the rules on every run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--images", type=int, default=400)
    arguments = parser.parse_args()
    with user_errors():
        for run in arguments.runs:
            compare(run, arguments.images)


if __name__ == "__main__":
    main()
