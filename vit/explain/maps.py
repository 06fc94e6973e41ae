"""Maps of an image, of any of the kinds in `vit.explain.kinds`.

Shapes: L layers, B batch, H heads, N tokens (prefix, then patches), P patches, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from vit.colours import SIGNED, UNIFORM, Bar
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.lrp import propagate, smooth, token_relevance
from vit.explain.rollout import Readout, attention_gradients, attention_rollout
from vit.hardware import autocast
from vit.model.attention_model import AttentionModel, require_attention

DEFAULTS = RolloutOptions()
# Drawn by default: all but the references, which take many passes. The tab has no maps of pixels.
MAP_KINDS = {kind: entry for kind, entry in ALL_KINDS.items() if entry.needs != "passes"}


@dataclass(frozen=True)
class TokenLayout:
    """What the tokens of a sequence are: prefix tokens, then patches row by row."""

    grid: tuple[int, int]  # rows and columns of patches
    num_prefix_tokens: int  # class token and registers
    readout: Readout  # what the classifier reads


def layout_of(model: AttentionModel, height: int, width: int) -> TokenLayout:
    """Return the layout of a model's tokens for images of a size in pixels."""
    readout: Readout = "class_token" if model.global_pool == "token" else "mean"
    grid = model.patch_embed.grid(height, width)
    return TokenLayout(grid, model.num_prefix_tokens, readout)


def map_title(kind: str, class_name: str, rollout: RolloutOptions = DEFAULTS) -> str:
    """Return a two-line title: the kind of map, and the class it explains, if any."""
    explained = f"(for {class_name})" if ALL_KINDS[kind].class_specific else "(class-agnostic)"
    return f"{title_of(kind, rollout)}\n{explained}"


def bar_of(kind: str) -> Bar:
    """Return the colours and scale of a kind of map."""
    return SIGNED if ALL_KINDS[kind].signed else UNIFORM


def title_of(kind: str, rollout: RolloutOptions = DEFAULTS) -> str:
    """Return the title of a kind of map, with the options of rollout that are not the default."""
    options = {
        f"{rollout.head_fusion} over heads": rollout.head_fusion != "mean",
        f"lowest {100 * rollout.discard_ratio:.3g}% discarded": rollout.discard_ratio > 0,
        f"from layer {rollout.start_layer}": rollout.start_layer > 0,
    }
    shown = ", ".join(option for option, changed in options.items() if changed)
    title = ALL_KINDS[kind].title
    return f"{title} ({shown})" if shown and ALL_KINDS[kind].has_options else title


def map_of(
    kind: str, readings: Sequence[Any], layout: TokenLayout, rollout: RolloutOptions
) -> Tensor:
    """Compute a map (B, rows, columns) float32, in the unit of its kind, from what it needs."""
    entry = ALL_KINDS[kind]
    keywords: dict[str, Any] = asdict(rollout) if entry.has_options else {}
    if entry.needs in ("weights", "gradients", "relevance"):
        keywords |= {"readout": layout.readout, "num_prefix_tokens": layout.num_prefix_tokens}
    values: Tensor = resolve_name(f"vit.explain.{entry.function}")(*readings, **keywords).float()
    values = values.unflatten(1, layout.grid) if values.ndim == 2 else values
    if entry.unit == "uniform":
        return values * (layout.num_prefix_tokens + math.prod(layout.grid))
    return values / values.abs().mean(dim=(1, 2), keepdim=True).clamp(min=1e-30)


def patches_of(relevance: Tensor, layout: TokenLayout) -> Tensor:
    """Return the relevance of patches, (L, B, rows, columns), from that of tokens, (L, B, N)."""
    return relevance[..., layout.num_prefix_tokens :].float().unflatten(2, layout.grid)


def relevance_of_patches(relevance: Tensor, _: Sequence[Tensor], **layout: Any) -> Tensor:
    """Return the relevance of the patches that enter the first layer."""
    return relevance[0]


def relevance_times_rollout(relevance: Tensor, weights: Sequence[Tensor], **layout: Any) -> Tensor:
    """Multiply smoothed relevance for the class, mean over layers, by attention rollout."""
    support = smooth(relevance.mean(dim=0).relu())
    return support * attention_rollout(weights, **layout).view_as(support)


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
    rollout: RolloutOptions = DEFAULTS,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Classify images and compute attention maps of any kinds, see `Classifier.maps`.

    Images are (B, channels, height, width), normalized, on the device of the model, which is in
    evaluation mode. Kinds with the same needs share their passes.
    """
    reader = require_attention(model)
    if unknown := [kind for kind in kinds if kind not in ALL_KINDS]:
        raise ValueError(f"kinds: {unknown[0]!r} is not one of {', '.join(ALL_KINDS)}")
    layout = layout_of(reader, *images.shape[-2:])
    needs = {ALL_KINDS[kind].needs for kind in kinds}
    maps: dict[str, Tensor] = {}

    def compute(need: str, *readings: Any) -> None:
        for kind in kinds:
            if ALL_KINDS[kind].needs == need:
                maps[kind] = map_of(kind, readings, layout, rollout)

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
    compute("weights", weights)
    compute("gradients", weights, gradients)
    del weights, gradients  # they may be large
    if "pixels" in needs:
        with autocast(images.device, precision):
            _, pixels = propagate(lambda x: reader.forward_intermediates(x)[0], images, target)
        compute("pixels", pixels)
    if "relevance" in needs:
        with autocast(images.device, precision):
            _, (relevance,), weights = token_relevance(reader, images, [target])
        compute("relevance", patches_of(relevance, layout), weights)
    compute("passes", model, images, layout.grid, target)
    return logits, {kind: maps[kind] for kind in kinds}
