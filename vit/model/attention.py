"""Scaled dot-product attention and multi-head self-attention, written by hand (arXiv 1706.03762).

Shapes: B batch, H heads, N tokens (queries), M tokens (keys), D token width, d head width.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend from every query to every key: softmax(Q Kᵀ / √d) V (arXiv 1706.03762, eq. 1).

    Args:
        query: (..., N, d).
        key: (..., M, d).
        value: (..., M, e).
        mask: Boolean, broadcastable to (..., N, M); True where a query may attend to a key. A query
            that may attend to nothing has weights and output zero. None lets all attend to all.
        dropout_p: Probability of dropping an attention weight, 0 to 1. It is applied whenever it is
            above 0; the caller passes 0 outside of training.

    Returns:
        The output, (..., N, e), and the attention weights before dropout, (..., N, M). Each row of
        weights sums to 1, or to 0 where everything is masked.
    """
    # The query is scaled, not the product: cheaper, and the product stays in range in float16.
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if mask is None:
        weights = scores.softmax(dim=-1)
    else:
        # The lowest finite number in place of -inf: a fully masked row is then uniform, not NaN,
        # until the second fill sets it to zero; in any other row a masked weight underflows to 0.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1).masked_fill(~mask, 0.0)
    kept = F.dropout(weights, dropout_p) if dropout_p > 0 else weights
    return kept @ value, weights


def causal_mask(num_tokens: int, device: torch.device | str | None = None) -> Tensor:
    """Return the (N, N) mask that lets a token attend to itself and to those before it."""
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def padding_mask(lengths: Tensor, num_tokens: int) -> Tensor:
    """Return the (B, 1, N) mask that hides the padding after each sequence.

    Args:
        lengths: (B,) whole numbers, 0 to num_tokens: how many tokens of each sequence are real.
        num_tokens: N, the padded length.
    """
    return (torch.arange(num_tokens, device=lengths.device) < lengths[:, None])[:, None]


def uses_fused_kernel(kernel: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a kernel setting means torch's fused kernel for tensors on a device.

    "auto" does, but for bfloat16 on a CPU, where its backward pass takes several times as long.
    """
    faster = device.type != "cpu" or dtype == torch.float32
    return kernel == "fused" or (kernel == "auto" and faster)


class MultiHeadSelfAttention(nn.Module):
    """Multi-head self-attention (arXiv 1706.03762, section 3.2.2); parameter names are timm's.

    The tokens are projected to queries, keys and values by one fused matrix, split into heads that
    attend on their own, and joined again by an output projection.

    Args:
        dim: D, width of a token.
        num_heads: H; 1 is single-head attention.
        head_dim: d, width of a head; None means dim / num_heads.
        qkv_bias: Whether the fused projection has a bias.
        qk_norm: Whether queries and keys pass a layer norm, per head (arXiv 2302.05442).
        attn_drop: Dropout probability on the attention weights.
        proj_drop: Dropout probability after the output projection.
        kernel: "math" is `scaled_dot_product_attention` above; "fused" is torch's kernel, with the
            same result; "auto" takes the faster, see `uses_fused_kernel`. When weights are needed
            it is always "math".

    Raises:
        ValueError: dim is not divisible by num_heads and head_dim is not given.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        kernel: Literal["auto", "math", "fused"] = "auto",
    ) -> None:
        super().__init__()
        if head_dim is None:
            if dim % num_heads:
                raise ValueError(f"num_heads: {num_heads} does not divide dim={dim}; set head_dim")
            head_dim = dim // num_heads
        if kernel not in ("auto", "math", "fused"):
            raise ValueError(f"kernel: {kernel!r} is not auto, math or fused")
        self.num_heads = num_heads
        self.kernel = kernel
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(head_dim, eps=1e-6) if qk_norm else nn.Identity()
        self.proj = nn.Linear(num_heads * head_dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Let the tokens attend to each other.

        Args:
            x: (B, N, D).
            mask: Boolean, (N, N), (B, N, N) or (B, 1, N), the same for all heads; True where a
                token (row) may attend to another (column). See `causal_mask`, `padding_mask`.
            need_weights: Whether to return the attention weights too.

        Returns:
            (B, N, D); with need_weights also the weights before dropout, (B, H, N, N).
        """
        query, key, value = rearrange(
            self.qkv(x), "b n (three h d) -> three b h n d", three=3, h=self.num_heads
        )
        query, key = self.q_norm(query), self.k_norm(key)
        if mask is not None:
            mask = mask.unsqueeze(-3)  # the same for all heads
        dropout_p = self.attn_drop if self.training else 0.0
        if uses_fused_kernel(self.kernel, x.device, query.dtype) and not need_weights:
            heads = F.scaled_dot_product_attention(query, key, value, mask, dropout_p)
        else:
            heads, weights = scaled_dot_product_attention(query, key, value, mask, dropout_p)
        output = self.proj_drop(self.proj(rearrange(heads, "b h n d -> b n (h d)")))
        return (output, weights) if need_weights else output
