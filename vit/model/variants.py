"""Variants of attention, by name.

A variant is a function with the arguments and results of `scaled_dot_product_attention`, or a
module class whose forward is one and whose constructor takes num_heads and head_dim, for learned
parameters. docs/variants.md shows how to write, train and compare one.

Shapes: B batch, H heads, N queries, M keys, d head width.
"""

import importlib.util
import inspect
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.console import note
from vit.model import attention
from vit.model.attention import Attention, masked_softmax
from vit.model.config import ModelConfig
from vit.model.fused_kernel import is_released, source_digest
from vit.seeding import generator
from vit.settings import suggest

Dropout = Callable[[Tensor], Tensor]


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
    weights = torch.sigmoid(scores - math.log(key.shape[-2]))
    weights = weights if mask is None else weights.masked_fill(~mask, 0.0)
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


def find_attention(name: str) -> Attention | None:
    """Return a registered variant, with or without the folder of its file; else ValueError."""
    name = Path(name).name
    if name not in ATTENTION:
        raise ValueError(
            f"model.attention: {name} is not known here; it must be one of {', '.join(ATTENTION)},"
            " or FILE.py:NAME, supplied with --model.attention or vit.load_attention"
            f"{suggest(name, ATTENTION)}"
        )
    return ATTENTION[name]


def load_attention(name: str) -> Attention | None:
    """Run a Python file and register an attention variant that it defines.

    FILE.py:NAME names the file and the function or class; model files store it without the folder.
    Other names are looked up.

    Raises:
        ValueError: There is no such variant, or the file cannot be run.
    """
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        return find_attention(name)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"model.attention: {file}: {type(error).__name__}: {error}") from error
    variant = getattr(module, attribute, None)
    if not callable(variant):
        raise ValueError(f"model.attention: {file} defines no function or class {attribute!r}")
    ATTENTION[Path(name).name] = variant
    return variant


def is_edited(name: str) -> bool:
    """Return whether heads compute anything but the released attention."""
    functions = attention.scaled_dot_product_attention, attention.masked_softmax
    return name != "dot" or not is_released(*functions)


def attention_code(model: ModelConfig) -> str:
    """Hash the code of a model's attention, see `source_digest`; "" for a timm model."""
    variant = find_attention(model.attention) or attention.scaled_dot_product_attention
    return source_digest(variant) if model.name == "vit" else ""


def check_attention(name: str, heads: int, tokens: int, head_dim: int, hint: str = "") -> None:
    """Try a variant on random numbers (1, H, N, d), to find mistakes before training.

    Raises:
        ValueError: It fails, or does not return a finite output and the weights that it is made of.
    """
    variant = find_attention(name) or attention.scaled_dot_product_attention
    shape, draw = (1, heads, tokens, head_dim), generator(0, "attention")
    inputs = [torch.randn(shape, generator=draw, requires_grad=True) for _ in range(3)]
    try:
        function: Any = variant(heads, head_dim) if isinstance(variant, type) else variant
        output, weights = function(*inputs, None, nn.Identity())
        if (output.shape, weights.shape) != (shape, (*shape[:-1], tokens)):
            raise ValueError(f"shapes {[*output.shape]} and {[*weights.shape]}")
        if not (output.isfinite().all() and weights.isfinite().all()):
            raise ValueError("numbers that are not finite")
        varies = weights.requires_grad  # not if constant, such as uniform attention
        if varies and torch.autograd.grad(output.sum(), weights, allow_unused=True)[0] is None:
            raise ValueError("an output that does not depend on the weights beside it")
    except Exception as error:
        code: Any = inspect.unwrap(getattr(variant, "forward", variant)).__code__
        frames = traceback.extract_tb(error.__traceback__)[1:]
        inside = [frame.lineno for frame in frames if frame.filename == code.co_filename]
        raise ValueError(
            f"model.attention: {name} gives {type(error).__name__}: {error} "
            f"({Path(code.co_filename).name}, line {[code.co_firstlineno, *inside][-1]}); for "
            f"queries, keys and values of {[*shape]}, mask and dropout, it must return the output, "
            f"{[*shape]}, and the attention weights that it is computed from, "
            f"{[*shape[:-1], tokens]}{hint}"
        ) from error
    if hint:  # for smaller images; the notes have been printed for the full size
        return
    if not varies:
        note(f"model.attention: {name}: maps that need gradients of its constant weights are zero")
    rows, columns = weights.detach().sum(dim=-1), weights.detach().sum(dim=-2)
    by_design = variant in (sigmoid_attention, DifferentialAttention)
    if not by_design and (rows - 1).abs().max() > 0.01:
        effect = "; rollout and statistics of heads show fractions of the sums"
        if (columns - 1).abs().max() < 0.01:
            effect = ", but columns do; softmax(dim=-1) is over the keys"
        sums = f"{rows.min():.2g} to {rows.max():.2g}"
        note(f"model.attention: {name}: rows of its weights sum to {sums}, not 1{effect}")
