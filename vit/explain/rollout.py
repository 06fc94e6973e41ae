"""Maps of what a Vision Transformer looked at: attention rollout and its relatives.

A map starts from what the head reads, the class token or the mean of the patch tokens, and goes
back through the layers: each is a matrix that says how much of a token came from which other. So it
is a row times matrices, last layer first, N times cheaper than the product of the matrices.

Shapes: L layers, B batch, H heads, N tokens (prefix and patches), P patches, C classes.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vit.hardware import autocast
from vit.model.vit import VisionTransformer

Readout = Literal["class_token", "mean"]
HeadFusion = Literal["mean", "max", "min"]

MAP_KINDS = {
    "rollout": "attention rollout",
    "gradient_rollout": "gradient rollout",
    "relevance": "class relevance",
    "raw": "last layer's attention",
}
CLASS_SPECIFIC = ("gradient_rollout", "relevance")


def map_title(kind: str, class_name: str) -> str:
    """Name a kind of map in two lines, with the class it explains, or that it explains none."""
    what = f"(for {class_name})" if kind in CLASS_SPECIFIC else "(class-agnostic)"
    return f"{MAP_KINDS[kind]}\n{what}"


def fuse_heads(
    layer: Tensor, num_prefix_tokens: int, head_fusion: HeadFusion, discard_ratio: float
) -> Tensor:
    """Make one row-stochastic matrix of a layer's heads.

    Args:
        layer: (B, H, N, N), rows summing to 1.
        num_prefix_tokens: Tokens before the patches; what is paid to them is never discarded.
        head_fusion: What is taken over the heads.
        discard_ratio: Share of an image's weights to patches, the lowest, that is set to zero, 0 up
            to, not including, 1. Equal weights stay or go together.

    Returns:
        (B, N, N) float32, each row summing to 1; a row of which nothing is left stays with itself.
    """
    fused = layer.float()
    fused = fused.mean(dim=1) if head_fusion == "mean" else getattr(fused, f"a{head_fusion}")(dim=1)
    if discard_ratio > 0:
        to_patches = fused[..., num_prefix_tokens:]
        flat = to_patches.flatten(1)
        lowest_kept = flat.kthvalue(int(discard_ratio * flat.shape[1]) + 1).values[:, None, None]
        kept = to_patches.masked_fill(to_patches < lowest_kept, 0.0)
        fused = torch.cat([fused[..., :num_prefix_tokens], kept], dim=-1)
    return _row_stochastic(fused)


def attention_rollout(
    weights: Tensor | Sequence[Tensor],
    *,
    readout: Readout,
    num_prefix_tokens: int,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> Tensor:
    """Multiply the layers' attention, fused over heads, into one map (arXiv 2005.00928).

    A layer's residual connection counts as much as its attention: each factor is 0.5 A + 0.5 I. The
    map does not know about classes: it says where information came from, not what it spoke for.

    Args:
        weights: (L, B, H, N, N), first layer first, rows summing to 1; a tensor or L of them.
        readout: What the head reads: "class_token" takes the first token's row, "mean" the mean of
            the patch tokens' rows.
        num_prefix_tokens: Tokens before the patches: class token and registers.
        head_fusion: "mean", as in the paper, "max" or "min" over the heads.
        discard_ratio: Share of the lowest weights that is left out, 0 up to 1, see `fuse_heads`.
        start_layer: The layers before it are left out, 0 to L - 1.

    Returns:
        (B, P) float32: the share of each patch, 0 to 1. Prefix tokens keep what is missing to 1.

    Raises:
        ValueError: An argument is not one of those allowed, or the readout needs a class token that
            is not there.
    """
    if head_fusion not in ("mean", "max", "min"):
        raise ValueError(f"head_fusion: {head_fusion!r} is not mean, max or min")
    if not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio: {discard_ratio} is not from 0 up to, not including, 1")
    if not 0 <= start_layer < len(weights):
        raise ValueError(f"start_layer: {start_layer} is not 0 to {len(weights) - 1}")
    row = _start_row(weights[0], readout, num_prefix_tokens)
    for number in reversed(range(start_layer, len(weights))):
        matrix = fuse_heads(weights[number], num_prefix_tokens, head_fusion, discard_ratio)
        row = _through_layer(row, matrix)
    return row[:, 0, num_prefix_tokens:]


def gradient_rollout(
    weights: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor],
    *,
    readout: Readout,
    num_prefix_tokens: int,
) -> Tensor:
    """Roll out only the attention that speaks for a class.

    As `attention_rollout`, with the heads fused to mean(relu(∇A ⊙ A)), rows summing to 1 again: the
    weighting of arXiv 2012.09838 with attention in place of its relevance.

    Args:
        weights: (L, B, H, N, N), first layer first; a tensor or L of them.
        gradients: Of the class's logit by the weights, likewise; see `attention_gradients`.
        readout: As for `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (B, P) float32: the share of each patch, 0 to 1.
    """
    row = _start_row(weights[0], readout, num_prefix_tokens)
    for number in reversed(range(len(weights))):
        matrix = _row_stochastic(_speaking_for(weights[number], gradients[number]))
        row = _through_layer(row, matrix)
    return row[:, 0, num_prefix_tokens:]


def class_relevance(
    weights: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor],
    *,
    readout: Readout,
    num_prefix_tokens: int,
) -> Tensor:
    """Add up what each patch contributes to a class (arXiv 2103.15679, eq. 5 and 6).

    R starts as the identity, and each layer adds mean(relu(∇A ⊙ A)) R, the mean over heads.

    Args:
        weights: (L, B, H, N, N), first layer first; a tensor or L of them.
        gradients: Of the class's logit by the weights, likewise; see `attention_gradients`.
        readout: As for `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (B, P) float32, 0 or more, in units of the logit: R - I, read out. Without the identity, the
        same for every patch, what attention adds can be seen.
    """
    start = row = _start_row(weights[0], readout, num_prefix_tokens)
    for number in reversed(range(len(weights))):
        row = row + row @ _speaking_for(weights[number], gradients[number])
    return (row - start)[:, 0, num_prefix_tokens:]


def head_maps(
    weights: Tensor | Sequence[Tensor], *, readout: Readout, num_prefix_tokens: int
) -> Tensor:
    """Return what each head of each layer pays to the patches: (L, B, H, P) float32, 0 to 1."""
    row = _start_row(weights[0], readout, num_prefix_tokens)[:, None]
    return torch.stack([row @ layer.float() for layer in weights])[..., 0, num_prefix_tokens:]


def raw_attention(
    weights: Tensor | Sequence[Tensor], *, readout: Readout, num_prefix_tokens: int
) -> Tensor:
    """Return the last layer's attention, mean over heads, as a map: (B, P) float32, 0 to 1."""
    last = head_maps(weights[-1:], readout=readout, num_prefix_tokens=num_prefix_tokens)
    return last[0].mean(dim=1)


def attention_gradients(
    logits: Tensor, weights: Sequence[Tensor], target: Tensor
) -> tuple[Tensor, ...]:
    """Differentiate each image's logit of a class by its attention weights, in one backward pass.

    Args:
        logits: (B, C), of a model in evaluation mode, in which images do not meet.
        weights: L of (B, H, N, N), that the logits were computed from.
        target: (B,) int64, the class for each image.

    Returns:
        L of (B, H, N, N).
    """
    return torch.autograd.grad(logits.gather(1, target[:, None]).sum(), list(weights))


def _through_layer(row: Tensor, matrix: Tensor) -> Tensor:
    """Take a row back through a layer of which half is its residual connection."""
    return 0.5 * (row @ matrix) + 0.5 * row


def _speaking_for(layer: Tensor, gradient: Tensor) -> Tensor:
    return (layer.detach().float() * gradient.float()).relu().mean(dim=1)


def _row_stochastic(matrix: Tensor) -> Tensor:
    total = matrix.sum(dim=-1, keepdim=True)
    identity = torch.eye(matrix.shape[-1], device=matrix.device)
    return torch.where(total > 0, matrix / total, identity)


def _start_row(layer: Tensor, readout: Readout, num_prefix_tokens: int) -> Tensor:
    """Return what the head reads of each token, (B, 1, N) float32, for a layer's weights."""
    if readout not in ("class_token", "mean"):
        raise ValueError(f"readout: {readout!r} is not class_token or mean")
    if readout == "class_token" and num_prefix_tokens == 0:
        raise ValueError("readout: class_token needs num_prefix_tokens of at least 1")
    batch, num_tokens = layer.shape[0], layer.shape[-1]
    row = torch.zeros(batch, 1, num_tokens, device=layer.device)
    if readout == "class_token":
        row[..., 0] = 1.0
    else:
        row[..., num_prefix_tokens:] = 1.0 / (num_tokens - num_prefix_tokens)
    return row


def readout_of(model: VisionTransformer) -> Readout:
    """Tell what a model's head reads."""
    return "class_token" if model.global_pool == "token" else "mean"


def attention_maps(
    model: VisionTransformer,
    images: Tensor,
    kinds: Sequence[str] = ("rollout",),
    target: Tensor | None = None,
    precision: torch.dtype = torch.float32,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Classify images and map what the model attended to, in one pass for all kinds of map.

    Args:
        model: In evaluation mode.
        images: (B, 3, H, W), normalised, on the model's device.
        kinds: Of `MAP_KINDS`.
        target: (B,) int64, the class that class-specific maps explain; None takes the predicted.
        precision: Of the model's matrix products; maps are made in float32.

    Returns:
        Logits (B, C) float32, and for each kind maps (B, rows, columns) in units of uniform: 1 is
        what each would get if all got the same: all tokens; for relevance, which prefix tokens get
        no share of, all patches.

    Raises:
        ValueError: A kind is not known.
    """
    if unknown := [kind for kind in kinds if kind not in MAP_KINDS]:
        raise ValueError(f"kinds: {unknown[0]!r} is not one of {', '.join(MAP_KINDS)}")
    differentiate = any(kind in CLASS_SPECIFIC for kind in kinds)
    # Weights whose parameters are frozen can be differentiated by too, if the images can.
    images = images.detach().requires_grad_(differentiate)
    with torch.set_grad_enabled(differentiate):
        with autocast(images.device, precision):
            logits, weights, _ = model.forward_intermediates(images)
        logits = logits.float()
        if differentiate:
            target = logits.argmax(dim=1) if target is None else target
            gradients = attention_gradients(logits, weights, target)
    how: Any = {"readout": readout_of(model), "num_prefix_tokens": model.num_prefix_tokens}
    maps = {}
    with torch.no_grad():
        for kind in kinds:
            if kind == "rollout":
                shares = attention_rollout(weights, **how)
            elif kind == "raw":
                shares = raw_attention(weights, **how)
            elif kind == "gradient_rollout":
                shares = gradient_rollout(weights, gradients, **how)
            else:
                relevance = class_relevance(weights, gradients, **how)
                shares = relevance / relevance.sum(dim=1, keepdim=True).clamp(min=1e-30)
            units = shares.shape[-1] if kind == "relevance" else weights[0].shape[-1]
            maps[kind] = (shares * units).unflatten(1, model.patch_embed.grid_size)
    return logits.detach(), maps
