"""How much each attention head matters: what a model loses when heads are muted.

Attention weights say where a head looks, not whether the model needs it. A muted head adds nothing
to its layer's output (arXiv 1905.10650), see `vit.explain.interventions`.

Shapes: L layers, H heads, N images, C classes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vit.intervals import mean_interval

Heads = tuple[tuple[int, int], ...]  # (layer, head), both counted from 0
Interval = tuple[float, float]  # mean over images and half the width of its 95% interval


@dataclass(frozen=True)
class Effect:
    """What a model loses when a group of heads is muted, paired by image."""

    heads: Heads
    probability: Interval  # fall of the true class's probability, -1 to 1
    accuracy: Interval  # fall of the accuracy, -1 to 1


def true_class(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the true class's probability, and 1 where it is predicted, (N,) float64 on the CPU."""
    logits, labels = logits.cpu().double(), labels.cpu()
    probability = logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return probability, (logits.argmax(dim=1) == labels).double()


def measure_heads(
    classify: Callable[[Tensor], Tensor],
    gates: Tensor,
    labels: Tensor,
    groups: Sequence[Heads],
    unmuted: tuple[Tensor, Tensor],
) -> list[Effect]:
    """Mute groups of heads one after the other, and measure what is lost on the same images.

    Args:
        classify: Classifies the N images with gates (L, H): logits (N, C).
        gates: (L, H), with which no head is muted.
        labels: True classes (N,) int64.
        unmuted: What `true_class` returns if no head is muted.
    """
    effects = []
    for heads in groups:
        muted = gates.clone()
        muted[tuple(zip(*heads, strict=True))] = 0
        pairs = zip(unmuted, true_class(classify(muted), labels), strict=True)
        effects.append(Effect(heads, *(mean_interval(before - after) for before, after in pairs)))
    return effects


def layers_of(layers: int, heads: int) -> list[Heads]:
    """List the layers, each as the group of its heads."""
    return [tuple((layer, head) for head in range(heads)) for layer in range(layers)]


def single_heads(layers: int, heads: int) -> list[Heads]:
    """List the heads, each as a group."""
    return [(head,) for layer in layers_of(layers, heads) for head in layer]


def pairs_of_largest(effects: Sequence[Effect], count: int) -> list[Heads]:
    """List all pairs of the `count` most important heads."""
    ranked = sorted(effects, key=lambda effect: effect.probability[0], reverse=True)
    return list(itertools.combinations(sorted(effect.heads[0] for effect in ranked[:count]), 2))


def as_grid(effects: Sequence[Effect], measure: str = "probability") -> Tensor:
    """Return the mean fall in "probability" or "accuracy" when each head is muted, (L, H)."""
    layers, heads = (1 + n for n in effects[-1].heads[0])
    falls = [getattr(effect, measure)[0] for effect in effects]
    return torch.tensor(falls).view(layers, heads)
