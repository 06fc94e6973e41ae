"""Maps of an image, of any of the kinds in `vit.explain.kinds`.

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), P patches, C classes.
"""

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from vit.explain.kinds import ALL_KINDS
from vit.explain.lrp import propagate, smooth, token_relevance
from vit.explain.rollout import HeadFusion, Readout, attention_gradients, attention_rollout
from vit.hardware import autocast
from vit.model.attention_model import AttentionModel, require_attention

MAP_KINDS = {kind: entry for kind, entry in ALL_KINDS.items() if entry.default}


def map_title(kind: str, class_name: str, **options: Any) -> str:
    """Return a two-line title: the kind of map, and the class it explains, if any."""
    explained = f"(for {class_name})" if ALL_KINDS[kind].class_specific else "(class-agnostic)"
    return f"{title_of(kind, **options)}\n{explained}"


def title_of(
    kind: str, head_fusion: HeadFusion = "mean", discard_ratio: float = 0.0, start_layer: int = 0
) -> str:
    """Return the title of a kind of map, with those of its options that are not the default."""
    options = {
        f"{head_fusion} over heads": head_fusion != "mean",
        f"lowest {100 * discard_ratio:.3g}% discarded": discard_ratio > 0,
        f"from layer {start_layer}": start_layer > 0,
    }
    shown = ", ".join(option for option, changed in options.items() if changed)
    title = ALL_KINDS[kind].title
    return f"{title} ({shown})" if shown and ALL_KINDS[kind].options else title


def readout_of(model: AttentionModel) -> Readout:
    """Return what a model's head reads, as `attention_rollout` and its relatives expect it."""
    return "class_token" if model.global_pool == "token" else "mean"


def map_of(
    kind: str, reader: AttentionModel, grid: tuple[int, int], *given: Any, **options: Any
) -> Tensor:
    """Compute a map (B, rows, columns) float32 from what its kind needs, in the unit of its kind.

    That is what the function of the kind takes, see `vit.explain.kinds`. Options are passed to the
    kinds that take any.
    """
    entry = ALL_KINDS[kind]
    keywords = dict(options) if entry.options else {}
    if entry.needs in ("weights", "gradients", "relevance"):
        keywords |= {"readout": readout_of(reader), "num_prefix_tokens": reader.num_prefix_tokens}
    found: Tensor = resolve_name(f"vit.explain.{entry.function}")(*given, **keywords).float()
    found = found.unflatten(1, grid) if found.ndim == 2 else found
    patches = grid[0] * grid[1]
    if entry.unit == "uniform":
        return found * (reader.num_prefix_tokens + patches)
    if entry.unit == "mean":
        return found / found.sum(dim=(1, 2), keepdim=True).clamp(min=1e-30) * patches
    return found / found.abs().mean(dim=(1, 2), keepdim=True).clamp(min=1e-30)


def patches_of(relevance: Tensor, reader: AttentionModel, grid: tuple[int, int]) -> Tensor:
    """Return the relevance of patches, (L, B, rows, columns), from that of tokens, (L, B, N)."""
    return relevance[..., reader.num_prefix_tokens :].float().unflatten(2, grid)


def relevance_of_patches(relevance: Tensor, *_: Any, **layout: Any) -> Tensor:
    """Return the relevance of the patches that enter the first layer."""
    return relevance[0]


def relevance_times_rollout(relevance: Tensor, weights: Sequence[Tensor], **layout: Any) -> Tensor:
    """Multiply smoothed relevance for the class, mean over layers, by attention rollout."""
    rollout = attention_rollout(weights, **layout).unflatten(1, relevance.shape[2:])
    return smooth(relevance.mean(dim=0).relu()) * rollout


def relevance_of_pixels(relevance: Tensor) -> Tensor:
    """Add up the relevance of the channels of each pixel."""
    return relevance.sum(dim=1)


@torch.inference_mode(False)
def attention_maps(
    model: nn.Module,
    images: Tensor,
    kinds: Sequence[str] = ("rollout",),
    target: Tensor | None = None,
    precision: torch.dtype = torch.float32,
    **rollout: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Classify images and compute attention maps of any kinds.

    One forward pass serves all kinds that need attention weights or their gradients, and another
    one, with the rules of `vit.explain.lrp`, all that need the relevance of patches.

    Args:
        model: In evaluation mode, with attention that can be read, see `vit.model.attention_model`.
        images: (B, channels, height, width), normalized, on the model's device.
        kinds: Kinds of map, keys of `ALL_KINDS`.
        target: (B,) int64, the class that class-specific maps explain; None explains the predicted
            class.
        precision: Precision of the model's matrix products: float32 or bfloat16. Maps are computed
            in float32 either way.
        **rollout: Options of `attention_rollout`, for kind "rollout" only.

    Returns:
        Logits (B, C) float32, and for each kind maps (B, rows, columns) of the images' own grid, in
        the units of their kind, see `vit.explain.kinds`; (B, height, width) for "lrp_pixels".

    Raises:
        ValueError: A kind is unknown, an option is out of range, a side of the images is not a
            multiple of the patch size, or the model's attention cannot be read.
    """
    reader = require_attention(model)
    if unknown := [kind for kind in kinds if kind not in ALL_KINDS]:
        raise ValueError(f"kinds: {unknown[0]!r} is not one of {', '.join(ALL_KINDS)}")
    grid = reader.patch_embed.grid(*images.shape[-2:])
    needs = {ALL_KINDS[kind].needs for kind in kinds}
    maps: dict[str, Tensor] = {}

    def draw(need: str, *given: Any) -> None:
        for kind in kinds:
            if ALL_KINDS[kind].needs == need:
                maps[kind] = map_of(kind, reader, grid, *given, **rollout)

    differentiate = "gradients" in needs
    # The images require gradients, so that the weights do too even if all parameters are frozen.
    images = images.detach().clone().requires_grad_(differentiate)
    with torch.set_grad_enabled(differentiate):
        with autocast(images.device, precision):
            logits, weights, _ = reader.forward_intermediates(images)
        logits = logits.float()
        # A pass by rules may round differently, but all kinds explain one class.
        target = logits.argmax(dim=1) if target is None else target.clone()
        gradients = attention_gradients(logits, weights, target) if differentiate else ()
    logits, weights = logits.detach(), [layer.detach() for layer in weights]
    draw("weights", weights)
    draw("gradients", weights, gradients)
    del weights, gradients  # they may be large
    if "pixels" in needs:
        with autocast(images.device, precision):
            _, pixels = propagate(lambda x: reader.forward_intermediates(x)[0], images, target)
        draw("pixels", pixels)
    if "relevance" in needs:
        with autocast(images.device, precision):
            _, (relevance,), weights = token_relevance(reader, images, [target])
        draw("relevance", patches_of(relevance, reader, grid), weights)
    draw("passes", model, images, grid, target)
    return logits, {kind: maps[kind] for kind in kinds}
