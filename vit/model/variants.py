"""Variants of attention, by name.

A variant is a function with the arguments and results of `scaled_dot_product_attention`, a module
class whose forward is one and whose constructor takes num_heads and head_dim, for learned
parameters, or a whole module, see `vit.model.whole_attention`. docs/variants.md shows how to write,
train and compare one.

Shapes: B batch, H heads, N queries, M keys, d head width.
"""

import linecache
import math
import re
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.console import warn
from vit.model import attention
from vit.model.arguments import Attention, with_all_arguments
from vit.model.attention import masked_softmax
from vit.model.config import ModelConfig
from vit.model.definitions import SUFFIXES, is_in_file, read_definitions
from vit.model.dropout import Dropout
from vit.model.fused_kernel import is_released, source_digest
from vit.settings import suggest


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
        bias = mask if mask.is_floating_point() else torch.where(mask, 0.0, -torch.inf).to(scores)
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
    known = ATTENTION | WHOLE
    if name in known:
        return known[name]
    if is_in_file(name):
        raise ValueError(
            f"model.attention: {name} is not loaded; name the file with --model.attention "
            f"FOLDER/{name} or vit.load_attention; the folder may be another, but not the file name"
        )
    raise ValueError(
        f"model.attention: {name} is not known here; it must be one of {', '.join(known)}, or "
        f"FILE:NAME, supplied with --model.attention or vit.load_attention{suggest(name, known)}"
    )


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
    defined = getattr(definitions, attribute, None)
    if not callable(defined):
        skipped = definitions.left_out.get(attribute)
        why = f"; only definitions are executed, not {skipped}" if skipped else ""
        source = "".join(linecache.getlines(file))
        if re.search(rf"^# *(class|def) {re.escape(attribute)}\b", source, re.MULTILINE):
            why = "; it is commented out, or in a cell that is not Python"
        found = vars(definitions).items()
        own = [key for key, x in found if getattr(x, "__module__", "") == definitions.__name__]
        hint = why or f"; it defines {', '.join(own) or 'none'}{suggest(attribute, own)}"
        raise ValueError(f"model.attention: {file} has no function or class {attribute!r}{hint}")
    loaded, key = with_all_arguments(defined), Path(name).name
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
    if model.name != "vit":
        return ""
    code: Any = attention_of(model.attention)
    return source_digest(code)


def attention_of(name: str) -> Attention:
    """Return the attention that a name means, "dot" included."""
    return find_attention(name) or attention.scaled_dot_product_attention
