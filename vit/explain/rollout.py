"""Maps from attention weights: attention rollout and related methods.

Each layer is a matrix that says how much each token takes from every other token. A map follows the
classifier's input, the class token or the mean of the patch tokens, back through these matrices.
That is one row vector times matrices, last layer first, and N times cheaper than multiplying the
matrices.

All functions take weights, readout and num_prefix_tokens as `attention_rollout` does, and raise a
ValueError for an unknown readout, or for "class_token" without prefix tokens. Gradients of a logit
have the layout of the weights.

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), P patches, C classes.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from einops import reduce
from torch import Tensor

from vit.explain.kinds import HeadFusion
from vit.settings import require

Readout = Literal["class_token", "mean"]
Layers = Tensor | Sequence[Tensor]


def fuse_heads(
    layer: Tensor, num_prefix_tokens: int, head_fusion: HeadFusion, discard_ratio: float
) -> Tensor:
    """Fuse the heads of a layer (B, H, N, N) into a row-stochastic matrix (B, N, N) float32.

    Negative weights, as in differential attention, count as zero. Attention to prefix tokens is
    never discarded, and equal weights are kept or discarded together. A row with no weights left
    attends to itself.
    """
    fused = reduce(layer.float().clamp(min=0), "b h q k -> b q k", head_fusion)
    if discard_ratio > 0:
        to_patches = fused[..., num_prefix_tokens:]
        flat = to_patches.flatten(1)
        lowest_kept = flat.kthvalue(int(discard_ratio * flat.shape[1]) + 1).values[:, None, None]
        kept = to_patches.masked_fill(to_patches < lowest_kept, 0.0)
        fused = torch.cat([fused[..., :num_prefix_tokens], kept], dim=-1)
    total = fused.sum(dim=-1, keepdim=True)
    return torch.where(total == 0, torch.eye(fused.shape[-1], device=fused.device), fused / total)


def attention_rollout(
    weights: Layers,
    *,
    readout: Readout,
    num_prefix_tokens: int,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> Tensor:
    """Compute attention rollout (arXiv 2005.00928).

    The heads of each layer are fused, and the product of all layers 0.5 A + 0.5 I is taken, which
    weighs the residual connection as much as the attention. The result does not depend on a class:
    it shows where information came from, not what it is evidence for.

    Args:
        weights: (L, B, H, N, N), first layer first; a tensor or a sequence of L tensors.
        readout: What the classifier reads: "class_token" for the first token, "mean" for the mean
            of the patch tokens.
        num_prefix_tokens: Tokens before the patches (class token and registers).
        head_fusion: "mean", as in the paper, "max" or "min" over the heads.
        discard_ratio: Fraction of an image's weights to patches that is set to zero in each layer,
            lowest first; at least 0 and less than 1.
        start_layer: First layer to include, 0 to L - 1.

    Returns:
        (B, P) float32, 0 to 1: the fraction that comes from each patch. The fractions of patches
        and prefix tokens together sum to 1.

    Raises:
        ValueError: An option is out of range, or readout is "class_token" without prefix tokens.
    """
    check_rollout_options(head_fusion, discard_ratio, start_layer, len(weights))
    row = _start_row(weights[0], readout, num_prefix_tokens)
    for layer in reversed(weights[start_layer:]):
        fused = fuse_heads(layer, num_prefix_tokens, head_fusion, discard_ratio)
        row = 0.5 * (row @ fused) + 0.5 * row  # half attention, half residual connection
    return row[:, 0, num_prefix_tokens:]


def gradient_rollout(
    weights: Layers, gradients: Layers, *, readout: Readout, num_prefix_tokens: int
) -> Tensor:
    """Compute `attention_rollout` of the attention that supports a class: (B, P) float32, 0 to 1.

    The heads are fused to mean(relu(∇A ⊙ A)), with rows scaled to sum to 1. This is the weighting
    of arXiv 2012.09838, with attention in place of relevance.
    """
    pairs = zip(weights, gradients, strict=True)
    products = [layer.detach().float() * gradient.float() for layer, gradient in pairs]
    return attention_rollout(products, readout=readout, num_prefix_tokens=num_prefix_tokens)


def class_relevance(
    weights: Layers, gradients: Layers, *, readout: Readout, num_prefix_tokens: int
) -> Tensor:
    """Compute the relevance of each patch to a class (arXiv 2103.15679, eq. 5 and 6).

    Relevance R starts as the identity, and each layer adds mean(relu(∇A ⊙ A)) R, with the mean over
    heads. The result (B, P), float32, at least 0, is the row of R - I that the classifier reads:
    the identity is the same for every patch and would hide the attention. It has no unit, because
    a path through several layers multiplies their gradients.
    """
    start = _start_row(weights[0], readout, num_prefix_tokens)
    # R - I is accumulated on its own: subtracting I at the end would cancel small relevances.
    added = torch.zeros_like(start)
    for layer, gradient in zip(reversed(weights), reversed(gradients), strict=True):
        support = (layer.detach().float() * gradient.float()).relu().mean(dim=1)  # (B, N, N)
        added = added + (start + added) @ support
    return added[:, 0, num_prefix_tokens:]


def head_maps(weights: Layers, *, readout: Readout, num_prefix_tokens: int) -> Tensor:
    """Return the attention of each head to the patches: (L, B, H, P) float32, 0 to 1."""
    row = _start_row(weights[0], readout, num_prefix_tokens)[:, None]
    return torch.stack([row @ layer.float() for layer in weights])[..., 0, num_prefix_tokens:]


def raw_attention(weights: Layers, *, readout: Readout, num_prefix_tokens: int) -> Tensor:
    """Return the last layer's attention to the patches, mean over heads: (B, P) float32, 0 to 1."""
    last = head_maps(weights[-1:], readout=readout, num_prefix_tokens=num_prefix_tokens)
    return last[0].mean(dim=1)


@torch.enable_grad()
def attention_gradients(
    logits: Tensor, weights: Sequence[Tensor], target: Tensor, keep_graph: bool = False
) -> tuple[Tensor, ...]:
    """Differentiate logits (B, C) of the target classes (B,) by the weights that they depend on.

    A single backward pass serves the whole batch, because in evaluation mode an image's logits do
    not depend on the other images. keep_graph leaves the graph for another class. Constant weights
    have gradients of zero; so that no others seem constant, the images must require gradients if
    parameters are frozen.

    Raises:
        ValueError: The logits do not depend on the weights, such as a stack of them.
    """
    chosen = logits.gather(1, target[:, None]).sum()
    free = [layer if layer.requires_grad else layer.detach().requires_grad_() for layer in weights]
    found = torch.autograd.grad(chosen, free, retain_graph=keep_graph, allow_unused=True)
    if any(layer.requires_grad for layer in weights) and all(part is None for part in found):
        hint = "pass those of forward_intermediates, layer by layer, as they are"
        raise ValueError(f"weights: the logits do not depend on these tensors; {hint}")
    pairs = zip(found, free, strict=True)
    return tuple(torch.zeros_like(layer) if part is None else part for part, layer in pairs)


def _start_row(layer: Tensor, readout: Readout, num_prefix_tokens: int) -> Tensor:
    """Return the weight of each token in the classifier's input, (B, 1, N) float32."""
    require(readout in ("class_token", "mean"), "readout", readout, "class_token or mean")
    fits, allowed = readout == "mean" or num_prefix_tokens > 0, "at least 1 with class_token"
    require(fits, "num_prefix_tokens", num_prefix_tokens, allowed)
    row = torch.zeros(layer.shape[0], 1, layer.shape[-1], device=layer.device)
    read = slice(1) if readout == "class_token" else slice(num_prefix_tokens, None)
    row[..., read] = 1.0 / row[..., read].shape[-1]
    return row


def check_rollout_options(
    head_fusion: str, discard_ratio: float, start_layer: int, depth: int
) -> None:
    """Check options of `attention_rollout` for a model of `depth` layers."""
    require(head_fusion in ("mean", "max", "min"), "head_fusion", head_fusion, "mean, max or min")
    require(0 <= discard_ratio < 1, "discard_ratio", discard_ratio, "at least 0 and less than 1")
    allowed = f"a layer of this model, 0 to {depth - 1}"
    require(0 <= start_layer < depth, "start_layer", start_layer, allowed)
