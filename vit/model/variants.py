"""Variants of attention, by name.

A variant is a function with the arguments and results of `scaled_dot_product_attention`, a module
class whose forward is one and whose constructor takes num_heads and head_dim, for learned
parameters, or a whole module, see `vit.model.whole_attention`. docs/variants.md shows how to write,
train and compare one.

Shapes: B batch, H heads, N queries, M keys, d head width.
"""

import inspect
import linecache
import math
import re
import sys
import traceback
from pathlib import Path, PureWindowsPath
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.console import note_once, warn
from vit.model import attention
from vit.model.arguments import Attention, Dropout, FewerArguments, with_all_arguments
from vit.model.attention import MultiHeadSelfAttention, masked_softmax
from vit.model.config import ModelConfig
from vit.model.definitions import SUFFIXES, is_in_file, read_definitions
from vit.model.fused_kernel import is_released, source_digest
from vit.model.positions import Grid
from vit.model.whole_attention import WholeAttention, is_whole, refuse_options, what_is_lost
from vit.seeding import generator
from vit.settings import check, suggest


class CosineAttention(nn.Module):
    """softmax(cos(Q, K) / τ) V with a learned temperature τ per head (arXiv 2111.09883)."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10)))  # log 1 / τ

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Dropout
    ) -> tuple[Tensor, Tensor]:
        """Attend like `scaled_dot_product_attention`."""
        scale = self.log_scale.clamp(max=math.log(100)).exp()  # τ is at least 0.01
        scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1) * scale
        weights = masked_softmax(scores, mask)
        return dropout(weights) @ value, weights


def sigmoid_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Dropout
) -> tuple[Tensor, Tensor]:
    """σ(Q Kᵀ / √d - log M) V (arXiv 2409.04431): no softmax, so keys do not compete."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if mask is not None:
        bias = mask if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf)
        scores = scores + bias
    weights = torch.sigmoid(scores - math.log(key.shape[-2]))
    return dropout(weights) @ value, weights


class DifferentialAttention(nn.Module):
    """(softmax(Q₁ K₁ᵀ / √d) - λ softmax(Q₂ K₂ᵀ / √d)) V with a learned λ (arXiv 2410.05258).

    Queries and keys are split into halves of width d. Weights may be negative; rows sum to 1 - λ.
    """

    START = 0.8  # of λ in every layer; in the paper it rises from 0.2 to 0.8 over the layers

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        if head_dim % 2:
            raise ValueError(
                f"differential attention halves heads, but their width {head_dim} is odd"
            )
        # q1, k1, q2, k2; vectors, which have no weight decay
        self.lambdas = nn.ParameterList(0.1 * torch.randn(head_dim // 2) for _ in range(4))
        self.norm = nn.RMSNorm(head_dim, eps=1e-5)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: Dropout
    ) -> tuple[Tensor, Tensor]:
        """Attend like `scaled_dot_product_attention`."""
        q1, k1, q2, k2 = self.lambdas
        factor = (q1 @ k1).exp() - (q2 @ k2).exp() + self.START
        signal, noise = (
            masked_softmax((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1), mask)
            for q, k in zip(query.chunk(2, dim=-1), key.chunk(2, dim=-1), strict=True)
        )
        weights = signal - factor * noise
        heads = dropout(weights) @ value
        normed = self.norm(heads.to(self.norm.weight.dtype)).to(heads.dtype)
        return (1 - self.START) * normed, weights


# Names for `model.attention`; its description in vit/model/config.py lists the same.
ATTENTION: dict[str, Attention | None] = {
    "dot": None,  # `scaled_dot_product_attention`, looked up when it is called
    "cosine": CosineAttention,
    "sigmoid": sigmoid_attention,
    "differential": DifferentialAttention,
}
WHOLE = {"torch.nn:MultiheadAttention": nn.MultiheadAttention}  # whole modules of other libraries


def find_attention(name: str) -> Attention | None:
    """Return a registered variant, with or without the folder of its file; else ValueError."""
    name = PureWindowsPath(name).name  # which knows the separators of all systems
    if name in WHOLE:
        return WHOLE[name]
    if name not in ATTENTION and is_in_file(name):
        raise ValueError(
            f"model.attention: {name} is not loaded; name the file with --model.attention "
            f"FOLDER/{name} or vit.load_attention; the folder may be another, but not the file name"
        )
    if name not in ATTENTION:
        raise ValueError(
            f"model.attention: {name} is not known here; it must be one of {', '.join(ATTENTION)},"
            " or FILE:NAME, supplied with --model.attention or vit.load_attention"
            f"{suggest(name, ATTENTION)}"
        )
    return ATTENTION[name]


def load_attention(name: str) -> Attention | None:
    """Read an attention from a Python file or a notebook, and register it.

    FILE:NAME names the file, .py or .ipynb, and the function or class; model files store it without
    the folder. Of the file, only definitions are executed, see `vit.model.definitions`. Other names
    are looked up.

    Raises:
        ValueError: There is no such attention, or the file cannot be read.
    """
    file, _, attribute = name.rpartition(":")
    if name.endswith(SUFFIXES):  # without the name of a class
        file, attribute = name, ""
    if not file.endswith(SUFFIXES):
        return find_attention(name)
    if not Path(file).is_file():
        raise ValueError(f"model.attention: {file}: file not found")
    try:
        definitions = read_definitions(Path(file))
    except ValueError as error:
        raise ValueError(f"model.attention: {error}") from error
    attention = getattr(definitions, attribute, None)
    if not callable(attention):
        skipped = definitions.left_out.get(attribute)
        why = f"; only definitions are executed, not {skipped}" if skipped else ""
        source = "".join(linecache.getlines(file))
        if re.search(rf"^# *(class|def) {re.escape(attribute)}\b", source, re.MULTILINE):
            why = "; it is in a cell that is not Python"
        found = vars(definitions).items()
        own = [key for key, x in found if getattr(x, "__module__", "") == definitions.__name__]
        hint = why or f"; it defines {', '.join(own) or 'none'}{suggest(attribute, own)}"
        raise ValueError(f"model.attention: {file} has no function or class {attribute!r}{hint}")
    loaded, key = with_all_arguments(attention), Path(name).name
    before: Any = ATTENTION.get(key)
    code = getattr(getattr(before, "forward", before), "__code__", None)
    if code is not None and Path(code.co_filename).resolve() != Path(file).resolve():
        warn(f"model.attention: {key} now means the one in {file}, not in {code.co_filename}")
    ATTENTION[key] = loaded
    return loaded


def is_edited(name: str) -> bool:
    """Return whether heads compute anything but the released attention."""
    functions = attention.scaled_dot_product_attention, attention.masked_softmax
    return name != "dot" or not is_released(*functions)


def attention_code(model: ModelConfig) -> str:
    """Hash the code of a model's attention, see `source_digest`; "" for a timm model."""
    return source_digest(attention_of(model.attention)) if model.name == "vit" else ""


def attention_of(name: str) -> Attention:
    """Return the attention that a name means, "dot" included."""
    return find_attention(name) or attention.scaled_dot_product_attention


def check_attention(
    model: ModelConfig, grid: Grid, prefix: int = 0, hint: str = "", built_for: Grid | None = None
) -> None:
    """Try an attention on random numbers, to find mistakes before training.

    Of a head they are queries, keys and values (1, H, N, d); of a whole module, tokens (1, N, dim).
    `built_for` is the grid for which the model is built, if that is another.

    Raises:
        ValueError: It fails, or does not return a finite output and the weights that it is made of.
    """
    name, heads, dim = model.attention, model.num_heads, model.embed_dim
    head_dim, variant = model.head_dim or dim // heads, cast(Any, attention_of(name))
    whole, draw = is_whole(variant), generator(0, "attention")
    if whole:
        refuse_options(variant, vars(model), "model.")
    drops = not isinstance(variant, FewerArguments) or not model.attn_drop_rate
    check(model, "attn_drop_rate", drops, f"0 with {name}, which takes no dropout")
    tokens = prefix + math.prod(grid)
    shape = (1, tokens, dim) if whole else (1, heads, tokens, head_dim)
    inputs: Any = [torch.randn(shape, generator=draw, requires_grad=True) for _ in range(3)]
    bias: Tensor | None = None
    built_for = built_for or grid
    try:
        if whole:
            module = WholeAttention(variant, dim, heads, built_for, prefix, head_dim)
            output, weights = module(inputs[0], need_weights=True, grid=grid)
            _check_whole(module.eval(), inputs[0], inputs[1], grid)
        else:
            built = MultiHeadSelfAttention(
                dim, heads, head_dim, attention=find_attention(name), rel_pos=model.rel_pos,
                grid=built_for, num_prefix_tokens=prefix,
            )  # fmt: skip
            place = built.place | {"grid": grid} if "grid" in built.place else built.place
            query, key, value = inputs
            inputs, bias = built.rel_pos.before(query, key, value, grid), built.rel_pos.bias(grid)
            attend: Any = built.attention or variant
            output, weights = attend(*inputs, bias, nn.Identity(), **place)
        expected = inputs[-1].shape, (1, heads, tokens, tokens)
        if (output.shape, weights.shape) != expected:
            raise ValueError(f"shapes {[*output.shape]} and {[*weights.shape]}")
        if not (output.isfinite().all() and weights.isfinite().all()):
            raise ValueError("numbers that are not finite")
        _check_graph(output, inputs[0], weights, bias)
    except Exception as error:
        if str(error).startswith(("num_heads: ", "attention: the constructor")):  # our own
            raise ValueError(f"model.{error}") from None
        what = "tokens" if whole else "queries, keys and values"
        weights_shape = [1, heads, tokens, tokens]
        raise ValueError(
            f"model.attention: {name} gives {type(error).__name__}: {error} "
            f"({place_of(error, variant)}); for {what} of {[*shape]}, it must return the output, "
            f"{[*shape]}, and the attention weights that it is computed from, {weights_shape}{hint}"
        ) from error
    _check_model(model, variant, built_for, prefix, weights)
    # The hint is for smaller images, after the note has been printed for the full size.
    if not weights.requires_grad and not hint:
        note_once(
            f"model.attention: {name}: maps that need gradients of its constant weights are empty"
        )


def _check_graph(output: Tensor, query: Tensor, weights: Tensor, bias: Tensor | None) -> None:
    """Check that an output can be differentiated, and that it depends on its weights and a bias."""
    made_of = {
        "the weights beside it": weights,  # constant in uniform attention
        "its float mask, the bias of model.rel_pos, which must be added to the scores": bias,
    }
    learns = {what: x for what, x in made_of.items() if x is not None and x.requires_grad}
    tensors = [query, *learns.values()]
    gradients = torch.autograd.grad(output.sum(), tensors, allow_unused=True)
    for what, gradient in zip(learns, gradients[1:], strict=True):
        if gradient is None:
            raise ValueError(f"an output that does not depend on {what}")


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
    if module.softmaxes > 1 and module.call(first, need_weights=True, grid=grid)[1] is None:
        note_once(
            f"model.attention: {type(module.module).__name__} computes {module.softmaxes} "
            "softmaxes, of which the last is shown; return the weights to be shown instead"
        )
    _, alone = module(first, need_weights=True, grid=grid)
    _, both = module(torch.cat([first, second]), need_weights=True, grid=grid)
    if not torch.allclose(both[:1], alone, atol=1e-4):
        raise ValueError(
            "attention weights of one image that depend on another: its softmax must be over "
            "(B, H, N, N) or (B·H, N, N), all heads of the first image first"
        )


def place_of(error: Exception, variant: Any) -> str:
    """Return file and line of an error in somebody's code, and what of the file is missing."""
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
