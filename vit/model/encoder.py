"""The encoder block: attention and an MLP, each with a pre-norm and a residual connection.

A grid is (rows, columns) of patches, which follow the prefix tokens in row-major order.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads.
"""

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from vit.model.attention import Attention, MultiHeadSelfAttention
from vit.model.dropout import Dropout, StochasticDepth
from vit.model.tracing import leaf_of_graphs


class NeighbourConv(nn.Module):
    """A depthwise 3 x 3 convolution over the grid of patches, with a skip connection.

    Prefix tokens pass through unchanged.

    Args:
        dim: D, token width.
        num_prefix_tokens: Tokens before the patches.
    """

    def __init__(self, dim: int, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix neighbouring patches.

        Args:
            x: (B, N, D).
            grid: Rows and columns of patches; N is num_prefix_tokens + rows * columns.

        Returns:
            (B, N, D).
        """
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        image = rearrange(patches, "b (h w) d -> b d h w", h=grid[0], w=grid[1])
        patches = patches + rearrange(self.conv(image), "b d h w -> b (h w) d")
        return torch.cat([prefix, patches], dim=1) if self.num_prefix_tokens else patches


class QuickGELU(nn.Module):
    """x σ(1.702 x), the approximation of GELU in OpenAI's CLIP (arXiv 1606.08415)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map each value of x."""
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
}


class Mlp(nn.Module):
    """Two linear layers with a GELU in between, applied to each token.

    Args:
        dim: D, token width.
        hidden_dim: Width between the two layers.
        drop: Dropout probability after each layer.
        conv: Mixes neighbouring patches after the first layer (arXiv 2210.05844); with None, every
            token is processed independently.
        act_layer: Kind of GELU: "gelu", "gelu_tanh" or "quick_gelu".

    Raises:
        ValueError: act_layer is unknown.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        drop: float = 0.0,
        conv: NeighbourConv | None = None,
        act_layer: str = "gelu",
    ) -> None:
        super().__init__()
        if act_layer not in ACTIVATIONS:
            raise ValueError(f"act_layer: {act_layer!r} is not one of {', '.join(ACTIVATIONS)}")
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.conv = conv
        self.act = ACTIVATIONS[act_layer]()
        self.drop1 = Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = Dropout(drop)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Map (B, N, D) to (B, N, D); grid is (rows, columns) of patches."""
        x = self.fc1(x)
        if self.conv is not None:
            x = self.conv(x, grid)
        return self.drop2(self.fc2(self.drop1(self.act(x))))


class LayerScale(nn.Module):
    """A learned scale for each channel (arXiv 2103.17239).

    Args:
        dim: D, token width.
        init_value: Initial scale, e.g. 1e-5.
    """

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of (..., D)."""
        return x * self.gamma


class EncoderBlock(nn.Module):
    """A pre-norm transformer block (arXiv 2010.11929, eq. 2 and 3) with timm's parameter names.

    Args:
        dim: D, token width.
        num_heads: H, attention heads.
        mlp_ratio: Hidden width of the MLP divided by dim.
        head_dim: Width of a head; None means dim / num_heads.
        mlp_conv: Whether the MLP mixes neighbouring patches with a `NeighbourConv`.
        num_prefix_tokens: Tokens before the patches, which that convolution leaves unchanged.
        qkv_bias: Whether the qkv projection has a bias.
        qk_norm: Whether queries and keys are layer-normalized.
        init_values: Initial layer scale; None means no layer scale.
        attn_drop: Dropout probability on the attention weights.
        proj_drop: Dropout probability after the output projections of attention and MLP.
        drop_path: Probability of skipping a residual branch, per image (arXiv 1603.09382).
        attention: What each head computes, see `MultiHeadSelfAttention`.
        act_layer: Kind of GELU in the MLP, see `Mlp`.
        norm_eps: Added to the variance in layer norms.

    Raises:
        ValueError: num_heads does not divide dim and head_dim is None, or an option is unknown.
    """

    def __init__(  # noqa: PLR0913 - timm's arguments, and ours
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        head_dim: int | None = None,
        mlp_conv: bool = False,
        num_prefix_tokens: int = 0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        attention: Attention | None = None,
        act_layer: str = "gelu",
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = MultiHeadSelfAttention(
            dim, num_heads, head_dim, qkv_bias, qk_norm, attn_drop, proj_drop, attention, norm_eps
        )
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = StochasticDepth(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        hidden_dim = int(dim * mlp_ratio)
        conv = NeighbourConv(hidden_dim, num_prefix_tokens) if mlp_conv else None
        self.mlp = Mlp(dim, hidden_dim, proj_drop, conv, act_layer)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path2 = StochasticDepth(drop_path)

    @leaf_of_graphs
    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int],
        mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply attention and the MLP.

        Args:
            x: (B, N, D).
            grid: Rows and columns of patches; only `NeighbourConv` uses it.
            mask: Attention mask, see `MultiHeadSelfAttention.forward`.
            need_weights: Whether to return the attention weights too.

        Returns:
            (B, N, D); with need_weights also the attention weights before dropout, (B, H, N, N).
        """
        attended = self.attn(self.norm1(x), mask, need_weights)
        attended, weights = attended if need_weights else (attended, None)
        x = x + self.drop_path1(self.ls1(attended))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), grid)))
        return x if weights is None else (x, weights)
