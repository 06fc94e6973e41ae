"""The encoder block: attention and an MLP, each normalised before and added after.

Shapes: B batch, D width of a token, H heads, N tokens (prefix and patches).
"""

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from vit.model.attention import MultiHeadSelfAttention
from vit.model.embed import grid_of


class NeighbourConv(nn.Module):
    """Adds to each channel of a patch a 3 x 3 convolution over the patches around it.

    Tokens before the patches pass unchanged.

    Args:
        dim: D, width of a token.
        grid_size: Rows and columns of patches; a smaller or larger grid has the same aspect.
        num_prefix_tokens: Tokens before the patches.
    """

    def __init__(self, dim: int, grid_size: tuple[int, int], num_prefix_tokens: int) -> None:
        super().__init__()
        self.grid_size = grid_size
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        prefix, patches = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        rows, _ = grid_of(patches.shape[1], self.grid_size)
        grid = rearrange(patches, "b (h w) d -> b d h w", h=rows)
        patches = patches + rearrange(self.conv(grid), "b d h w -> b (h w) d")
        return torch.cat([prefix, patches], dim=1) if self.num_prefix_tokens else patches


class Mlp(nn.Module):
    """Two linear layers with a GELU between them, for each token on its own.

    Args:
        dim: Width of a token.
        hidden_dim: Width between the layers.
        drop: Dropout probability after each layer.
        conv: What mixes neighbouring patches after the first layer (arXiv 2210.05844); None keeps
            each token on its own.
    """

    def __init__(
        self, dim: int, hidden_dim: int, drop: float = 0.0, conv: NeighbourConv | None = None
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.conv = nn.Identity() if conv is None else conv
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        return self.drop2(self.fc2(self.drop1(self.act(self.conv(self.fc1(x))))))


class LayerScale(nn.Module):
    """A learned factor for each channel (arXiv 2103.17239).

    Args:
        dim: Width of a token.
        init_value: What the factors start from, e.g. 1e-5.
    """

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        """Scale (..., D)."""
        return x * self.gamma


class EncoderBlock(nn.Module):
    """A pre-norm transformer block (arXiv 2010.11929, eq. 2 and 3); names are timm's.

    Args:
        dim: D, width of a token.
        num_heads: Attention heads.
        head_dim: Width of a head; None means dim / num_heads.
        mlp_ratio: Hidden width of the MLP over dim.
        qkv_bias: Whether the qkv projection has a bias.
        qk_norm: Whether queries and keys are normalised.
        init_values: Initial layer scale; None leaves layer scale out.
        attn_drop: Dropout probability on the attention weights.
        proj_drop: Dropout probability after the projections of attention and MLP.
        drop_path: Probability of skipping a branch, drawn per image (arXiv 1603.09382).
        kernel: "auto", "math" or "fused", see `MultiHeadSelfAttention`.
        conv_grid: Rows and columns of patches, for a `NeighbourConv` in the MLP; None has none.
        num_prefix_tokens: Tokens before the patches, which that convolution leaves out.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        drop_path: float = 0.0,
        kernel: Literal["auto", "math", "fused"] = "auto",
        conv_grid: tuple[int, int] | None = None,
        num_prefix_tokens: int = 0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = MultiHeadSelfAttention(
            dim, num_heads, head_dim, qkv_bias, qk_norm, attn_drop, proj_drop, kernel
        )
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = StochasticDepth(drop_path, "row")
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        hidden_dim = int(dim * mlp_ratio)
        conv = NeighbourConv(hidden_dim, conv_grid, num_prefix_tokens) if conv_grid else None
        self.mlp = Mlp(dim, hidden_dim, proj_drop, conv)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path2 = StochasticDepth(drop_path, "row")

    def forward(
        self, x: Tensor, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Map (B, N, D) to (B, N, D); with need_weights return the weights (B, H, N, N) too.

        Args:
            x: (B, N, D).
            mask: As for `MultiHeadSelfAttention`.
            need_weights: Whether to return the attention weights too.
        """
        attended = self.attn(self.norm1(x), mask, need_weights)
        attended, weights = attended if need_weights else (attended, None)
        x = x + self.drop_path1(self.ls1(attended))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x if weights is None else (x, weights)
