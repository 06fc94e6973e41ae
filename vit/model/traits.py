"""What a trial shows of a whole attention module: which weights it has, and in which order.

Shapes: B batch, H heads, N tokens.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from vit.model.copying import copy_module
from vit.model.positions import Grid
from vit.model.read_softmax import Orders, ReadSoftmax, by_image


@dataclass(frozen=True)
class Traits:
    """What a trial shows of a whole module."""

    softmaxes: int  # number of softmaxes that cover all heads
    has_softmax: bool  # one over the tokens for each head, which can be read and masked
    changes: bool  # whether other weights than those of the softmax are multiplied by the values
    can_mute: bool  # whether the output without a head is that of zero weights
    orders: Orders  # of its softmax and of what it multiplies
    problem: str  # why heads cannot be muted, if so


def find_traits(attention: Any, make: Callable[[], nn.Module], dim: int, grid: Grid) -> Traits:
    """Try another module of the class of a `WholeAttention`, on the CPU, where weights have values.

    `make` makes the module; `grid` is that for which it is built.
    """
    name, heads = type(attention.module).__name__, attention.num_heads
    trial = copy.copy(attention)
    with torch.device("cpu"):
        with torch.random.fork_rng(devices=[]):
            trial._modules = {"module": copy_module(make())}  # it may share tensors with others
        make_lazy_layers(trial, dim, grid)
        _change_parameters(trial.module)
        alone, read = (_attend(trial, dim, grid, images) for images in (1, 2))
        orders = False, False
        if alone is not None and read is not None:
            softmax = read.softmaxes > 0 and _is_heads_first(alone.weights, read.weights)
            orders = softmax, _is_heads_first(alone.used, read.used)
            read = _attend(trial, dim, grid, orders=orders)
        # The softmax of linear attention has the shape of another if heads are as wide as there are
        # tokens, so it is told apart by another number of tokens: with one row of patches.
        row = 1, grid[1] if grid[0] > 1 else 1
        other = _attend(trial, dim, row, orders=orders)
        muted = _attend(trial, dim, grid, orders=orders, mute=True)
    has_surplus = read is not None and read.surplus  # for a head, which therefore cannot be muted
    reads = [result for result in (other, alone, read) if result is not None]
    # With a loop over images, (H, N, N) looks like a single head's (B, N, N) if H = B.
    is_ambiguous = heads > 1 and len({x.softmaxes for x in reads if x is not other}) > 1
    # Heads may share one besides their own.
    is_shared = read is not None and read.softmaxes > 0 and bool(read.heads)
    is_clear = not (has_surplus or is_ambiguous or is_shared)
    has_softmax = is_clear and all(result.weights is not None for result in reads)
    changed = None if read is None else read.changed
    if read is not None and other is not None and other.products != read.products:
        changed = None  # values or heads whose width is N look like weights
    can_mute = has_softmax and muted is not None
    if muted is not None and muted.used is not None and changed is not None:
        gates = muted.gates[:, None, None].to(changed.dtype)
        can_mute &= torch.allclose(muted.used, changed * gates)
        if has_softmax and torch.allclose(muted.used, changed):
            changed = None  # it is not made from the softmax
    problem = "changes weights after its softmax"
    if read is None:
        problem = "fails with two images"
    elif has_surplus:
        problem = "computes several softmaxes for each head"
    elif not has_softmax:
        problem = "computes no softmax that can be read for each head"
    softmaxes = 0 if read is None else read.softmaxes
    return Traits(
        softmaxes, has_softmax, changed is not None, can_mute, orders, f"{name} {problem}"
    )


def make_lazy_layers(attention: Any, dim: int, grid: Grid) -> None:
    """Call a module that has lazy layers, which the first call makes."""
    if any(map(is_lazy, attention.module.parameters())):
        _attend(attention, dim, grid)


@torch.no_grad()
def _change_parameters(module: nn.Module) -> None:
    """Change parameters that start as zeros or identities, which hide what a module does."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not is_lazy(parameter):
            numbers = torch.arange(1, parameter.numel() + 1, device=parameter.device)
            parameter.add_(0.1 * numbers.view_as(parameter).sin().square())


def _attend(
    attention: Any, dim: int, grid: Grid, images: int = 2, orders: Orders = (False, False),
    mute: bool = False,
) -> ReadSoftmax | None:  # fmt: skip
    """Attend to tokens of different images; return what was read, or None if that fails.

    With `mute`, the first head is muted, which fails if the output is not finite.
    """
    num_tokens = attention.num_prefix_tokens + math.prod(grid)
    size = images, attention.num_heads, num_tokens, num_tokens
    # Not zeros, which some modules divide by.
    tokens = torch.arange(images * num_tokens * dim).sin().view(images, num_tokens, dim)
    # The user's code may store what it computes, in the copy; the first call makes lazy layers.
    lazy = any(map(is_lazy, attention.module.parameters()))
    trial = (attention if lazy else copy_module(attention)).eval()
    gates = torch.ones(attention.num_heads)
    gates[0] = float(not mute)
    try:
        read = ReadSoftmax(size, None, gates, orders=orders)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), read:
            output, _ = trial.call(tokens, grid=grid)
        return None if mute and not output.isfinite().all() else read
    except Exception:  # the user's code may raise anything
        return None
    finally:
        trial.train()


def _is_heads_first(alone: Tensor | None, both: Tensor | None) -> bool:
    """Tell by the weights of an image, alone and as the first of two, whether heads come first."""
    if alone is None or both is None:
        return False
    orders = (by_image(both, (*both.shape,), order)[:1] for order in (False, True))
    return [torch.allclose(found, alone, atol=1e-5) for found in orders] == [False, True]
