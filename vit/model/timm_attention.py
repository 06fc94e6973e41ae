"""Reads the attention weights of timm's Vision Transformers, as our model returns them.

The model's own modules run, in their order. `ReadWeights` intercepts timm's softmax, to apply a
mask, and the product with the values, to keep the weights. Masks are as in our
`MultiHeadSelfAttention.forward`; timm's are added to scores. Models are in evaluation mode.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, L layers, C classes.
"""

import copy
from collections.abc import Callable
from typing import Any

from timm.layers.attention import Attention, AttentionRope
from timm.layers.diff_attention import DiffAttention
from timm.models import beit, eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vit.model.attention import for_all_heads, masked_softmax
from vit.model.positions import Grid


def _rotations(model: Any, grid: Grid) -> list[dict[str, Any]]:
    rope: Any = None if model.rope is None else model.rope.get_embed(shape=list(grid))
    if getattr(model, "rope_mixed", False):  # with a rotation for each block
        return [{"rope": rotation} for rotation in rope]
    return [{"rope": rope}] * len(model.blocks)


def _shared_bias(model: Any, grid: Grid) -> list[dict[str, Any]]:
    bias = None if model.rel_pos_bias is None else model.rel_pos_bias()
    return [{"shared_rel_pos_bias": bias}] * len(model.blocks)


# What the blocks of a class take besides tokens: a function of the model and the grid.
FAMILIES: dict[Any, Callable[[Any, Grid], list[dict[str, Any]]]] = {
    VisionTransformer: lambda model, grid: [{}] * len(model.blocks),
    eva.Eva: _rotations,
    beit.Beit: _shared_bias,
}
# Without a fused kernel, each has one softmax, followed by one product with the values.
ATTENTIONS = (Attention, AttentionRope, eva.EvaAttention, beit.Attention, DiffAttention)


def _base(model: Any) -> Any:
    """Return the class in `FAMILIES` whose `forward_features` a model has, or None."""
    features = getattr(type(model), "forward_features", None)  # a subclass may have another head
    return next((cls for cls in FAMILIES if cls.forward_features is features), None)


def unread_class(model: Any) -> str | None:
    """Return the name of the class, of a model or its attention, that cannot be read, or None."""
    if _base(model) is None:
        return type(model).__name__
    for block in model.blocks:
        module = getattr(block, "attn", block)
        if type(module) not in ATTENTIONS:
            return type(module).__name__
    return None


class ReadWeights(TorchFunctionMode):
    """A context in which the softmax of attention follows a mask, and the weights are kept.

    The mask is as in `scaled_dot_product_attention`. Differential attention (arXiv 2410.05258)
    subtracts weights between softmax and product, so its weights may be negative.
    """

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.weights: list[Tensor] = []  # (B, H, N, N) for each block that ran
        self._mask = mask
        self._is_attending = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func is Tensor.softmax:
            self._is_attending = True
            return masked_softmax(args[0], self._mask)
        if func is Tensor.matmul and self._is_attending:
            self._is_attending = False
            self.weights.append(args[0])
        return func(*args, **(kwargs or {}))


def _with(module: Any, **parts: nn.Module) -> Any:
    """Copy a module with other submodules; both have the same parameters."""
    module = copy.copy(module)
    module._modules = {**module._modules, **parts}
    return module


def _without_kernel(block: Any) -> Any:
    """Copy a block so that its attention computes weights."""
    attn = _with(block.attn)
    attn.fused_attn = False
    return _with(block, attn=attn)


class TimmPatches:
    """The division of an image into patches by a timm ViT, like our PatchEmbed."""

    def __init__(self, patch_embed: Any) -> None:
        self._patch_embed = patch_embed
        self.patch_size: int = patch_embed.feat_ratio()

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of an image with this height and width in pixels."""
        rows, columns = self._patch_embed.dynamic_feat_size((height, width))
        return rows, columns


class TimmAttentionModel:
    """Reads the attention of a model without an `unread_class`, and neither changes nor hooks it.

    Methods with the names of `VisionTransformer`'s do the same. With attention or maximum pooling,
    maps start from the mean of the patches; with a distillation token, from the class token.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, _base(model)
        self._stem = _with(model, blocks=nn.Sequential(), norm=nn.Identity())
        self.patch_embed = TimmPatches(model.patch_embed)
        self.blocks = [_without_kernel(block) for block in model.blocks]
        self.num_prefix_tokens: int = model.num_prefix_tokens
        self.global_pool: str = model.global_pool

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Turn images into the input of the first block."""
        return self._stem.forward_features(images), self.patch_embed.grid(*images.shape[-2:])

    def forward_intermediates(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Classify images and keep the attention weights and tokens of every layer."""
        return self.forward_tokens(*self.embed(images), mask)

    def forward_tokens(
        self, x: Tensor, grid: Grid, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does, after `embed`."""
        tokens = []
        with ReadWeights(for_all_heads(mask, (len(x), 1, x.shape[1], x.shape[1]))) as read:
            positions = FAMILIES[self._base](self._model, grid)
            for block, position in zip(self.blocks, positions, strict=True):
                x = block(x, **position)
                tokens.append(x)
        return self._model.forward_head(self._model.norm(x)), read.weights, tokens

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Classify the output of any block with the final norm and the head.

        Logits of every token are None if the head cannot read one alone: with attention pooling,
        or with one head for each of two tokens.
        """
        model = self._model
        normed = model.norm(tokens)
        pooled = model.forward_head(normed)
        is_plain = type(model).forward_head is self._base.forward_head
        if getattr(model, "attn_pool", None) is not None or not is_plain:
            return pooled, None
        return pooled, model.head(model.head_drop(model.fc_norm(normed)))
