"""Whether torch's fused attention kernel may take the place of attention as it is written.

The kernel is faster, but computes only softmax(Q Kᵀ / √d) V, as the released function does (the
tests compare them). An edited function runs as it is written.
"""

import ast
import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from vit.console import note

# Digests of `scaled_dot_product_attention` and `masked_softmax`. After a change that keeps their
# results, the tests print the new ones.
RELEASED = ("c417820a4565f357", "1e3f3d262cf1d8bc")


def uses_fused_kernel(
    attention: Callable[..., Any], device: torch.device, dtype: torch.dtype, trains_bias: bool
) -> bool:
    """Return whether the kernel computes what a function does for such queries, and faster."""
    # On a CPU, the kernel's backward pass takes several times as long in bfloat16, and with a bias
    # that is trained, torch falls back from the kernel to separate products.
    faster = device.type != "cpu" or (dtype == torch.float32 and not trains_bias)
    softmax = getattr(attention, "__globals__", {}).get("masked_softmax")
    return faster and is_released(attention, softmax)


# torch.compile calls the function instead of tracing it. torch.compiler.assume_constant_result does
# the same, but imports torch's compiler, which takes a second.
uses_fused_kernel._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def is_released(attention: Any, softmax: Any) -> bool:
    """Return whether a function and the softmax that it uses are the released ones."""
    if (source_digest(attention), source_digest(softmax)) == RELEASED:
        return True
    note("attention was edited: using vit/model/attention.py instead of torch's fused kernel")
    return False


@functools.cache  # of the code that runs: its file may be edited meanwhile
def source_digest(code: Any) -> str:
    """Hash a function or class without comments, layout and what it calls; "" without source."""
    try:  # __code__ belongs to a wrapper, not to the function that it wraps
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(code, "__code__", code))))
    except (OSError, TypeError, SyntaxError):
        return ""
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:16]
