"""Whole attention modules, as people write them in notebooks, in place of our own.

A whole module has projections of its own; its constructor takes a width, and perhaps the number of
heads. Its weights are what it multiplies by the values, whether it returns them or not.

Shapes: B batch, H heads, N tokens, D token width.
"""

import copy
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

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
from vit.model.read_softmax import ReadSoftmax, by_image

Module = TypeVar("Module", bound=nn.Module)


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
    traits = None if like is None else like.traits
    options = accepted_arguments(WholeAttention, options)
    return WholeAttention(attention, dim, num_heads, traits=traits, **options)


def copy_module(module: Module) -> Module:
    """Return a copy of a module, without the graphs of tensors that a user's attention stores."""
    with _WithoutGraphs():
        return copy.deepcopy(module)


class _WithoutGraphs(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            args = args[0].detach(), *args[1:]
        return func(*args, **(kwargs or {}))


def stores_results(model: nn.Module) -> bool:
    """Return whether a user's module computes attention: it may store what it computes."""
    for module in model.modules():
        if isinstance(module, WholeAttention):
            return True
        head = module.attention if isinstance(module, MultiHeadSelfAttention) else None
        if isinstance(head, nn.Module) and not type(head).__module__.startswith("vit."):
            return True
    return False


@dataclass(frozen=True)
class Traits:
    """What a trial shows of a whole module."""

    softmaxes: int  # over the tokens, of all heads at once
    has_softmax: bool  # one over the tokens for each head, which can be read and masked
    changes: bool  # whether other weights than those of the softmax are multiplied by the values
    can_mute: bool  # whether the output without a head is that of zero weights
    heads_first: bool  # whether the softmax has the first head of all images first
    problem: str  # why heads cannot be muted, if so


def _is_heads_first(alone: ReadSoftmax | None, both: ReadSoftmax) -> bool:
    """Tell by the weights of an image, alone and as the first of two, whether heads come first."""
    if alone is None or alone.weights is None or both.weights is None or not both.softmaxes:
        return False
    orders = (by_image(both.weights, both.size, order)[:1] for order in (False, True))
    return [torch.allclose(found, alone.weights, atol=1e-5) for found in orders] == [False, True]


class WholeAttention(nn.Module):
    """A whole attention module with the interface of `MultiHeadSelfAttention`.

    A mask is applied to its softmax. Without a softmax over the tokens, the mask is passed to a
    module that takes one, the weights are those that it returns, and no head can be muted.

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
        for given in required[1:]:
            if "pos" in given or "freq" in given:
                what = f"positions ({given})"
                raise ValueError(f"attention: {attention.__name__} needs {what}; give a default")
        self.inputs = min(max(1, len(required)), 3)  # 3 for query, key and value
        self.place |= dict.fromkeys(required[3:])  # such as lengths, which are not known
        # In the masks of torch's module True hides a key, so only its softmax is masked.
        wraps_torch = any(isinstance(m, nn.MultiheadAttention) for m in self.module.modules())
        if wraps_torch and self.mask_name is not None:
            self.place[self.mask_name], self.mask_name = None, None
        if any(map(is_lazy, self.module.parameters())):
            self._try(dim, grid)  # the first call makes lazy layers
        self.traits = self._find_traits(make, dim, grid) if traits is None else traits

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
        with ReadSoftmax(size, allowed, self.gates, heads_first=traits.heads_first) as read:
            output, weights = self.call(x, own, grid)
        if read.heads and torch.is_grad_enabled():  # again, from the weights of all heads
            with ReadSoftmax(size, allowed, self.gates, read.weights):
                output, _ = self.call(x, own, grid)
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
                    hint += (
                        f"; or, if it has heads, call their number {HEADS[0]} in its constructor"
                    )
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
            weights = weights.view(x.shape[0], -1, *weights.shape[-2:])
        return output, weights

    def _find_traits(self, make: Callable[[], nn.Module], dim: int, grid: Grid) -> Traits:
        """Try another module of the same class, on the CPU, where its weights have values."""
        module, name = self.module, type(self.module).__name__
        with torch.device("cpu"):
            with torch.random.fork_rng(devices=[]):
                self.module = make()
            # The softmax of linear attention has the shape of another if heads are as wide as there
            # are tokens, so it is told apart by another number of tokens: with a single patch.
            other = self._try(dim, (1, 1))
            with torch.no_grad():  # equal scores, as zeros make them, would hide the order of heads
                for parameter in self.module.parameters():
                    if parameter.is_floating_point() and not is_lazy(parameter):
                        numbers = torch.arange(parameter.numel()).view_as(parameter)
                        parameter.add_(0.1 * numbers.sin().square())
            read = self._try(dim, grid)
            alone = self._try(dim, grid, images=1)
            muted = self._try(dim, grid, mute=True)
        self.module = module
        several = read is not None and read.surplus  # for a head, which therefore cannot be muted
        tries = [one for one in (other, alone, read) if one is not None]
        # One softmax of all heads of an image, called for each, may look like one of a head.
        is_one = len({one.softmaxes for one in tries if one is not other}) < 2
        has_softmax = is_one and not several and all(one.weights is not None for one in tries)
        changed = None if read is None else read.changed
        if other is not None and other.changed is None:
            changed = None  # heads as wide as there are tokens, multiplied by a matrix
        can_mute = has_softmax and muted is not None
        if muted is not None and muted.used is not None and changed is not None:
            can_mute &= torch.allclose(muted.used, changed * muted.gates[:, None, None])
        problem = f"{name} changes weights after its softmax"
        if not has_softmax:
            count = "several softmaxes for each head" if several else "no softmax over the tokens"
            problem = f"{name} computes {count}"
        return Traits(
            softmaxes=0 if read is None else read.softmaxes,
            has_softmax=has_softmax,
            changes=changed is not None,
            can_mute=can_mute,
            heads_first=read is not None and _is_heads_first(alone, read),
            problem=problem,
        )

    def _try(self, dim: int, grid: Grid, images: int = 2, mute: bool = False) -> ReadSoftmax | None:
        """Attend to tokens of different images; return what was read, or None if that fails.

        With `mute`, the first head is muted, which fails if the output is not finite.
        """
        num_tokens = self.num_prefix_tokens + math.prod(grid)
        size = images, self.num_heads, num_tokens, num_tokens
        # Not zeros, which some modules divide by.
        tokens = torch.arange(images * num_tokens * dim).sin().view(images, num_tokens, dim)
        # The user's code may store what it computes, in the copy; the first call makes lazy layers.
        lazy = any(map(is_lazy, self.module.parameters()))
        trial = (self if lazy else copy_module(self)).eval()
        try:
            gates = torch.ones(self.num_heads)
            gates[0] = float(not mute)
            read = ReadSoftmax(size, None, gates)
            with torch.no_grad(), torch.random.fork_rng(devices=[]), read:
                output, _ = trial.call(tokens, grid=grid)
            return None if mute and not output.isfinite().all() else read
        except Exception:  # the user's code may raise anything
            return None
        finally:
            trial.train()
