"""What a map needs from a model, and which models offer it: ours, and many of timm's.

Shapes: B batch, N tokens (prefix, then patches), D token width, H heads, L layers, C classes.
"""

from collections.abc import Sized
from typing import Protocol

from torch import Tensor, nn

from vit.model.timm_model import TimmAttentionModel, is_timm, timm_name
from vit.model.vit import VisionTransformer


class Patches(Protocol):
    """The division of an image into patches.

    Attributes:
        patch_size: Side of a patch in pixels.
    """

    patch_size: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid, (rows, columns), of an image with this height and width in pixels."""


class AttentionModel(Protocol):
    """A model whose attention weights can be read: one sequence of tokens, one for each patch.

    Attributes:
        num_prefix_tokens: Tokens before the patches.
        global_pool: "token" if the head reads the first token; otherwise it reads the patches.
    """

    num_prefix_tokens: int
    global_pool: str

    @property
    def patch_embed(self) -> Patches:
        """The division into patches."""

    @property
    def blocks(self) -> Sized:
        """The L encoder blocks."""

    def forward_intermediates(self, images: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Classify images and keep attention weights and tokens.

        Returns:
            Logits (B, C), L attention weights (B, H, N, N) and L outputs of blocks (B, N, D); all
            are part of the graph.
        """

    def read_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Classify the output (B, N, D) of any block with the final norm and the head.

        Returns:
            Logits (B, C) of what the head reads, and logits (B, N, C) of every token as if the head
            read it alone; None if it cannot.
        """

    def embed(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the input of the first block, (B, N, D), and the grid (rows, columns)."""

    def forward_tokens(
        self, x: Tensor, grid: tuple[int, int]
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Do what `forward_intermediates` does after `embed`, whose results x and grid are."""


def attention_model(model: nn.Module) -> AttentionModel | None:
    """Return a model, or an adapter for it, with which its attention can be read; None if none."""
    if isinstance(model, VisionTransformer):
        return model  # type: ignore[return-value]  # torch types its attributes loosely
    fits = is_timm(model) and TimmAttentionModel.fits(model)
    return TimmAttentionModel(model) if fits else None


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
