"""Every kind of map of an image: which there are, and one function that computes them.

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), P patches, C classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.explain.lrp import propagate, smooth, token_relevance
from vit.explain.references import integrated_gradients, occlusion, rise
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
from vit.seeding import generator

MAP_KINDS = {
    "rollout": "attention rollout",
    "gradient_rollout": "gradient rollout",
    "relevance": "class relevance",
    "raw": "last layer's attention",
    "lrp": "layer-wise relevance",
    "lrp_rollout": "relevance × rollout",
    "lrp_pixels": "layer-wise relevance of pixels",
}
REFERENCES = {  # take many passes, and need no attention weights
    "occlusion": "occlusion",
    "integrated_gradients": "integrated gradients",
    "rise": "RISE",
}
ALL_KINDS = MAP_KINDS | REFERENCES
CLASS_AGNOSTIC = ("rollout", "raw")
CLASS_SPECIFIC = tuple(kind for kind in ALL_KINDS if kind not in CLASS_AGNOSTIC)
BY_RULES = ("lrp", "lrp_rollout", "lrp_pixels")  # need passes with the rules of vit.explain.lrp
SIGNED_KINDS = ("lrp", "lrp_pixels", *REFERENCES)  # for the class and, where negative, against it
RISE_MASKS = 1000


def map_title(kind: str, class_name: str) -> str:
    """Return a two-line title: the kind of map, and the class it explains, if any."""
    explained = f"(for {class_name})" if kind in CLASS_SPECIFIC else "(class-agnostic)"
    return f"{ALL_KINDS[kind]}\n{explained}"


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


def relevance_map(
    kind: str,
    relevance: Tensor,
    weights: Sequence[Tensor],
    grid: tuple[int, int],
    *,
    readout: Readout,
    num_prefix_tokens: int,
) -> Tensor:
    """Compute a map of one kind from what `vit.explain.lrp.token_relevance` returns.

    Args:
        kind: "lrp" or "lrp_rollout".
        relevance: (L, B, N).
        weights: L attention weights (B, H, N, N).
        grid: Rows and columns of patches.
        readout: "class_token" or "mean", see `attention_rollout`.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (B, rows, columns) float32; 1 is the mean of the absolute values.
    """
    patches = relevance[..., num_prefix_tokens:].float().unflatten(2, grid)
    if kind == "lrp":
        found = patches[0]
    else:
        rollout = attention_rollout(weights, readout=readout, num_prefix_tokens=num_prefix_tokens)
        found = smooth(patches.mean(dim=0).relu()) * rollout.unflatten(1, grid)
    return _of_mean_size_1(found)


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

    One forward pass serves all kinds, except that those in `BY_RULES` take up to two more with the
    rules of `vit.explain.lrp`, and those in `REFERENCES` many. The options are those of kind
    "rollout"; "lrp_rollout" always uses the defaults.

    Args:
        model: In evaluation mode; ours, or one of timm's with attention that can be read, see
            `vit.model.attention_model`.
        images: (B, channels, height, width), normalized, on the model's device. Height and width
            are multiples of the patch size.
        kinds: Kinds of map, keys of `ALL_KINDS`.
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
        patches. Maps of `SIGNED_KINDS` are positive for the class and negative against it, and 1 is
        the mean of their absolute values. Those of kind "lrp_pixels" are (B, height, width).

    Raises:
        ValueError: A kind is unknown, an option is out of range, or a side of the images is not a
            multiple of the patch size, or the model's attention cannot be read.
    """
    reader = require_attention(model)
    if unknown := [kind for kind in kinds if kind not in ALL_KINDS]:
        raise ValueError(f"kinds: {unknown[0]!r} is not one of {', '.join(ALL_KINDS)}")
    check_rollout_options(head_fusion, discard_ratio, start_layer, len(reader.blocks))
    grid = reader.patch_embed.grid(*images.shape[-2:])
    images = images.detach()
    maps: dict[str, Tensor] = {}
    of_weights = [kind for kind in kinds if kind not in (*BY_RULES, *REFERENCES)]
    by_rules = [kind for kind in kinds if kind in BY_RULES]
    plain = bool(of_weights) or not by_rules
    if plain:
        logits, maps = _maps_of_weights(
            reader, images, grid, of_weights, target, precision,
            head_fusion=head_fusion, discard_ratio=discard_ratio, start_layer=start_layer,
        )  # fmt: skip
        # A pass by rules may round differently, but all kinds explain one class.
        target = logits.argmax(dim=1) if target is None else target
    if by_rules:
        found, others = _maps_by_rules(reader, images, grid, by_rules, target, precision)
        logits = logits if plain else found
        maps |= others
    if references := [kind for kind in kinds if kind in REFERENCES]:
        target = logits.argmax(dim=1) if target is None else target
        maps |= _reference_maps(model, images, grid, references, target, precision)
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
    maps = {}
    with autocast(images.device, precision):
        if "lrp_pixels" in kinds:
            logits, pixels = propagate(lambda x: reader.forward_intermediates(x)[0], images, target)
            target = logits.argmax(dim=1) if target is None else target
            maps["lrp_pixels"] = _of_mean_size_1(pixels.sum(dim=1))
        of_tokens = [kind for kind in kinds if kind != "lrp_pixels"]
        if of_tokens:
            logits, relevance, weights = token_relevance(reader, images, target)
    layout: Any = {"readout": readout_of(reader), "num_prefix_tokens": reader.num_prefix_tokens}
    for kind in of_tokens:
        maps[kind] = relevance_map(kind, relevance, weights, grid, **layout)
    return logits.float(), {kind: maps[kind] for kind in kinds}


def _reference_maps(
    model: nn.Module,
    images: Tensor,
    grid: tuple[int, int],
    kinds: Sequence[str],
    target: Tensor,
    precision: torch.dtype,
) -> dict[str, Tensor]:
    """Compute maps of `vit.explain.references`; arguments as for `attention_maps`.

    Only RISE, a mean over many passes, uses the precision: without a single patch, logits change by
    less than bfloat16 can tell.
    """

    def classify(inputs: Tensor) -> Tensor:
        with autocast(images.device, precision):
            logits: Tensor = model(inputs)
        return logits.float()

    maps = {}
    for kind in kinds:
        if kind == "occlusion":
            maps[kind] = occlusion(model, images, grid, target)
        elif kind == "integrated_gradients":
            maps[kind] = to_patches(integrated_gradients(model, images, target).sum(dim=1), grid)
        else:
            random = generator(0, "rise")
            maps[kind] = rise(classify, images, grid, target, RISE_MASKS, random)
    return {kind: _of_mean_size_1(found) for kind, found in maps.items()}


def to_patches(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """Average maps of pixels (B, height, width) over each patch; leave (B, rows, columns) as is."""
    return F.adaptive_avg_pool2d(maps[:, None], grid)[:, 0]


def _of_mean_size_1(maps: Tensor) -> Tensor:
    """Scale maps (B, rows, columns) to a mean absolute value of 1, as float32."""
    maps = maps.float()
    return maps / maps.abs().mean(dim=(1, 2), keepdim=True).clamp(min=1e-30)


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
