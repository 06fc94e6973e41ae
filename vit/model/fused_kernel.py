"""Whether torch's fused attention kernel may take the place of attention as it is written.

The kernel is faster, but computes only softmax(Q Kᵀ / √d) V. The released function does, too, which
the tests check; an edited one has to agree with the kernel on random inputs, or runs as it is.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.console import note
from vit.model.dropout import Dropout

Attend = Callable[..., tuple[Tensor, Tensor | None]]

# Largest difference, relative to the largest value. Kernels round intermediate results differently;
# in float64, functions that compute the same agree to the last digits.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
# Of `scaled_dot_product_attention` and `masked_softmax` as they are released, see `source_digest`.
RELEASED = ["c417820a4565f357", "e12720dbf233a7cf"]
MOST_TOKENS = 640  # that are compared: the memory of the written function grows with their square

_lock = threading.Lock()  # evaluation runs a model in several threads


class Kind(NamedTuple):
    """A kind of input; its shape is (heads, tokens, head width)."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, int, int]
    masked: bool


def agrees_with_fused_kernel(attention: Attend, kind: Kind) -> bool:
    """Return whether a function computes what torch's fused kernel computes; say so if not.

    The code of the released function is known on a CPU. Else outputs and gradients are compared in
    float64 on the CPU, in training and in evaluation, and then in the dtype and on the device of
    the inputs; once per process and kind of input, and again if a global that it names is replaced.

    Args:
        attention: The function, see `vit.model.attention.scaled_dot_product_attention`.
        kind: The inputs that it is about to get.
    """
    code, names = getattr(attention, "__code__", None), getattr(attention, "__globals__", {})
    used = () if code is None else tuple(id(names.get(name)) for name in code.co_names)
    with _lock:
        return _compare_once(attention, kind, used)


@functools.cache
def _compare_once(attention: Attend, kind: Kind, _: tuple[int, ...]) -> bool:
    names = getattr(attention, "__globals__", {})
    digests = [source_digest(each) for each in (attention, names.get("masked_softmax"))]
    if digests == RELEASED and kind.device.type in ("cpu", "meta"):  # where the tests compare them
        return True
    # None of the caller's contexts apply in a new thread: autocast, no_grad, tracing for an export,
    # rules that replace gradients.
    with ThreadPoolExecutor(1) as thread:
        agrees = thread.submit(_compare, attention, kind).result()
    if not agrees:
        _say_that_it_differs()
    return agrees


def source_digest(code: Any) -> str:
    """Hash a function or class without comments and layout, and without what it calls.

    Returns:
        16 hexadecimal digits; "" if Python has no source of it.
    """
    try:  # __code__ is that of a wrapper, not of the function that it wraps
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(code, "__code__", code))))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]


@functools.cache
def _say_that_it_differs() -> None:
    note("attention differs from torch's fused kernel: using vit/model/attention.py")


def _compare(attention: Attend, kind: Kind) -> bool:
    heads, tokens, width = kind.shape
    tokens = min(tokens, MOST_TOKENS)
    generator = torch.Generator().manual_seed(0)
    size = (4, 2, heads, tokens, width)  # queries, keys, values and the gradient of the output
    inputs = torch.randn(size, generator=generator, dtype=torch.float64)
    # Short queries attend nearly uniformly, long ones to a single token.
    inputs[0] *= torch.logspace(-1, 1, tokens, dtype=torch.float64)[:, None]
    mask = torch.rand(tokens, tokens, generator=generator) < 0.5 if kind.masked else None
    if mask is not None:
        mask[0] = False  # a query that may attend to nothing
    before = torch.get_rng_state()
    try:
        exact = all(_same(attention, inputs, mask, training) for training in (True, False))
        if not exact or not torch.equal(torch.get_rng_state(), before):  # random, if it has changed
            return False
        if kind.device.type == "meta":  # has no values
            return True
        mask = None if mask is None else mask.to(kind.device)
        return _same(attention, inputs.to(kind.device, kind.dtype), mask, training=True)
    except Exception:  # it is not made for such inputs; other mistakes show when it is used
        return False
    finally:
        torch.set_rng_state(before)


def _same(attention: Attend, inputs: Tensor, mask: Tensor | None, training: bool) -> bool:
    """Compare outputs and gradients for inputs (4, 2, H, N, d), see `_compare`."""
    dropout = Dropout(0.0).train(training)

    def results(attend: Attend) -> Tensor:
        qkv = [part.detach().requires_grad_() for part in inputs[:3]]
        output, _ = attend(*qkv, mask, dropout)
        return torch.stack([output, *torch.autograd.grad((output * inputs[3]).sum(), qkv)])

    ours, kernel = results(attention), results(_fused)
    difference, size = ((x.abs().flatten(1).amax(dim=1)) for x in (ours - kernel, kernel))
    return bool((difference <= TOLERANCE[inputs.dtype] * size).all())


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, _: Dropout
) -> tuple[Tensor, None]:
    return F.scaled_dot_product_attention(query, key, value, mask), None
