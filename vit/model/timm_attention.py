"""Reads the attention weights of timm's Vision Transformers, as our model returns them.

A model's own modules run in its own order, with attention computed step by step, as timm does
without a fused kernel. Three tables name the classes that can be read: `MODELS` says how images
become tokens and what positions add in the blocks, `BLOCKS` where a block normalizes, and
`ATTENTIONS` how a class computes its weights. A mask is that of our
`MultiHeadSelfAttention.forward`, not timm's, which is added. Models are in evaluation mode.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, d head width, L layers,
C classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers.attention import Attention, AttentionRope
from timm.layers.diff_attention import DiffAttention
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from timm.models import beit, eva
from timm.models import vision_transformer as vits
from timm.models.naflexvit import NaFlexVit
from torch import Tensor, nn

from vit.model.attention import masked_softmax

Grid = tuple[int, int]  # rows and columns of patches
# What positions add inside of attention: rotations, or a bias on the scores.
Position = Tensor | None


def _vit_tokens(model: Any, images: Tensor) -> Tensor:
    return model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(images))))


def _naflex_tokens(model: Any, images: Tensor) -> Tensor:
    # Without the masks of images that differ in size.
    parts = model._forward_embeds(images, patch_coord=None, patch_valid=None, attn_mask=None)
    return parts["patches"]


def _eva_tokens(model: Any, images: Tensor) -> Tensor:
    return model.norm_pre(model._pos_embed(model.patch_embed(images))[0])


def _beit_tokens(model: Any, images: Tensor) -> Tensor:
    patches = model.patch_embed(images)
    x = torch.cat([model.cls_token.expand(len(patches), -1, -1), patches], dim=1)
    return model.pos_drop(x if model.pos_embed is None else x + model.pos_embed)


def _no_positions(model: Any, grid: Grid) -> list[Position]:
    return [None] * len(model.blocks)


def _rotations(model: Any, grid: Grid) -> Sequence[Position]:
    """Return rotary positions, (rows x columns, 2 d) for all heads or (H, rows x columns, 2 d)."""
    if model.rope is None:
        return _no_positions(model, grid)
    # For a fixed grid, some classes of positions return a table, and others need the grid.
    is_fixed = not getattr(model, "dynamic_img_size", True) and hasattr(model.rope, "feat_shape")
    found = model.rope.get_embed() if is_fixed else model.rope.get_embed(shape=list(grid))
    is_mixed = getattr(model, "rope_mixed", False) or getattr(model, "rope_is_mixed", False)
    return list(found) if is_mixed else [found] * len(model.blocks)


def _shared_bias(model: Any, grid: Grid) -> list[Position]:
    """Return the relative position bias, (H, N, N), that the blocks of a BEiT share, if any."""
    bias = None if model.rel_pos_bias is None else model.rel_pos_bias()
    return [bias] * len(model.blocks)


class Family(NamedTuple):
    """How a class turns images into the input of the first block, and positions in all blocks."""

    tokens: Callable[[Any, Tensor], Tensor]
    positions: Callable[[Any, Grid], Sequence[Position]] = _no_positions


MODELS: dict[type[nn.Module], Family] = {
    vits.VisionTransformer: Family(_vit_tokens),
    NaFlexVit: Family(_naflex_tokens, _rotations),
    eva.Eva: Family(_eva_tokens, _rotations),
    beit.Beit: Family(_beit_tokens, _shared_bias),
}


def _project(attn: Any, x: Tensor) -> list[Tensor]:
    """Return queries, (B, H, N, d), and keys and values, of which there may be fewer heads."""
    if getattr(attn, "q_proj", None) is not None:
        parts = [attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)]
    elif getattr(attn, "q_bias", None) is not None:
        bias = torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
        parts = list(F.linear(x, attn.qkv.weight, bias).chunk(3, dim=-1))
    else:
        parts = list(attn.qkv(x).chunk(3, dim=-1))
    width = parts[0].shape[-1] // attn.num_heads
    return [rearrange(part, "b n (h d) -> b h n d", d=width) for part in parts]


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, bias: Position = None) -> Tensor:
    # As in timm; `scaled_dot_product_attention` may be edited, and these models do not call it.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    scores = scores if bias is None else scores + bias
    return masked_softmax(scores, None if mask is None else mask.unsqueeze(-3))


# Applies attention to tokens (B, N, D), with a mask (B, N, N) or (B, 1, N) and what positions add.
# Returns the output, (B, N, D), and the weights before dropout, (B, H, N, N).
Reader = Callable[[Any, Tensor, Tensor | None, Position], tuple[Tensor, Tensor]]


def read_attention(
    attn: Any, x: Tensor, mask: Tensor | None, rotations: Position
) -> tuple[Tensor, Tensor]:
    """Apply timm's Attention, AttentionRope or EvaAttention, with rotary positions if any."""
    query, key, value = _project(attn, x)
    query, key = attn.q_norm(query), attn.k_norm(key)
    if rotations is not None:
        query, key = (_rotate(attn, part, rotations).type_as(value) for part in (query, key))
    # Heads may share keys and values.
    shared = attn.num_heads // key.shape[1]
    key, value = (part.repeat_interleave(shared, dim=1) for part in (key, value))
    weights = _weights(query, key, mask)
    y = attn.norm(rearrange(attn.attn_drop(weights) @ value, "b h n d -> b n (h d)"))
    if getattr(attn, "gate", None) is not None:
        y = y * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(y)), weights


def _rotate(attn: Any, x: Tensor, rotations: Tensor) -> Tensor:
    """Rotate the patches of queries or keys, (B, H, N, d), but not the prefix tokens."""
    prefix, patches = x[:, :, : attn.num_prefix_tokens], x[:, :, attn.num_prefix_tokens :]
    rotated = apply_rot_embed_cat(patches, rotations, half=attn.rotate_half)
    return torch.cat([prefix, rotated], dim=2)


def read_beit(
    attn: Any, x: Tensor, mask: Tensor | None, shared_bias: Position
) -> tuple[Tensor, Tensor]:
    """Apply BEiT's Attention; the bias of relative positions is its own, the model's, or both."""
    query, key, value = _project(attn, x)
    bias = shared_bias
    if attn.relative_position_bias_table is not None:
        bias = attn._get_rel_pos_bias() + (0.0 if bias is None else bias)
    weights = _weights(query, key, mask, bias)
    y = rearrange(attn.attn_drop(weights) @ value, "b h n d -> b n (h d)")
    return attn.proj_drop(attn.proj(y)), weights


def read_differential(
    attn: Any, x: Tensor, mask: Tensor | None, _: Position
) -> tuple[Tensor, Tensor]:
    """Apply timm's DiffAttention (arXiv 2410.05258).

    The weights of a head are those of its first half less λ times those of its second. They may be
    negative, and a row of them adds up to 1 - λ.
    """
    query, key, value = attn.qkv(x).chunk(3, dim=-1)
    query, key = (
        rearrange(part, "b n (h two d) -> two b h n d", two=2, h=attn.num_heads)
        for part in (query, key)
    )
    value = rearrange(value, "b n (h d) -> b h n d", h=attn.num_heads)
    first, second = _weights(attn.q_norm(query), attn.k_norm(key), mask)
    weights = first - attn._compute_lambda().type_as(x) * second
    y = attn.sub_norm(attn.attn_drop(weights) @ value) * (1 - attn.lambda_init)
    return attn.proj_drop(attn.proj(attn.norm(rearrange(y, "b h n d -> b n (h d)")))), weights


ATTENTIONS: dict[type[nn.Module], Reader] = {
    Attention: read_attention,
    AttentionRope: read_attention,
    eva.EvaAttention: read_attention,
    beit.Attention: read_beit,
    DiffAttention: read_differential,
}


# Whether a block normalizes what attention and MLP return, instead of what they are given.
BLOCKS: dict[type[nn.Module], bool] = {
    vits.Block: False,
    eva.EvaBlock: False,
    beit.Block: False,
    vits.ResPostBlock: True,
    eva.EvaBlockPostNorm: True,
}


def _run_block(
    block: Any, x: Tensor, mask: Tensor | None, position: Position
) -> tuple[Tensor, Tensor]:
    """Apply a block as its forward does; also return the weights, (B, H, N, N)."""
    attend = ATTENTIONS[type(block.attn)]
    if BLOCKS[type(block)]:
        output, weights = attend(block.attn, x, mask, position)
        x = x + block.drop_path1(block.norm1(output))
        return x + block.drop_path2(block.norm2(block.mlp(x))), weights
    output, weights = attend(block.attn, block.norm1(x), mask, position)
    x = x + block.drop_path1(_scale(block, 1, output))
    return x + block.drop_path2(_scale(block, 2, block.mlp(block.norm2(x)))), weights


def _scale(block: Any, branch: int, x: Tensor) -> Tensor:
    """Apply the layer scale of a branch: a module, a vector or None."""
    if hasattr(block, f"ls{branch}"):
        return getattr(block, f"ls{branch}")(x)
    gamma = getattr(block, f"gamma_{branch}")
    return x if gamma is None else gamma * x


def _base(model: Any) -> Any:
    """Return the class in `MODELS` whose tokens a model has; a subclass may have another head."""
    features, classes = getattr(type(model), "forward_features", None), tuple[Any, ...](MODELS)
    return next((cls for cls in classes if cls.forward_features is features), None)


def unread_class(model: Any) -> str | None:
    """Return the name of the class of a model, or in it, that cannot be read; None if all can."""
    if _base(model) is None:
        return type(model).__name__
    for block in model.blocks:
        if type(block) not in BLOCKS:
            return type(block).__name__
        if type(block.attn) not in ATTENTIONS:
            return type(block.attn).__name__
    return None


class TimmPatches:
    """The division of an image into patches by a timm ViT, like our PatchEmbed."""

    def __init__(self, patch_embed: Any) -> None:
        self._patch_embed = patch_embed
        self.patch_size: int = patch_embed.feat_ratio()

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid, (rows, columns), of an image with this height and width in pixels."""
        rows, columns = self._patch_embed.dynamic_feat_size((height, width))
        return rows, columns


class TimmAttentionModel:
    """Reads the attention of a timm model; the model is not changed, and has no hooks.

    The head may read more than `global_pool` says: with attention or maximum pooling, maps start
    from the mean of the patches; with a distillation token, from the class token.

    Args:
        model: A model without an `unread_class`.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._base = model, _base(model)
        self._family = MODELS[self._base]
        self.patch_embed = TimmPatches(getattr(model, "patch_embed", None) or model.embeds)
        self.blocks = model.blocks
        self.num_prefix_tokens: int = model.num_prefix_tokens
        self.global_pool: str = model.global_pool

    def embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Turn images into the input of the first block, as `VisionTransformer.embed` does."""
        return self._family.tokens(self._model, images), self.patch_embed.grid(*images.shape[-2:])

    def forward_intermediates(
        self, images: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `VisionTransformer.forward_intermediates` does."""
        return self.forward_tokens(*self.embed(images), mask)

    def forward_tokens(
        self, x: Tensor, grid: Grid, mask: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does after `embed`."""
        weights, tokens = [], []
        positions = self._family.positions(self._model, grid)
        for block, position in zip(self.blocks, positions, strict=True):
            x, attention = _run_block(block, x, mask, position)
            weights.append(attention)
            tokens.append(x)
        return self._model.forward_head(self._model.norm(x)), weights, tokens

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Do what `VisionTransformer.read_tokens` does.

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
