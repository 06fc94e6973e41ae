"""From pixels to tokens: patch embedding and position embedding.

Shapes: B batch, C colour channels, D width of a token, P patches.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

WHITENING_EPS = 1e-2  # added to variances, so that components of next to none are not blown up


class PatchEmbed(nn.Module):
    """Cut an image into patches and embed each as a token.

    Args:
        img_size: Pixels on a side of the square image.
        patch_size: Pixels on a side of a patch; divides img_size.
        in_chans: Colour channels.
        embed_dim: D, width of a token.
        stem: "linear" maps each patch on its own (arXiv 2010.11929, eq. 1); "conv" is a stack of
            3 x 3 convolutions, which sees beyond the patch's border (arXiv 2106.14881); its
            patch_size is a power of two.

    Raises:
        ValueError: img_size is not divisible by patch_size, or stem is not known.
    """

    def __init__(
        self,
        img_size: int = 32,
        patch_size: int = 4,
        in_chans: int = 3,
        embed_dim: int = 96,
        stem: Literal["linear", "conv"] = "linear",
    ) -> None:
        super().__init__()
        if img_size % patch_size:
            raise ValueError(f"patch_size: {patch_size} does not divide img_size={img_size}")
        self.grid_size = (img_size // patch_size, img_size // patch_size)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj: nn.Module
        if stem == "linear":
            self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)
        elif stem == "conv":
            self.proj = conv_stem(patch_size, in_chans, embed_dim)
        else:
            raise ValueError(f"stem: {stem!r} is not linear or conv")

        # With channels last a convolution's output is the tokens, without moving anything.
        self.proj.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, height, width) to tokens (B, P, D), row by row."""
        images = images.contiguous(memory_format=torch.channels_last)
        return rearrange(self.proj(images), "b d h w -> b (h w) d")

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Start the first convolution from what its patches of images have in common.

        As many kernels as there are become their principal components, the strongest first, each
        once with either sign and scaled to a variance of 1 (arXiv 2404.00498, section 3.2).

        Args:
            images: (B, C, height, width), normalised like those to train on.
        """
        first = next(module for module in self.proj.modules() if isinstance(module, nn.Conv2d))
        rows, columns = first.kernel_size
        patches = F.unfold(images, (rows, columns), stride=first.stride)
        patches = rearrange(patches, "b d n -> (b n) d")
        variances, components = torch.linalg.eigh(patches.T @ patches / len(patches))
        whitening = (components / (variances + WHITENING_EPS).sqrt()).T.flip(0)
        whitening = whitening[: len(first.weight) // 2]
        both = torch.cat([whitening, -whitening])
        first.weight[: len(both)] = rearrange(both, "n (c h w) -> n c h w", h=rows, w=columns)


class ResidualConv(nn.Module):
    """Adds to an image a 3 x 3 convolution of it with batch norm and ReLU (arXiv 1512.03385).

    Args:
        dim: Channels in and out.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(*_conv_norm_act(dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, dim, h, w) to the same shape."""
        return x + self.conv(x)


def conv_stem(patch_size: int, in_chans: int, embed_dim: int) -> nn.Sequential:
    """Build 3 x 3 convolutions with batch norm and ReLU that shrink an image patch_size times.

    One convolution keeps the size and log2(patch_size) halve it, each but the last followed by one
    that is residual, while the width rises evenly to embed_dim: for patches of 4 pixels and 96
    channels 3 → 32, 32 → 64 / 2, 64 + 64, 64 → 96 / 2.

    Args:
        patch_size: A power of two.
        in_chans: Colour channels.
        embed_dim: Channels that come out.

    Returns:
        A module from (B, in_chans, h, w) to (B, embed_dim, h / patch_size, w / patch_size).

    Raises:
        ValueError: patch_size is not a power of two.
    """
    halvings = patch_size.bit_length() - 1
    if patch_size != 2**halvings:
        raise ValueError(f"patch_size: {patch_size} is not a power of two, which stem=conv needs")
    widths = [embed_dim * step // (halvings + 1) for step in range(1, halvings + 2)]
    layers = _conv_norm_act(in_chans, widths[0], 1)
    for step in range(1, halvings + 1):
        layers += _conv_norm_act(widths[step - 1], widths[step], 2)
        if step < halvings:
            layers.append(ResidualConv(widths[step]))
    return nn.Sequential(*layers)


def _conv_norm_act(in_chans: int, out_chans: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(in_chans, out_chans, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(out_chans),
        nn.ReLU(inplace=True),
    ]


def sincos_pos_embed(grid_size: tuple[int, int], dim: int) -> Tensor:
    """Return fixed 2-d sine-cosine position embeddings (arXiv 2104.02057, section 4.3).

    A quarter of the channels each: sine and cosine of the column, sine and cosine of the row, at
    wavelengths from 2π to just under 10,000 · 2π patches.

    Args:
        grid_size: Rows and columns of patches.
        dim: D, a multiple of 4.

    Returns:
        (P, D), values -1 to 1, row by row.

    Raises:
        ValueError: dim is not a multiple of 4.
    """
    if dim % 4:
        raise ValueError(f"dim: {dim} is not a multiple of 4, which sine-cosine positions need")
    frequencies = 10000.0 ** -(torch.arange(dim // 4) / (dim // 4))
    rows, columns = torch.meshgrid(*(torch.arange(n).float() for n in grid_size), indexing="ij")
    across = columns.flatten()[:, None] * frequencies
    down = rows.flatten()[:, None] * frequencies
    return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1)


def grid_of(num_patches: int, grid_size: tuple[int, int]) -> tuple[int, int]:
    """Find rows and columns of so many patches in the aspect of another grid."""
    rows = math.isqrt(num_patches * grid_size[0] // grid_size[1])
    return rows, num_patches // rows


def resample_pos_embed(
    pos_embed: Tensor, grid_size: tuple[int, int], num_patches: int, num_prefix_tokens: int
) -> Tensor:
    """Stretch position embeddings to a grid of another number of patches and the same aspect.

    Args:
        pos_embed: (1, N, D), of the prefix tokens, which stay, and of a grid row by row.
        grid_size: Rows and columns of that grid.
        num_patches: Rows times columns of the grid that is wanted.
        num_prefix_tokens: Tokens before the patches.

    Returns:
        (1, num_prefix_tokens + num_patches, D), by bicubic interpolation without aliasing.
    """
    if num_patches == grid_size[0] * grid_size[1]:
        return pos_embed
    prefix, patches = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    grid = rearrange(patches, "one (h w) d -> one d h w", h=grid_size[0])
    size = grid_of(num_patches, grid_size)
    grid = F.interpolate(grid, size, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([prefix, rearrange(grid, "one d h w -> one (h w) d")], dim=1)
