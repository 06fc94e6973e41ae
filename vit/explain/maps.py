"""Every kind of map of an image: which there are, and one function that computes them.

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), P patches, C classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vit.explain.lrp import smooth, token_relevance
from vit.explain.rollout import (
    HeadFusion,
    Readout,
    attention_gradients,
    attention_rollout,
    check_rollout_options,
    class_relevance,
    gradient_rollout,
    raw_attention,
)
from vit.hardware import autocast
from vit.model.attention_model import AttentionModel, require_attention

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
    check_rollout_options(head_fusion, discard_ratio, start_layer, len(reader.blocks))
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
