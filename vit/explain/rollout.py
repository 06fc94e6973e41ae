"""Attention maps of a Vision Transformer: attention rollout and related methods.

Each layer is a matrix that says how much each token takes from every other token. A map follows the
head's input, the class token or the mean of the patch tokens, back through these matrices. That is
one row vector times matrices, last layer first, and N times cheaper than multiplying the matrices.

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), P patches, C classes.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vit.explain.lrp import smooth, token_relevance
from vit.hardware import autocast
from vit.model.attention_model import AttentionModel, require_attention

Readout = Literal["class_token", "mean"]
HeadFusion = Literal["mean", "max", "min"]

MAP_KINDS = {
    "rollout": "attention rollout",
    "gradient_rollout": "gradient rollout",
    "relevance": "class relevance",
    "raw": "last layer's attention",
    "lrp": "layer-wise relevance",
    "lrp_rollout": "relevance × rollout",
}
CLASS_SPECIFIC = ("gradient_rollout", "relevance", "lrp", "lrp_rollout")
SIGNED_KINDS = ("lrp",)  # positive for the class, negative against it
BY_RULES = ("lrp", "lrp_rollout")  # need a pass with the rules of vit.explain.lrp


def map_title(kind: str, class_name: str) -> str:
    """Return a two-line title: the kind of map, and the class it explains, if any."""
    explained = f"(for {class_name})" if kind in CLASS_SPECIFIC else "(class-agnostic)"
    return f"{MAP_KINDS[kind]}\n{explained}"


def rollout_title(
    head_fusion: HeadFusion = "mean", discard_ratio: float = 0.0, start_layer: int = 0
) -> str:
    """Return the title of attention rollout, with the options that are not the default."""
    options = [
        *([f"{head_fusion} over heads"] if head_fusion != "mean" else []),
        *([f"lowest {100 * discard_ratio:.3g}% discarded"] if discard_ratio else []),
        *([f"from layer {start_layer}"] if start_layer else []),
    ]
    return MAP_KINDS["rollout"] + (f" ({', '.join(options)})" if options else "")


def fuse_heads(
    layer: Tensor, num_prefix_tokens: int, head_fusion: HeadFusion, discard_ratio: float
) -> Tensor:
    """Fuse the heads of a layer into one row-stochastic matrix.

    Args:
        layer: Attention weights (B, H, N, N), rows summing to 1.
        num_prefix_tokens: Tokens before the patches. Attention to them is never discarded.
        head_fusion: "mean", "max" or "min" over the heads.
        discard_ratio: Fraction of an image's weights to patches that is set to zero, lowest first;
            at least 0 and less than 1. Equal weights are kept or discarded together.

    Returns:
        (B, N, N) float32, each row summing to 1. A row with no weights left attends to itself.
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
    """Compute attention rollout (arXiv 2005.00928).

    The heads of each layer are fused, and the product of all layers 0.5 A + 0.5 I is taken, which
    weighs the residual connection as much as the attention. The result does not depend on a class:
    it shows where information came from, not what it is evidence for.

    Args:
        weights: Attention weights (L, B, H, N, N), first layer first, rows summing to 1; a tensor
            or a sequence of L tensors.
        readout: What the head reads: "class_token" for the first token, "mean" for the mean of the
            patch tokens.
        num_prefix_tokens: Tokens before the patches (class token and registers).
        head_fusion: "mean", as in the paper, "max" or "min" over the heads.
        discard_ratio: Fraction of the lowest weights to discard in each layer, at least 0 and less
            than 1, see `fuse_heads`.
        start_layer: First layer to include, 0 to L - 1.

    Returns:
        (B, P) float32, 0 to 1: the fraction that comes from each patch. The fractions of patches
        and prefix tokens together sum to 1.

    Raises:
        ValueError: An option is out of range, or readout is "class_token" without prefix tokens.
    """
    _check_rollout_options(head_fusion, discard_ratio, start_layer, len(weights))
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
    """Compute attention rollout from the attention that supports a class.

    Like `attention_rollout`, but the heads are fused to mean(relu(∇A ⊙ A)), with rows scaled to sum
    to 1. This is the weighting of arXiv 2012.09838, with attention in place of relevance.

    Args:
        weights: Attention weights (L, B, H, N, N), first layer first; a tensor or a sequence of L
            tensors.
        gradients: Gradients of the class's logit with respect to weights, in the same layout; see
            `attention_gradients`.
        readout: "class_token" or "mean", see `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (B, P) float32, 0 to 1: the fraction that comes from each patch.

    Raises:
        ValueError: readout is unknown, or "class_token" without prefix tokens.
    """
    row = _start_row(weights[0], readout, num_prefix_tokens)
    for number in reversed(range(len(weights))):
        matrix = _row_stochastic(_support(weights[number], gradients[number]))
        row = _through_layer(row, matrix)
    return row[:, 0, num_prefix_tokens:]


def class_relevance(
    weights: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor],
    *,
    readout: Readout,
    num_prefix_tokens: int,
) -> Tensor:
    """Compute the relevance of each patch to a class (arXiv 2103.15679, eq. 5 and 6).

    Relevance R starts as the identity, and each layer adds mean(relu(∇A ⊙ A)) R, with the mean over
    heads.

    Args:
        weights: Attention weights (L, B, H, N, N), first layer first; a tensor or a sequence of L
            tensors.
        gradients: Gradients of the class's logit with respect to weights, in the same layout; see
            `attention_gradients`.
        readout: "class_token" or "mean", see `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (B, P) float32, at least 0, in units of the logit: the row of R - I that the head reads. The
        identity is the same for every patch and would hide what attention adds.

    Raises:
        ValueError: readout is unknown, or "class_token" without prefix tokens.
    """
    start = _start_row(weights[0], readout, num_prefix_tokens)
    # R - I is accumulated on its own: subtracting I at the end would cancel small relevances.
    added = torch.zeros_like(start)
    for number in reversed(range(len(weights))):
        added = added + (start + added) @ _support(weights[number], gradients[number])
    return added[:, 0, num_prefix_tokens:]


def head_maps(
    weights: Tensor | Sequence[Tensor], *, readout: Readout, num_prefix_tokens: int
) -> Tensor:
    """Return the attention of each head to the patches, read out as in `attention_rollout`.

    Args:
        weights: Attention weights (L, B, H, N, N); a tensor or a sequence of L tensors.
        readout: "class_token" or "mean", see `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (L, B, H, P) float32, 0 to 1.

    Raises:
        ValueError: readout is unknown, or "class_token" without prefix tokens.
    """
    row = _start_row(weights[0], readout, num_prefix_tokens)[:, None]
    return torch.stack([row @ layer.float() for layer in weights])[..., 0, num_prefix_tokens:]


def raw_attention(
    weights: Tensor | Sequence[Tensor], *, readout: Readout, num_prefix_tokens: int
) -> Tensor:
    """Return the last layer's attention to the patches, mean over heads: (B, P) float32, 0 to 1.

    Arguments and errors are those of `head_maps`.
    """
    last = head_maps(weights[-1:], readout=readout, num_prefix_tokens=num_prefix_tokens)
    return last[0].mean(dim=1)


def attention_gradients(
    logits: Tensor, weights: Sequence[Tensor], target: Tensor, keep_graph: bool = False
) -> tuple[Tensor, ...]:
    """Differentiate one logit per image with respect to the attention weights.

    A single backward pass serves the whole batch, because in evaluation mode an image's logits do
    not depend on the other images.

    Args:
        logits: (B, C), from a model in evaluation mode.
        weights: L tensors (B, H, N, N) from which the logits were computed.
        target: (B,) int64, the class to differentiate for each image.
        keep_graph: Whether to keep the graph, for another class.

    Returns:
        L tensors (B, H, N, N).
    """
    chosen = logits.gather(1, target[:, None]).sum()
    return torch.autograd.grad(chosen, list(weights), retain_graph=keep_graph)


def _through_layer(row: Tensor, matrix: Tensor) -> Tensor:
    """Multiply a row by 0.5 A + 0.5 I: half attention, half residual connection."""
    return 0.5 * (row @ matrix) + 0.5 * row


def _support(layer: Tensor, gradient: Tensor) -> Tensor:
    """Return the attention that supports a class, mean(relu(∇A ⊙ A)) over heads: (B, N, N)."""
    return (layer.detach().float() * gradient.float()).relu().mean(dim=1)


def _row_stochastic(matrix: Tensor) -> Tensor:
    """Scale every row to sum to 1; a row of zeros becomes that of the identity."""
    total = matrix.sum(dim=-1, keepdim=True)
    identity = torch.eye(matrix.shape[-1], device=matrix.device)
    return torch.where(total > 0, matrix / total, identity)


def _start_row(layer: Tensor, readout: Readout, num_prefix_tokens: int) -> Tensor:
    """Return the weight of each token in the head's input, (B, 1, N) float32."""
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


def _check_rollout_options(
    head_fusion: str, discard_ratio: float, start_layer: int, depth: int
) -> None:
    if head_fusion not in ("mean", "max", "min"):
        raise ValueError(f"head_fusion: {head_fusion!r} is not mean, max or min")
    if not 0 <= discard_ratio < 1:
        raise ValueError(f"discard_ratio: {discard_ratio} is not at least 0 and less than 1")
    if not 0 <= start_layer < depth:
        raise ValueError(f"start_layer: {start_layer} is not 0 to {depth - 1}")


def readout_of(model: AttentionModel) -> Readout:
    """Return what a model's head reads, as `attention_rollout` and its relatives expect it."""
    return "class_token" if model.global_pool == "token" else "mean"


def scaled_map(
    kind: str,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    grid: tuple[int, int],
    *,
    readout: Readout,
    num_prefix_tokens: int,
    **rollout: Any,
) -> Tensor:
    """Compute a map of one kind in units of uniform attention, see `attention_maps`.

    Args:
        kind: Key of `MAP_KINDS` that is not in `BY_RULES`.
        weights: L attention weights (B, H, N, N).
        gradients: Of the class's logit, see `attention_gradients`; may be empty if `kind` is
            class-agnostic.
        grid: Rows and columns of patches.
        readout: "class_token" or "mean", see `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.
        **rollout: Options of `attention_rollout`, for kind "rollout".

    Returns:
        (B, rows, columns) float32.
    """
    layout: Any = {"readout": readout, "num_prefix_tokens": num_prefix_tokens}
    if kind == "rollout":
        fractions = attention_rollout(weights, **layout, **rollout)
    elif kind == "raw":
        fractions = raw_attention(weights, **layout)
    elif kind == "gradient_rollout":
        fractions = gradient_rollout(weights, gradients, **layout)
    else:
        relevance = class_relevance(weights, gradients, **layout)
        fractions = relevance / relevance.sum(dim=1, keepdim=True).clamp(min=1e-30)
    units = fractions.shape[-1] if kind == "relevance" else weights[0].shape[-1]
    return (fractions * units).unflatten(1, grid)


def attention_maps(
    model: nn.Module,
    images: Tensor,
    kinds: Sequence[str] = ("rollout",),
    target: Tensor | None = None,
    precision: torch.dtype = torch.float32,
    *,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    start_layer: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Classify images and compute attention maps of any kinds.

    One forward pass serves all kinds, except that "lrp" and "lrp_rollout" share another with the
    rules of `vit.explain.lrp`. The options are those of kind "rollout"; "lrp_rollout" always uses
    the defaults.

    Args:
        model: In evaluation mode; ours, or one of timm's with attention that can be read, see
            `vit.model.attention_model`.
        images: (B, channels, height, width), normalized, on the model's device. Height and width
            are multiples of the patch size.
        kinds: Kinds of map, keys of `MAP_KINDS`.
        target: (B,) int64, the class that class-specific maps explain; None explains the predicted
            class.
        precision: Precision of the model's matrix products: float32 or bfloat16. Maps are computed
            in float32 either way.
        head_fusion: For kind "rollout" only, see `attention_rollout`.
        discard_ratio: For kind "rollout" only, see `attention_rollout`.
        start_layer: For kind "rollout" only, see `attention_rollout`.

    Returns:
        Logits (B, C) float32, and for each kind maps (B, rows, columns) of the images' own grid, in
        units of uniform attention: 1 is the value if all tokens received the same. Prefix tokens
        have no relevance, so for the kinds "relevance" and "lrp_rollout" it is the mean over
        patches. Maps of kind "lrp" are positive for the class and negative against it, and 1 is the
        mean of their absolute values.

    Raises:
        ValueError: A kind is unknown, an option is out of range, or a side of the images is not a
            multiple of the patch size, or the model's attention cannot be read.
    """
    reader = require_attention(model)
    if unknown := [kind for kind in kinds if kind not in MAP_KINDS]:
        raise ValueError(f"kinds: {unknown[0]!r} is not one of {', '.join(MAP_KINDS)}")
    _check_rollout_options(head_fusion, discard_ratio, start_layer, len(reader.blocks))
    grid = reader.patch_embed.grid(*images.shape[-2:])
    images = images.detach()
    by_rules = [kind for kind in kinds if kind in BY_RULES]
    of_weights = [kind for kind in kinds if kind not in BY_RULES]
    maps: dict[str, Tensor] = {}
    if by_rules:
        logits, maps = _maps_by_rules(reader, images, grid, by_rules, target, precision)
    if of_weights or not kinds:
        logits, others = _maps_of_weights(
            reader, images, grid, of_weights, target, precision,
            head_fusion=head_fusion, discard_ratio=discard_ratio, start_layer=start_layer,
        )  # fmt: skip
        maps |= others
    return logits, {kind: maps[kind] for kind in kinds}


def _maps_by_rules(
    reader: AttentionModel,
    images: Tensor,
    grid: tuple[int, int],
    kinds: Sequence[str],
    target: Tensor | None,
    precision: torch.dtype,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the maps that need layer-wise relevance; arguments as for `attention_maps`."""
    with autocast(images.device, precision):
        logits, relevance, weights = token_relevance(reader, images, target)
    prefix = reader.num_prefix_tokens
    patches = relevance[..., prefix:].float().unflatten(2, grid)  # (L, B, rows, columns)
    maps = {}
    for kind in kinds:
        if kind == "lrp":
            found = patches[0]
        else:
            rollout = attention_rollout(
                weights, readout=readout_of(reader), num_prefix_tokens=prefix
            )
            found = smooth(patches.mean(dim=0).relu()) * rollout.unflatten(1, grid)
        maps[kind] = found / found.abs().mean(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    return logits.float(), maps


def _maps_of_weights(
    reader: AttentionModel,
    images: Tensor,
    grid: tuple[int, int],
    kinds: Sequence[str],
    target: Tensor | None,
    precision: torch.dtype,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the maps that combine attention weights; arguments as for `attention_maps`.

    Args:
        **options: Options of `attention_rollout`.
    """
    differentiate = any(kind in CLASS_SPECIFIC for kind in kinds)
    # The images require gradients, so that the weights do too even if all parameters are frozen.
    images = images.requires_grad_(differentiate)
    gradients: tuple[Tensor, ...] = ()
    with torch.set_grad_enabled(differentiate):
        with autocast(images.device, precision):
            logits, weights, _ = reader.forward_intermediates(images)
        logits = logits.float()
        if differentiate:
            target = logits.argmax(dim=1) if target is None else target
            gradients = attention_gradients(logits, weights, target)
    options |= {"readout": readout_of(reader), "num_prefix_tokens": reader.num_prefix_tokens}
    with torch.no_grad():
        maps = {kind: scaled_map(kind, weights, gradients, grid, **options) for kind in kinds}
    return logits.detach(), maps
