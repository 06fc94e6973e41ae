"""Attention statistics: entropy, distance, offsets and sinks of each head, and token norms.

Those of heads are (L, H, ...) float32, means over images, of L attention weights (B, H, N, N).

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), D token width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.model.positions import coordinates


def _fractions(layer: Tensor) -> Tensor:
    """Return finite weights as fractions of each row's sum, negative ones as 0."""
    positive = layer.float().clamp(min=0)
    positive = positive / positive.amax(dim=-1, keepdim=True).clamp(min=1e-30)  # sums are finite
    return positive / positive.sum(dim=-1, keepdim=True).clamp(min=1)


def attention_entropy(weights: Sequence[Tensor]) -> Tensor:
    """Compute the entropy of each head's attention, mean over rows, divided by its maximum, log N.

    It is 0 if every token attends to a single token, and 1 if attention is uniform.
    """
    maximum = math.log(weights[0].shape[-1]) or 1.0  # log 1 is 0, and so is the entropy
    entropies = [torch.special.entr(_fractions(layer)).sum(dim=-1) for layer in weights]
    return torch.stack([layer.mean(dim=(0, 2)) / maximum for layer in entropies])


def attention_distance(
    weights: Sequence[Tensor], grid: tuple[int, int], patch_size: int, num_prefix_tokens: int
) -> Tensor:
    """Compute the mean attention distance of each head in pixels (arXiv 2010.11929, fig. 7).

    That is the distance between patch centres weighted by attention, mean over patches. Prefix
    tokens have no position: attention to them is ignored, and that to the patches sums to 1.
    """
    positions = torch.stack(coordinates(grid, weights[0].device), dim=1).float() * patch_size
    distance = (positions[:, None] - positions[None]).norm(dim=-1)
    patches = slice(num_prefix_tokens, None)
    means = []
    for layer in weights:
        to_patches = _fractions(layer)[..., patches, patches]
        total = to_patches.sum(dim=-1).clamp(min=1e-30)
        means.append(((to_patches * distance).sum(dim=-1) / total).mean(dim=(0, 2)))
    return torch.stack(means)


def attention_by_offset(
    weights: Sequence[Tensor], grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """Average each head's attention over all pairs of patches with the same offset, key - query.

    Prefix tokens have no position: attention from and to them is left out.

    Returns:
        (L, H, 2 rows - 1, 2 columns - 1), 0 to 1: row offsets from 1 - rows to rows - 1, and column
        offsets from 1 - columns to columns - 1. The centre is attention to the query itself.
    """
    rows, columns = grid
    down, across = (x - x[:, None] for x in coordinates(grid, weights[0].device))  # (P, P)
    places = ((down + rows - 1) * (2 * columns - 1) + across + columns - 1).flatten()
    pairs, patches = places.bincount(), slice(num_prefix_tokens, None)
    means = []
    for layer in weights:
        between = layer[..., patches, patches].float().mean(dim=0).flatten(1)
        sums = between.new_zeros(len(between), len(pairs)).index_add(1, places, between)
        means.append((sums / pairs).unflatten(1, (2 * rows - 1, 2 * columns - 1)))
    return torch.stack(means)


def sink_mass(weights: Sequence[Tensor]) -> Tensor:
    """Compute the fraction of attention that goes to the attention sink (arXiv 2309.17453).

    The sink of a head and image is the token that receives the most attention.
    """
    return torch.stack([_fractions(layer).mean(dim=2).amax(-1).mean(dim=0) for layer in weights])


def largest_patch_norm(tokens: Sequence[Tensor], num_prefix_tokens: int) -> Tensor:
    """Compute the largest Euclidean norm of a patch token after each layer, mean over images: (L,).

    The tokens are L outputs of the encoder blocks, (B, N, D). Outliers are patches that the model
    uses as registers (arXiv 2309.16588).
    """
    patches = [layer[:, num_prefix_tokens:].float() for layer in tokens]
    return torch.stack([layer.norm(dim=-1).amax(dim=1).mean() for layer in patches])
