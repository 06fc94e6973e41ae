"""What a map needs from a model, and which models offer it: ours, and many of timm's.

A model whose attention can be read has one sequence of tokens, one for each patch.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, L layers, C classes.
"""

from typing import Any

from einops import rearrange
from torch import Tensor, nn

from vit.model.attention import masked_softmax
from vit.model.timm_model import timm_name
from vit.model.vit import VisionTransformer


class TimmPatches:
    """The division of an image into patches by a timm ViT, like our PatchEmbed."""

    def __init__(self, patch_embed: Any) -> None:
        self._patch_embed = patch_embed
        self.patch_size: int = patch_embed.feat_ratio()

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid, (rows, columns), of an image with this height and width in pixels."""
        rows, columns = self._patch_embed.dynamic_feat_size((height, width))
        return rows, columns


class TimmAttentionModel:
    """Reads the attention weights of timm's VisionTransformer or NaFlexVit, as ours returns them.

    It runs the model's own modules in the model's own order, and computes attention step by step
    as timm does without a fused kernel: no hooks, and the model is not changed. The head may read
    more than `global_pool` says: with attention or maximum pooling, maps start from the mean of the
    patches; with a distillation token, from the class token.

    Args:
        model: A model that `fits`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.patch_embed = TimmPatches(getattr(model, "patch_embed", None) or model.embeds)
        self.blocks = model.blocks
        self.num_prefix_tokens: int = model.num_prefix_tokens
        self.global_pool: str = model.global_pool

    @staticmethod
    def fits(model: Any) -> bool:
        """Tell whether a model is a timm ViT with one sequence of tokens and timm's Attention."""
        from timm.layers.attention import Attention
        from timm.models import vision_transformer as vits
        from timm.models.naflexvit import NaFlexVit

        features = getattr(type(model), "forward_features", None)
        return (
            features in (vits.VisionTransformer.forward_features, NaFlexVit.forward_features)
            and all(type(block) in (vits.Block, vits.ResPostBlock) for block in model.blocks)
            and all(type(block.attn) is Attention for block in model.blocks)
        )

    def embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Turn images into the input of the first block, as `VisionTransformer.embed` does."""
        model, grid = self._model, self.patch_embed.grid(*images.shape[-2:])
        if hasattr(model, "embeds"):  # NaFlexVit, without the masks of images that differ in size
            parts = model._forward_embeds(
                images, patch_coord=None, patch_valid=None, attn_mask=None
            )
            return parts["patches"], grid
        x = model._pos_embed(model.patch_embed(images))
        return model.norm_pre(model.patch_drop(x)), grid

    def forward_intermediates(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `VisionTransformer.forward_intermediates` does."""
        return self.forward_tokens(*self.embed(images), mask)

    def forward_tokens(
        self, x: Tensor, grid: tuple[int, int], mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does after `embed`; the grid is not used."""
        weights, tokens = [], []
        for block in self.blocks:
            x, attention = _run_block(block, x, mask)
            weights.append(attention)
            tokens.append(x)
        return self._model.forward_head(self._model.norm(x)), weights, tokens

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Do what `VisionTransformer.read_tokens` does.

        Logits of every token are None if the head cannot read one alone: with attention pooling,
        or with one head for each of two tokens.
        """
        from timm.models.vision_transformer import VisionTransformer

        model = self._model
        normed = model.norm(tokens)
        pooled = model.forward_head(normed)
        if model.attn_pool is not None or (
            type(model).forward_head is not VisionTransformer.forward_head
        ):
            return pooled, None
        return pooled, model.head(model.head_drop(model.fc_norm(normed)))


def _run_block(block: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Apply a block as its forward does: tokens (B, N, D), and attention weights (B, H, N, N)."""
    if not hasattr(block, "ls1"):  # ResPostBlock
        output, weights = _attend(block.attn, x, mask)
        x = x + block.drop_path1(block.norm1(output))
        return x + block.drop_path2(block.norm2(block.mlp(x))), weights
    output, weights = _attend(block.attn, block.norm1(x), mask)
    x = x + block.drop_path1(block.ls1(output))
    return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x)))), weights


def _attend(attn: Any, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Apply timm's Attention as its forward does; also return the weights before dropout.

    The mask is that of our `MultiHeadSelfAttention.forward`, not timm's, which is added.
    """
    query, key, value = rearrange(
        attn.qkv(x), "b n (three h d) -> three b h n d", three=3, h=attn.num_heads
    )
    query, key = attn.q_norm(query), attn.k_norm(key)
    # As in timm; `scaled_dot_product_attention` may be edited, and these models do not call it.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    weights = masked_softmax(scores, None if mask is None else mask.unsqueeze(-3))
    y = attn.norm(rearrange(attn.attn_drop(weights) @ value, "b h n d -> b n (h d)"))
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(y)), weights


AttentionModel = VisionTransformer | TimmAttentionModel


def attention_model(model: nn.Module) -> AttentionModel | None:
    """Return a model, or an adapter for it, with which its attention can be read; None if none."""
    if isinstance(model, VisionTransformer):
        return model
    is_timm = type(model).__module__.startswith("timm.")  # asked without importing timm
    return TimmAttentionModel(model) if is_timm and TimmAttentionModel.fits(model) else None


def require_attention(model: nn.Module) -> AttentionModel:
    """Return what `attention_model` does.

    Raises:
        ValueError: The model's attention cannot be read.
    """
    readable = attention_model(model)
    if readable is None:
        raise ValueError(no_maps_text(model))
    return readable


def prefix_names(model: nn.Module) -> list[str]:
    """Name the tokens before the patches, for a model whose attention can be read."""
    names = {"cls_token": "class token", "dist_token": "distillation token"}
    known = [name for key, name in names.items() if getattr(model, key, None) is not None]
    registers = require_attention(model).num_prefix_tokens - len(known)
    return [*known, *(f"register {number + 1}" for number in range(registers))]


def size_unit(model: nn.Module) -> int:
    """Return the number of pixels by which the sides of its images vary: a patch, or one pixel."""
    readable = attention_model(model)
    return 1 if readable is None else readable.patch_embed.patch_size


def no_maps_text(model: nn.Module) -> str:
    """Say in one line that there are no maps for a model, and for which there are."""
    return (
        f"attention maps are not available for {timm_name(model)}: they need one sequence of "
        "tokens and blocks with timm's Attention, as in timm's VisionTransformer and NaFlexVit"
    )
