"""Which models have attention that can be read: ours, and many timm models."""

from typing import TYPE_CHECKING, TypeAlias, Union

from torch import nn

from vit.model.timm_model import timm_name
from vit.model.vit import VisionTransformer

if TYPE_CHECKING:  # importing timm takes seconds
    from vit.model.timm_attention import TimmAttentionModel

AttentionModel: TypeAlias = Union[VisionTransformer, "TimmAttentionModel"]


def attention_model(model: nn.Module) -> AttentionModel | None:
    """Return what reads a model's attention; None if it cannot be read, see `require_attention`."""
    if isinstance(model, VisionTransformer):
        return model
    if not type(model).__module__.startswith("timm."):  # without importing timm
        return None
    from vit.model.timm_attention import TimmAttentionModel, unread_class

    return TimmAttentionModel(model) if unread_class(model) is None else None


def require_attention(model: nn.Module) -> AttentionModel:
    """Return what reads a model's attention: our model itself, or an adapter for a timm model.

    Raises:
        ValueError: The model's attention cannot be read.
    """
    if (readable := attention_model(model)) is None:
        raise ValueError(no_maps_text(model))
    return readable


def prefix_names(model: nn.Module) -> list[str]:
    """Name the tokens before the patches, for a model whose attention can be read."""
    names = {"cls_token": "class token", "dist_token": "distillation token"}
    known = [name for key, name in names.items() if getattr(model, key, None) is not None]
    registers = require_attention(model).num_prefix_tokens - len(known)
    return [*known, *(f"register {number + 1}" for number in range(registers))]


def size_unit(model: nn.Module) -> int:
    """Return the step in pixels between the image sizes of a model: a patch, or one pixel."""
    readable = attention_model(model)
    return 1 if readable is None else readable.patch_embed.patch_size


def no_maps_text(model: nn.Module) -> str:
    """Explain in one line why there are no maps for a model: which class cannot be read."""
    unread = type(model).__name__
    if type(model).__module__.startswith("timm."):
        from vit.model.timm_attention import unread_class

        unread = unread_class(model) or unread
    return (
        f"attention maps are not available for {timm_name(model)}: they need one sequence of "
        f"tokens and attention of a class listed in docs/timm.md, unlike {unread}"
    )
