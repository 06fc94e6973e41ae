"""From pixels to tokens: patch embedding and position embeddings.

The grid is computed from the size of the image and passed along with the tokens, because their
number does not determine it. Patches follow each other row by row.

Shapes: B batch, C colour channels, D token width, P patches (rows x columns).
"""

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from vit.model.graphs import leaf_of_graphs
from vit.model.positions import Grid, coordinates

WHITENING_EPS = 1e-2


class PatchEmbed(nn.Module):
    """Split an image into patches and embed each patch as a token.

    Args:
        img_size: Height and width in pixels of the images that position embeddings are for, or one
            number for both. Images of other sizes are accepted too.
        patch_size: Side of a square patch in pixels; divides height and width of every image.
        stem: "linear" maps each patch independently (arXiv 2010.11929, eq. 1). "conv" is a stack of
            3 x 3 convolutions, whose receptive fields overlap (arXiv 2106.14881).
        stem_width: Width of the first convolution of "conv", see `conv_stem`.
        bias: Whether the linear projection has a bias; the convolutions of "conv" have none.

    Raises:
        ValueError: patch_size does not divide img_size, or stem is unknown.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int],
        patch_size: int,
        in_chans: int,
        embed_dim: int,
        stem: Literal["linear", "conv"],
        stem_width: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.patch_size = patch_size
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.grid_size = self.grid(height, width)
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj: nn.Module
        if stem == "linear":
            self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size, bias=bias)
        elif stem == "conv":
            self.proj = conv_stem(patch_size, in_chans, embed_dim, stem_width)
        else:
            raise ValueError(f"stem: {stem!r} is not linear or conv")

    def grid(self, height: int, width: int) -> Grid:
        """Return the grid of an image; ValueError unless patch_size divides both sides."""
        if height % self.patch_size or width % self.patch_size or not height * width:
            raise ValueError(
                f"patch_size: {self.patch_size} does not divide img_size={height} x {width} "
                f"(height x width); resize or crop images to multiples of {self.patch_size}"
            )
        return height // self.patch_size, width // self.patch_size

    @leaf_of_graphs
    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Turn images (B, C, height, width) into tokens (B, P, D) and their `grid`."""
        grid = self.grid(*images.shape[-2:])
        # Channels-last, so that the output of a convolution already is the sequence of tokens; in
        # the only way that torch.func.vmap knows.
        images = images.movedim(1, -1).contiguous().movedim(-1, 1)
        return rearrange(self.proj(images), "b d h w -> b (h w) d"), grid


def image_conv(model: nn.Module, in_chans: int) -> nn.Conv2d | None:
    """Return the first convolution of a model if it reads the image; else None."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    reads_image = first is not None and first.in_channels == in_chans and first.groups == 1
    return first if reads_image else None


@torch.no_grad()
def whiten(conv: nn.Conv2d, images: Tensor, eps: float = WHITENING_EPS) -> None:
    """Initialise a convolution to whiten the patches of images (arXiv 2404.00498, section 3.2).

    Its kernels become the principal components of patches of normalized images (B, C, height,
    width): strongest first, scaled to unit variance, each with both signs; `eps` is added to the
    variances, so that near-constant components are not amplified. Kernels left over keep their
    initial values.
    """
    rows, columns = conv.kernel_size
    # Few images at once, because patches that overlap take many times the memory of their images.
    parts = (F.unfold(part, (rows, columns), stride=conv.stride) for part in images.split(8))
    moments = torch.stack([(p @ p.mT).sum(dim=0) / p.shape[-1] for p in parts])
    covariance = moments.sum(dim=0) / len(images)
    # On the CPU, because MPS has no eigh.
    variances, components = (p.to(conv.weight) for p in torch.linalg.eigh(covariance.cpu()))
    whitening = (components / (variances + eps).sqrt()).T.flip(0)
    whitening = whitening[: len(conv.weight) // 2]
    kernels = torch.cat([whitening, -whitening])
    conv.weight[: len(kernels)] = rearrange(kernels, "n (c h w) -> n c h w", h=rows, w=columns)


class ResidualConv(nn.Module):
    """A 3 x 3 convolution with batch norm and ReLU, and a skip connection (arXiv 1512.03385)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(*_conv_norm_act(dim, dim, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, dim, h, w) to the same shape."""
        return x + self.conv(x)


def conv_stem(
    patch_size: int, in_chans: int, embed_dim: int, stem_width: int | None = None
) -> nn.Sequential:
    """Build a stack of 3 x 3 convolutions that downsamples images by patch_size, a power of two.

    Every convolution is followed by batch norm and ReLU. The first keeps the resolution, and each
    of the next log2(patch_size) halves it; a residual convolution follows all of these but the
    last. For patch_size=4, embed_dim=128 and stem_width=32 the layers are 3 → 32, 32 → 64
    (stride 2), 64 → 64 (residual), 64 → 128 (stride 2). With stem_width=None, the width grows
    evenly. Multiples of 32 are fastest.
    """
    halvings = patch_size.bit_length() - 1
    if patch_size != 2**halvings:
        raise ValueError(f"patch_size: {patch_size} is not a power of two, which stem=conv needs")
    if stem_width is None:
        widths = [embed_dim * step // (halvings + 1) for step in range(1, halvings + 2)]
    else:
        widths = [min(stem_width * 2**step, embed_dim) for step in range(halvings)] + [embed_dim]
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


def sincos_pos_embed(grid: Grid, dim: int) -> Tensor:
    """Return fixed 2-d sine-cosine position embeddings, (P, D) (arXiv 2104.02057, section 4.3).

    A quarter of the channels each holds the sine and the cosine of the column, and the sine and the
    cosine of the row, with wavelengths from 2π to almost 10,000 · 2π patches. A dim that is not a
    multiple of 4 is a ValueError.
    """
    if dim % 4:
        raise ValueError(f"embed_dim: {dim} is not a multiple of 4, as pos_embed=sincos needs")
    frequencies = 10000.0 ** -(torch.arange(dim // 4) / (dim // 4))
    rows, columns = coordinates(grid, frequencies.device)
    across, down = columns[:, None] * frequencies, rows[:, None] * frequencies
    return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=1)


def resample_pos_embed(
    pos_embed: Tensor, old_grid: Grid, new_grid: Grid, num_prefix_tokens: int
) -> Tensor:
    """Resample position embeddings, (1, N, D), by antialiased bicubic interpolation.

    The first num_prefix_tokens are not patches and do not change.
    """
    if new_grid == old_grid:
        return pos_embed
    prefix, patches = pos_embed[:, :num_prefix_tokens], pos_embed[:, num_prefix_tokens:]
    patches = rearrange(patches, "one (h w) d -> one d h w", h=old_grid[0], w=old_grid[1])
    wide = patches.to(torch.promote_types(patches.dtype, torch.float32))  # also of bfloat16
    wide = F.interpolate(wide, new_grid, mode="bicubic", antialias=True, align_corners=False)
    patches = rearrange(wide.to(patches.dtype), "one d h w -> one (h w) d")
    return torch.cat([prefix, patches], dim=1)
