"""Attention in numbers: how widely each head looks, how far, and whether one token draws it all.

Shapes: L layers, B batch, H heads, N tokens (prefix and patches), D token width.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attention_entropy(weights: Sequence[Tensor]) -> Tensor:
    """Measure how evenly heads spread their attention.

    Args:
        weights: L of (B, H, N, N), rows summing to 1.

    Returns:
        (L, H): the entropy of a row over log N, mean over rows and images; 0 looks at one token, 1
        at all alike.
    """
    most = math.log(weights[0].shape[-1]) or 1.0  # a single token has no entropy to lose
    return torch.stack(
        [torch.special.entr(layer.float()).sum(dim=-1).mean(dim=(0, 2)) / most for layer in weights]
    )


def attention_distance(
    weights: Sequence[Tensor], grid_size: tuple[int, int], patch_size: int, num_prefix_tokens: int
) -> Tensor:
    """Measure how far heads look (arXiv 2010.11929, fig. 7).

    What is paid to prefix tokens, which have no place, is dropped and the rest made to sum to 1.

    Args:
        weights: L of (B, H, N, N), rows summing to 1.
        grid_size: Rows and columns of patches.
        patch_size: Pixels on a side of a patch.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (L, H): pixels between the middles of patches, weighted by attention, mean over patches and
        images.
    """
    rows, columns = (torch.arange(n, device=weights[0].device) for n in grid_size)
    places = torch.cartesian_prod(rows, columns).float() * patch_size
    distance = (places[:, None] - places[None]).norm(dim=-1)
    patches = slice(num_prefix_tokens, None)
    result = []
    for layer in weights:
        among = layer[..., patches, patches].float()
        far = (among * distance).sum(dim=-1) / among.sum(dim=-1).clamp(min=1e-30)
        result.append(far.mean(dim=(0, 2)))
    return torch.stack(result)


def sink_mass(weights: Sequence[Tensor]) -> Tensor:
    """Measure how much attention goes to the token that gets most of it (arXiv 2309.17453).

    Args:
        weights: L of (B, H, N, N), rows summing to 1.

    Returns:
        (L, H): share of all attention, 1 / N to 1, mean over images.
    """
    return torch.stack([layer.float().mean(dim=2).amax(dim=-1).mean(dim=0) for layer in weights])


def largest_patch_norm(tokens: Sequence[Tensor], num_prefix_tokens: int) -> Tensor:
    """Measure the largest patch token after each layer: outliers serve as registers.

    Args:
        tokens: L of (B, N, D), after each layer (see arXiv 2309.16588).
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (L,): the largest Euclidean norm among an image's patch tokens, mean over images.
    """
    patches = [layer[:, num_prefix_tokens:].float() for layer in tokens]
    return torch.stack([layer.norm(dim=-1).amax(dim=1).mean() for layer in patches])
