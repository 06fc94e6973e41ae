"""Whole attention modules, as people write them in notebooks, in place of our own.

A whole module has projections of its own; its constructor takes a width, and perhaps the number of
heads. Its weights are what it multiplies by the values, whether it returns them or not.

Shapes: B batch, H heads, N tokens, D token width.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vit.model.arguments import MASKS, PLACE, Attention, accepted_arguments, is_required
from vit.model.attention import MultiHeadSelfAttention, for_all_heads
from vit.model.constructors import (
    HEADS,
    RATES,
    constructor_arguments,
    is_whole,
    refuse_options,
    takes,
)
from vit.model.positions import Grid
from vit.model.read_softmax import ReadSoftmax
from vit.model.traits import Traits, find_traits, make_lazy_layers


def build_attention(
    attention: Attention | None, dim: int, num_heads: int, like: Any = None, **options: Any
) -> "MultiHeadSelfAttention | WholeAttention":
    """Build the attention of an encoder block.

    Options are those of `MultiHeadSelfAttention`, of which a whole module takes some. `like` is the
    attention of another block, whose trial is not repeated.
    """
    if not is_whole(attention):
        return MultiHeadSelfAttention(dim, num_heads, attention=attention, **options)
    refuse_options(attention, {RATES.get(key, key): value for key, value in options.items()})
    options = accepted_arguments(WholeAttention, options)
    return WholeAttention(attention, dim, num_heads, traits=like and like.traits, **options)


def stores_results(model: nn.Module) -> bool:
    """Return whether a user's module computes attention: it may store what it computes."""
    for module in model.modules():
        if isinstance(module, WholeAttention):
            return True
        head = module.attention if isinstance(module, MultiHeadSelfAttention) else None
        if isinstance(head, nn.Module) and not type(head).__module__.startswith("vit."):
            return True
    return False


class WholeAttention(nn.Module):
    """A whole attention module with the interface of `MultiHeadSelfAttention`.

    A mask is applied to its softmax. Without a softmax over the tokens, the mask is passed to a
    module that takes one, weights that it returns are preferred to those that it multiplies by the
    values, and no head can be muted.

    Args:
        attention: The module's class.
        dim: D, token width.
        num_heads: H; 1 for a module without heads.
        grid: Rows and columns of the images for which the model is built.
        num_prefix_tokens: Tokens before the patches.
        head_dim: Width of a head, for constructors that take it; None means dim / num_heads.
        attn_drop: Dropout probability, for constructors that take it.
        traits: Those of another module of the same class and sizes; None means to find them out.

    Raises:
        ValueError: The constructor takes something unknown, fails, or takes no number of heads.
    """

    gates: Tensor  # (H,), by which the weights of each head are multiplied: 0 mutes a head

    def __init__(
        self,
        attention: type[nn.Module],
        dim: int,
        num_heads: int,
        grid: Grid,
        num_prefix_tokens: int = 0,
        head_dim: int | None = None,
        attn_drop: float = 0.0,
        traits: Traits | None = None,
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"grid": grid, "num_prefix_tokens": num_prefix_tokens}
        sizes = dim, num_heads, head_dim or dim // num_heads
        make = partial(attention, **constructor_arguments(attention, *sizes, attn_drop, place))
        self.module = make()
        self.num_heads, self.num_prefix_tokens = num_heads, num_prefix_tokens
        self.register_buffer("gates", torch.ones(num_heads), persistent=False)
        self.is_gated = False  # whether the gates matter where no weights are needed
        self.place = accepted_arguments(self.module.forward, place)  # what `call` passes on
        inputs = inspect.signature(self.module.forward).parameters
        self.mask_name = next((key for key in MASKS if key in inputs), None)
        required = [n for n, p in inputs.items() if is_required(p) and n not in MASKS + PLACE]
        for name in required[1:]:
            if "pos" in name or "freq" in name:
                what = f"positions ({name})"
                raise ValueError(f"attention: {attention.__name__} needs {what}; give a default")
        self.inputs = min(max(1, len(required)), 3)  # 3 for query, key and value
        self.place |= dict.fromkeys(required[3:])  # such as lengths, which are not known
        # In the masks of torch's module True hides a key, so only its softmax is masked.
        wraps_torch = any(isinstance(m, nn.MultiheadAttention) for m in self.module.modules())
        if wraps_torch and self.mask_name is not None:
            self.place[self.mask_name], self.mask_name = None, None
        make_lazy_layers(self, dim, grid)
        self.traits = find_traits(self, make, dim, grid) if traits is None else traits

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        need_weights: bool = False,
        grid: Grid | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the module, as `MultiHeadSelfAttention.forward`.

        Raises:
            ValueError: The output has another shape than x, there are no weights to return, or a
                mask or gates cannot be applied.
        """
        if not (need_weights or self.is_gated) and mask is None:
            return self.call(x, grid=grid)[0]
        traits = self.traits
        cannot_hide = mask is not None and not (traits.has_softmax or self.mask_name)
        if cannot_hide or (self.is_gated and not traits.can_mute):
            what = "" if traits.has_softmax else "no token can be hidden from it, and "
            raise ValueError(f"attention: {traits.problem}, so {what}no head can be muted")
        size = x.shape[0], self.num_heads, x.shape[1], x.shape[1]
        allowed = for_all_heads(mask, size)
        own = None  # the module's own mask, where there is no softmax to apply it to
        if allowed is not None and not traits.has_softmax:
            own, allowed = allowed.expand(x.shape[0], -1, *size[2:]), None
        output, weights = self.attend(x, own, allowed, grid)
        return (output, weights) if need_weights else output

    def attend(
        self,
        x: Tensor,
        own: Tensor | None = None,
        allowed: Tensor | None = None,
        grid: Grid | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Apply the module and read its weights, with muted heads and a mask.

        `own` is a mask as the module itself takes it; `allowed`, which broadcasts to (B, H, N, N),
        is applied to its softmax.
        """
        traits = self.traits
        # `len` would fix the number of images in exports.
        size = x.shape[0], self.num_heads, x.shape[1], x.shape[1]
        with ReadSoftmax(size, allowed, self.gates, orders=traits.orders) as read:
            output, weights = self.call(x, own, grid)
        # Again, from the weights of all heads.
        if read.heads and traits.has_softmax and torch.is_grad_enabled():
            with ReadSoftmax(size, allowed, self.gates, read.weights) as again:
                output, _ = self.call(x, own, grid)
            read.used = again.used
        combines = read.softmaxes > 1 and weights is not None and weights.shape == size
        if traits.has_softmax and read.weights is not None and not combines:
            weights = read.weights if read.used is None or not traits.changes else read.used
        elif weights is None and traits.changes:
            weights = read.used
        if weights is None:
            hint = "let its forward return the attention weights too: return output, weights"
            if read.other is not None:
                hint = f"its softmax has the shape {[*read.other]} instead of {[*size]}; {hint}"
                if not takes(type(self.module), HEADS):
                    hint += f"; if it has heads, call their number {HEADS[0]} in its constructor"
            raise ValueError(f"attention: {traits.problem}; {hint}")
        return output * (self.gates.amax(dim=0) > 0), weights

    def call(
        self, x: Tensor, mask: Tensor | None = None, grid: Grid | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module itself; return its output, and the weights that it returns, if any."""
        keywords: dict[str, Any] = {**self.place}
        if grid is not None and "grid" in self.place:
            keywords["grid"] = grid
        if self.mask_name is not None:
            keywords[self.mask_name] = mask
        if type(self.module).forward is nn.MultiheadAttention.forward:
            keywords["need_weights"] = False  # faster; `ReadSoftmax` reads them
        result = self.module(*[x] * self.inputs, **keywords)
        output, *others = result if isinstance(result, tuple | list) else (result,)
        if not isinstance(output, Tensor) or output.shape != x.shape:
            shape = [*output.shape] if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                f"attention: {type(self.module).__name__} returns {shape} for tokens of "
                f"{[*x.shape]}; the output must have their shape"
            )
        weights = next((w for w in others if isinstance(w, Tensor) and w.ndim >= 3), None)
        # Only if they have another shape, because a view has no gradients of its own.
        if weights is not None and (weights.ndim != 4 or weights.shape[0] != x.shape[0]):
            one = x.shape[0] * weights.shape[-2] * weights.shape[-1]  # head of all images
            if weights.numel() % one == 0:
                weights = weights.view(x.shape[0], -1, *weights.shape[-2:])
        return output, weights
