"""The encoder block: attention and an MLP, each with a pre-norm and a residual connection.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads.
"""

from collections.abc import Callable
from functools import partial

import torch
from einops import rearrange
from torch import Tensor, nn

from vit.model.attention import MultiHeadSelfAttention
from vit.model.dropout import Dropout, StochasticDepth
from vit.model.graphs import leaf_of_graphs
from vit.model.positions import Grid
from vit.model.whole_attention import WholeAttention


class NeighbourConv(nn.Module):
    """A depthwise 3 x 3 convolution over the patches, not the prefix, with a skip connection."""

    def __init__(self, dim: int, num_prefix_tokens: int) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix neighbouring patches of (B, N, D)."""
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
        drop: Dropout probability after each layer.
        conv: Mixes neighbouring patches after the first layer (arXiv 2210.05958); None does not.
        act_layer: Kind of GELU, a key of `ACTIVATIONS`, or else a ValueError.
    """

    def __init__(
        self, dim: int, hidden_dim: int, drop: float, conv: NeighbourConv | None, act_layer: str
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

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Map (B, N, D) to (B, N, D)."""
        x = self.fc1(x)
        if self.conv is not None:
            x = self.conv(x, grid)
        return self.drop2(self.fc2(self.drop1(self.act(x))))


class LayerScale(nn.Module):
    """A learned scale for each channel (arXiv 2103.17239)."""

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the channels of (..., D)."""
        return x * self.gamma


class EncoderBlock(nn.Module):
    """A pre-norm transformer block (arXiv 2010.11929, eq. 2 and 3) with timm's parameter names.

    Args:
        init_values: Initial value of layer scale; None means no layer scale.
        drop_path: Probability of skipping a residual branch, per image (arXiv 1603.09382).
        norm_eps: Added to the variance in layer norms.
    """

    def __init__(
        self,
        attn: MultiHeadSelfAttention | WholeAttention,
        mlp: Mlp,
        dim: int,
        init_values: float | None,
        drop_path: float,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = StochasticDepth(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.mlp = mlp
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path2 = StochasticDepth(drop_path)

    @leaf_of_graphs
    def forward(
        self, x: Tensor, grid: Grid, mask: Tensor | None = None, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply attention and the MLP to (B, N, D); results as of `MultiHeadSelfAttention`."""
        attended = self.attn(self.norm1(x), mask, need_weights, grid)
        attended, weights = attended if need_weights else (attended, None)
        x = x + self.drop_path1(self.ls1(attended))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x), grid)))
        return x if weights is None else (x, weights)
