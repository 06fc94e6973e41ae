"""Scaled dot-product attention and multi-head self-attention (arXiv 1706.03762).

Shapes: B batch, H heads, N queries, M keys, D token width, d head width. In self-attention queries
and keys come from the same tokens, so M = N.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit.model.arguments import Attention, accepted_arguments, with_all_arguments
from vit.model.dropout import Dropout
from vit.model.fused_kernel import uses_fused_kernel
from vit.model.positions import REL_POS, Grid


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q Kᵀ / √d) V (arXiv 1706.03762, eq. 1).

    Args:
        query: (..., N, d).
        key: (..., M, d).
        value: (..., M, e).
        mask: Boolean, broadcastable to (..., N, M); True where a query may attend to a key. If a
            query may attend to no key, its weights and output are zero. None means no mask.
        dropout: Maps the attention weights to those that are multiplied by the values, like a
            `Dropout` module. None means no dropout.

    Returns:
        The output, (..., N, e), and the attention weights before dropout, (..., N, M). Each row of
        weights sums to 1, or to 0 if all its keys are masked.
    """
    # Scaling the query instead of the scores is cheaper and keeps the product in float16's range.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    weights = masked_softmax(scores, mask)
    kept = weights if dropout is None else dropout(weights)
    return kept @ value, weights


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Compute the softmax over the keys that a mask allows.

    Args:
        scores: (..., N, M).
        mask: Boolean, or float and added to the scores, where -inf hides a key; broadcastable to
            (..., N, M); or None.

    Returns:
        (..., N, M). Each row sums to 1, or to 0 if a boolean mask hides all its keys.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.is_floating_point():
        finite = mask.clamp(min=torch.finfo(scores.dtype).min / 2)  # no row becomes NaN
        return (scores + finite).softmax(dim=-1)
    # With the lowest finite number instead of -inf, the softmax of a fully masked row is uniform,
    # not NaN, and the second masked_fill sets it to zero. In all other rows masked weights
    # underflow to zero by themselves.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores.softmax(dim=-1).masked_fill(~mask, 0.0)


def causal_mask(num_tokens: int, device: torch.device | str | None = None) -> Tensor:
    """Return a mask, (N, N), under which tokens attend to themselves and the tokens before them."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def padding_mask(lengths: Tensor, num_tokens: int) -> Tensor:
    """Return a mask that hides the padding after each sequence.

    `lengths`, (B,) integers from 0 to N = num_tokens, count the tokens that are not padding.
    The mask is (B, 1, N) boolean, True where a key is not padding.
    """
    return (torch.arange(num_tokens, device=lengths.device) < lengths[:, None])[:, None]


def for_all_heads(mask: Tensor | None, shape: tuple[int, int, int, int]) -> Tensor | None:
    """Return a mask as booleans that broadcast to (B, H, N, N); ValueError if it is ambiguous."""
    if mask is None:
        return None
    heads = mask.unsqueeze(1) if mask.ndim == 3 else mask[(None,) * (4 - mask.ndim)]
    fits = heads.ndim == 4 and all(
        n in (1, most) for n, most in zip(heads.shape, shape, strict=True)
    )
    if fits and mask.dtype != torch.bool:
        is_added = mask.is_floating_point() and bool(((heads == 0) | (heads <= -1e4)).all())
        fits = is_added or bool(((heads == 0) | (heads == 1)).all())
        heads = heads == 0 if is_added else heads != 0
    if not fits:
        raise ValueError(
            f"mask: {mask.dtype} {[*mask.shape]} must be boolean (True = may attend), ones and "
            f"zeros, or floats of 0 and -inf, and broadcast to (B, N, N) or to {[*shape]}, "
            "(B, H, N, N); see vit.causal_mask and vit.padding_mask"
        )
    return heads


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention (arXiv 1706.03762, section 3.2.2) with timm's parameter names.

    Without a mask, and if the weights are neither needed nor dropped, torch's fused kernel takes
    the place of `scaled_dot_product_attention`, unless that was edited; see
    `vit.model.fused_kernel`.

    Args:
        dim: D, token width.
        num_heads: H; 1 is single-head attention.
        head_dim: d, width of a head; None means dim / num_heads.
        qkv_bias: Whether the fused projection has a bias.
        qk_norm: Whether queries and keys are layer-normalized in each head (arXiv 2302.05442).
        attn_drop: Dropout probability on the attention weights.
        proj_drop: Dropout probability after the output projection.
        attention: What each head computes, see `vit.model.variants`; None means
            `scaled_dot_product_attention`.
        norm_eps: Added to the variance in the norms of queries and keys.
        grid: Rows and columns of the images for which the model is built, for `rel_pos` and for an
            attention that takes it.
        num_prefix_tokens: Tokens before the patches, likewise.
        rel_pos: Positions that attention uses, a key of `vit.model.positions.REL_POS`.

    Raises:
        ValueError: num_heads does not divide dim and head_dim is None, or rel_pos is unknown or has
            no grid.
    """

    def __init__(  # noqa: PLR0913 - timm's arguments, and ours
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        attention: Attention | None = None,
        norm_eps: float = 1e-6,
        grid: Grid | None = None,
        num_prefix_tokens: int = 0,
        rel_pos: str = "none",
    ) -> None:
        super().__init__()
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"num_heads: {num_heads} does not divide dim={dim}; set head_dim")
            head_dim = dim // num_heads
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        if rel_pos not in REL_POS:
            raise ValueError(f"rel_pos: {rel_pos!r} is not one of {', '.join(REL_POS)}")
        if rel_pos != "none" and grid is None:
            raise ValueError(f"rel_pos: {rel_pos} needs grid, the rows and columns of patches")
        self.grid = grid or (0, 0)
        self.rel_pos = REL_POS[rel_pos](num_heads, head_dim, self.grid, num_prefix_tokens)
        place = {"grid": grid, "num_prefix_tokens": num_prefix_tokens}
        attend: Any = attention and with_all_arguments(attention)
        if isinstance(attend, type):
            widths = {"num_heads": num_heads, "head_dim": head_dim}
            attend = attend(**widths, **accepted_arguments(attend, place))
        self.attention = attend
        function = getattr(attend, "forward", attend)
        # What `forward` passes on, besides queries, keys, values, mask and dropout.
        self.place: dict[str, Any] = accepted_arguments(function, place) if function else {}
        self.attn_drop = Dropout(attn_drop)
        self.proj = nn.Linear(num_heads * head_dim, dim)
        self.proj_drop = Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
        grid: Grid | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply self-attention.

        Args:
            x: (B, N, D).
            mask: Boolean, (N, N), (B, N, N), (B, 1, N) or any shape that broadcasts to
                (B, H, N, N); True where a query (row) may attend to a key (column), as in torch's
                function but not in nn.MultiheadAttention. Ones and zeros, or floats of 0 and -inf
                as added to scores, mean the same. See `causal_mask` and `padding_mask`.
            need_weights: Whether to return the attention weights too.
            grid: Rows and columns of the patches; None means the constructor's.

        Returns:
            (B, N, D); with need_weights also the attention weights before dropout, (B, H, N, N).

        Raises:
            ValueError: The mask has another form, or keys and values are passed.
        """
        if isinstance(need_weights, Tensor):
            raise ValueError("self-attention computes queries, keys and values of one tensor, x")
        # Splitting first saves the backward pass a copy of all three gradients.
        query, key, value = (
            rearrange(part, "b n (h d) -> b h n d", h=self.num_heads)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        grid = grid or self.grid
        query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = self.rel_pos.before(query, key, value, grid)
        bias = self.rel_pos.bias(grid)
        bias = None if bias is None else bias.to(query.dtype)
        attend = self.attention or scaled_dot_product_attention
        dropping = self.attn_drop.training and self.attn_drop.p > 0
        may_fuse = self.attention is None and mask is None and not (need_weights or dropping)
        trains_bias = bias is not None and bias.requires_grad
        if may_fuse and uses_fused_kernel(attend, query.device, query.dtype, trains_bias):
            heads = F.scaled_dot_product_attention(query, key, value, bias)
        else:
            allowed = for_all_heads(mask, (*query.shape[:-1], key.shape[-2]))
            added = bias if allowed is None else allowed
            if bias is not None and allowed is not None:
                added = torch.where(allowed, bias, -torch.inf)
            place = self.place | {"grid": grid} if "grid" in self.place else self.place
            heads, weights = attend(query, key, value, added, self.attn_drop, **place)
            if bias is not None and allowed is not None:
                # The softmax of a row of -inf is not zero.
                blind = ~allowed.any(dim=-1, keepdim=True)
                heads, weights = (x.masked_fill(blind, 0.0) for x in (heads, weights))
        heads = self.rel_pos.after(heads, grid)
        output = self.proj_drop(self.proj(rearrange(heads, "b h n d -> b n (h d)")))
        return (output, weights) if need_weights else output
