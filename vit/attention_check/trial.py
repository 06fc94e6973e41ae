"""A trial of an attention before training, on random tokens: does a model work with it?"""

import inspect
import linecache
import math
import sys
import traceback
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vit.console import note_once, shorten
from vit.hardware import autocast
from vit.model.arguments import MASKS, PLACE, Attention, FewerArguments, is_required
from vit.model.config import ModelConfig
from vit.model.constructors import is_whole, refuse_options
from vit.model.positions import Grid
from vit.model.variants import attention_of, find_attention
from vit.model.whole_attention import WholeAttention, build_attention
from vit.seeding import generator
from vit.settings import check


def check_attention(
    model: ModelConfig,
    grid: Grid,
    prefix: int = 0,
    hint: str = "",
    built_for: Grid | None = None,
    precision: torch.dtype = torch.float32,
) -> None:
    """Try an attention on random tokens (1, N, dim), to find mistakes before training.

    `built_for` is the grid for which the model is built, if that is another. The numbers are
    checked in float32, and that it works in a precision of matrix products.

    Raises:
        ValueError: It fails, or does not return a finite output and the weights that it is made of.
    """
    name, heads, dim = model.attention, model.num_heads, model.embed_dim
    variant, built_for = cast(Any, attention_of(name)), built_for or grid
    whole, tokens = is_whole(variant), prefix + math.prod(grid)
    if whole:
        refuse_options(variant, vars(model), "model.")
    drops = not isinstance(variant, FewerArguments) or not model.attn_drop_rate
    check(model, "attn_drop_rate", drops, f"0 with {name}, which takes no dropout module")
    adds = model.rel_pos != "bias" or getattr(variant, "mask_name", "") is not None
    check(model, "rel_pos", adds, f"none, rope or relative with {name}, which takes no mask")
    draw = generator(0, "attention")
    first, second = (
        torch.randn(1, tokens, dim, generator=draw, requires_grad=True) for _ in range(2)
    )
    try:
        module = build_attention(
            find_attention(name), dim, heads, head_dim=model.head_dim, rel_pos=model.rel_pos,
            grid=built_for, num_prefix_tokens=prefix,
        )  # fmt: skip
        output, weights = module(first, need_weights=True, grid=grid)
        if (output.shape, weights.shape) != (first.shape, (1, heads, tokens, tokens)):
            raise ValueError(f"shapes {[*output.shape]} and {[*weights.shape]}")
        if not (output.isfinite().all() and weights.isfinite().all()):
            raise ValueError("numbers that are not finite")
        _check_graph(module, first, output, weights)
        with autocast(first.device, precision):
            module(first, grid=grid)
        if isinstance(module, WholeAttention):
            _check_whole(module.eval(), first, second, grid)
    except Exception as error:
        if str(error).startswith(("num_heads: ", "attention: the constructor")):  # our own
            raise ValueError(f"model.{error}") from None
        what = "queries, keys and values"
        if whole:  # which may take something else
            inputs = inspect.signature(variant.forward).parameters.items()
            names = [n for n, p in inputs if is_required(p) and n not in MASKS + PLACE]
            what = f"tokens as {', '.join(names[1:4])}"
        shape = [1, tokens, dim] if whole else [1, heads, tokens, model.head_dim or dim // heads]
        if model.rel_pos == "bias":
            hint = f", with model.rel_pos=bias from scores to which its float mask is added{hint}"
        raise ValueError(
            f"model.attention: {name} gives {type(error).__name__}: {shorten(error, 300)} "
            f"({place_of(error, variant)}); for {what} of {shape}, it must return the output, "
            f"{shape}, and the attention weights that it is computed from, "
            f"{[1, heads, tokens, tokens]}{hint}"
        ) from error
    _check_model(model, variant, built_for, prefix, weights)
    if not weights.requires_grad:
        note_once(
            f"model.attention: {name}: maps that need gradients of its constant weights are empty"
        )


def _check_graph(module: Any, tokens: Tensor, output: Tensor, weights: Tensor) -> None:
    """Check that an output depends on its tokens, on the weights beside it, and on a bias."""
    made_of = {
        "its tokens": tokens,
        "the weights beside it": weights,  # constant in uniform attention
        "its float mask, the bias of model.rel_pos, which must be added to the scores": getattr(
            getattr(module, "rel_pos", None), "relative_position_bias_table", None
        ),
    }
    learns = {what: x for what, x in made_of.items() if x is not None and x.requires_grad}
    gradients = torch.autograd.grad(output.sum(), [*learns.values()], allow_unused=True)
    for what, gradient in zip(learns, gradients, strict=True):
        if gradient is None:
            raise ValueError(f"an output that does not depend on {what}")


@torch.no_grad()
def what_is_lost(
    attention: Attention, dim: int, num_heads: int, grid: Grid, prefix: int = 0, **options: Any
) -> str:
    """Return why a model file would not store all of an attention; "" if it does."""
    place: dict[str, Any] = {"grid": grid, "num_prefix_tokens": prefix, **options}
    trained = build_attention(attention, dim, num_heads, **place).eval()
    loaded = build_attention(attention, dim, num_heads, like=trained, **place).eval()
    if any(isinstance(x, Tensor) and x.is_complex() for x in trained.state_dict().values()):
        return "it has complex numbers: store torch.view_as_real of them, or use persistent=False"
    if not all(parameter.isfinite().all() for parameter in trained.parameters()):
        return "it has parameters that are not finite: use buffers (register_buffer)"
    tokens = torch.randn(1, prefix + math.prod(grid), dim)
    output = trained(tokens)
    if not torch.equal(output, trained(tokens)):
        return ""  # it is random
    try:
        loaded.load_state_dict(trained.state_dict())
    except RuntimeError:
        return "it makes parameters outside of its constructor"
    if torch.allclose(output, loaded(tokens), atol=1e-4, equal_nan=True):
        return ""
    return "it has tensors that are neither parameters (nn.Parameter) nor buffers (register_buffer)"


def _check_model(
    model: ModelConfig, variant: Any, grid: Grid, prefix: int, weights: Tensor
) -> None:
    """Check that a model file stores an attention, and that its model sees the image."""
    name, sizes = model.attention, (model.embed_dim, model.num_heads, grid, prefix)
    if lost := what_is_lost(variant, *sizes, head_dim=model.head_dim):
        raise ValueError(f"model.attention: model files would not store all of {name}: {lost}")
    if model.global_pool == "token" and not weights[0, :, 0, 1:].any():
        raise ValueError(
            f"model.attention: with {name}, the class token sees only itself, because it is the "
            "first token, and all images get the same prediction; add --model.class_token false "
            "--model.global_pool avg"
        )


def _check_whole(module: WholeAttention, first: Tensor, second: Tensor, grid: Grid) -> None:
    """Check that the weights of two images (1, N, dim) are read in the order of the images."""
    shows_last = module.traits.softmaxes > 1 and not module.traits.changes
    if shows_last and module.call(first, grid=grid)[1] is None:
        note_once(
            f"model.attention: {type(module.module).__name__} computes {module.traits.softmaxes} "
            "softmaxes, of which the last is shown; to show others, compute the output from them "
            "and return them"
        )
    _, alone = module(first, need_weights=True, grid=grid)
    _, both = module(torch.cat([first, second]), need_weights=True, grid=grid)
    if not torch.allclose(both[:1], alone, atol=1e-4):
        raise ValueError(
            "attention weights of one image that depend on another: tokens are "
            "(batch, tokens, width), so attend along dim 1; torch's modules need batch_first=True"
        )


def place_of(error: Exception, variant: Any) -> str:
    """Return where in a user's file an error occurred, and the skipped definition that it needs."""
    code: Any = inspect.unwrap(getattr(variant, "forward", variant)).__code__
    frames = traceback.extract_tb(error.__traceback__)[1:]
    inside = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    line, place = [code.co_firstlineno, *inside][-1], Path(code.co_filename).name
    if place.endswith(".ipynb"):  # whose lines have no numbers
        place += f": {linecache.getline(code.co_filename, line).strip()}"
    else:
        place += f", line {line}"
    left_out = getattr(sys.modules.get(variant.__module__), "left_out", {})
    missing = left_out.get(getattr(error, "name", None))
    return f"{place}; only definitions are executed, not {missing}" if missing else place
