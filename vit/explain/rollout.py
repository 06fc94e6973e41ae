"""Attention rollout: what the attention of all layers together looks at.

Shapes: L layers, B batch, H heads, N tokens (prefix and patches), P patches.
"""

from typing import Literal

import torch
from torch import Tensor

from vit.model.vit import VisionTransformer


def attention_rollout(
    weights: Tensor, *, readout: Literal["class_token", "mean"], num_prefix_tokens: int
) -> Tensor:
    """Multiply the layers' attention, averaged over heads, into one map (arXiv 2005.00928).

    A layer's residual connection counts as much as its attention: each factor is 0.5 A + 0.5 I. The
    map does not know about classes: it says where information came from, not what it spoke for.

    Args:
        weights: (L, B, H, N, N), first layer first, rows summing to 1.
        readout: What the head reads: "class_token" takes the first token's row, "mean" the mean of
            the patch tokens' rows.
        num_prefix_tokens: Tokens before the patches: class token and registers.

    Returns:
        (B, P) float32: the share of each patch, 0 to 1. Prefix tokens keep what is missing to 1.

    Raises:
        ValueError: The readout is not known, or needs a class token that is not there.
    """
    if readout not in ("class_token", "mean"):
        raise ValueError(f"readout: {readout!r} is not class_token or mean")
    if readout == "class_token" and num_prefix_tokens == 0:
        raise ValueError("readout: class_token needs num_prefix_tokens of at least 1")
    identity = torch.eye(weights.shape[-1], device=weights.device)
    rollout = identity
    for layer in weights.float().mean(dim=2):
        rollout = (0.5 * layer + 0.5 * identity) @ rollout
    patches = slice(num_prefix_tokens, None)
    row = rollout[:, 0] if readout == "class_token" else rollout[:, patches].mean(dim=1)
    return row[:, patches]


@torch.no_grad()
def rollout_maps(model: VisionTransformer, images: Tensor) -> tuple[Tensor, Tensor]:
    """Classify images and map what the model attended to.

    Args:
        model: In evaluation mode.
        images: (B, 3, H, W), normalised, on the model's device.

    Returns:
        Logits (B, C), and maps (B, rows, columns) in units of uniform attention: 1 is what each
        token would get if all got the same.
    """
    logits, weights = model(images, need_weights=True)
    readout: Literal["class_token", "mean"]
    readout = "class_token" if model.global_pool == "token" else "mean"
    shares = attention_rollout(weights, readout=readout, num_prefix_tokens=model.num_prefix_tokens)
    maps = shares * weights.shape[-1]
    return logits, maps.unflatten(1, model.patch_embed.grid_size)
