"""How much each attention head matters: what a model loses when heads are muted.

Attention weights say where a head looks, not whether the model needs it. A muted head adds nothing
to its layer's output (arXiv 1905.10650): the columns of the output projection that read it are
zero. That is exact for any attention function, and what all other heads compute stays. The bias of
the projection belongs to the layer: it is muted with the last of its heads, so that muting all of
them is the same as removing the layer's attention branch.

Shapes: L layers, H heads, G groups of heads, N images, C classes.
"""

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit.explain.faithfulness import mean_interval
from vit.model.attention_model import require_attention

Heads = tuple[tuple[int, int], ...]  # (layer, head), both counted from 0
Interval = tuple[float, float]  # mean over images and half the width of its 95% interval


@dataclass(frozen=True)
class Effect:
    """What a model loses when a group of heads is muted, paired by image.

    Attributes:
        heads: The group.
        probability: Fall of the true class's probability, -1 to 1.
        accuracy: Fall of the accuracy, -1 to 1.
    """

    heads: Heads
    probability: Interval
    accuracy: Interval


class MutableModel:
    """A copy of a model whose heads can be muted for a while.

    Args:
        model: A model whose attention can be read; it stays as it is.

    Attributes:
        model: The copy.
        shape: L and H.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        blocks: Any = require_attention(self.model).blocks
        self._biases: list[Tensor | None] = [block.attn.proj.bias for block in blocks]
        self._columns: list[list[Tensor]] = [
            list(block.attn.proj.weight.detach().chunk(block.attn.num_heads, dim=1))
            for block in blocks
        ]
        self.shape = len(self._columns), len(self._columns[0])

    @contextlib.contextmanager
    def muted(self, heads: Heads) -> Iterator[None]:
        """Mute heads within a `with` block, and the attention of layers that have no others."""
        parts = [self._columns[layer][head] for layer, head in heads]
        counts = Counter(layer for layer, _ in heads)
        for layer, bias in enumerate(self._biases):
            if counts[layer] == self.shape[1] and bias is not None:
                parts.append(bias.detach())
        kept = [part.clone() for part in parts]
        for part in parts:
            part.zero_()
        try:
            yield
        finally:
            for part, old in zip(parts, kept, strict=True):
                part.copy_(old)


def true_class(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of each image's true class, and 1 where it is predicted, else 0.

    Args:
        logits: (N, C).
        labels: (N,) int64.

    Returns:
        Two tensors (N,) float64 on the CPU.
    """
    logits, labels = logits.cpu().double(), labels.cpu()
    probability = logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return probability, (logits.argmax(dim=1) == labels).double()


def measure_heads(
    mutable: MutableModel,
    classify: Callable[[], Tensor],
    labels: Tensor,
    groups: Sequence[Heads],
    unmuted: tuple[Tensor, Tensor],
) -> list[Effect]:
    """Mute groups of heads one after the other, and measure what is lost on the same images.

    Args:
        mutable: The model.
        classify: Classifies the N images with `mutable.model` as it is: logits (N, C).
        labels: Their true classes, (N,) int64.
        groups: G groups of heads.
        unmuted: What `true_class` returns if no head is muted.
    """
    (probability, hits), effects = unmuted, []
    for heads in groups:
        with mutable.muted(heads):
            lower, fewer = true_class(classify(), labels)
        falls = mean_interval(probability - lower), mean_interval(hits - fewer)
        effects.append(Effect(heads, *falls))
    return effects


def single_heads(shape: tuple[int, int]) -> list[Heads]:
    """List the heads of L layers with H heads, as a group each."""
    return [(head,) for head in itertools.product(range(shape[0]), range(shape[1]))]


def layers_of(shape: tuple[int, int]) -> list[Heads]:
    """List the layers, as the group of their heads each."""
    return [tuple((layer, head) for head in range(shape[1])) for layer in range(shape[0])]


def pairs_of_largest(effects: Sequence[Effect], count: int) -> list[Heads]:
    """List all pairs of the heads whose muting costs most probability.

    Args:
        effects: The effect of each head.
        count: Number of heads.
    """
    ranked = sorted(effects, key=lambda effect: effect.probability[0], reverse=True)
    best = sorted(effect.heads[0] for effect in ranked[:count])
    return list(itertools.combinations(best, 2))


def as_grid(effects: Sequence[Effect], measure: str = "probability") -> Tensor:
    """Return the mean fall from the effects of all single heads, as (L, H).

    Args:
        effects: The effects of single heads.
        measure: "probability" or "accuracy".
    """
    grid = torch.zeros(*(1 + n for n in effects[-1].heads[0]))
    for effect in effects:
        grid[effect.heads[0]] = getattr(effect, measure)[0]
    return grid
