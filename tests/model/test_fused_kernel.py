"""Whatever `scaled_dot_product_attention` computes is what the model computes.

The function is edited as a user would edit it, line by line, and compared with NumPy.

Shapes: B images, H heads, N tokens, d head width.
"""

import functools
import inspect
import runpy
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from models import randomize
from vit.model import attention, fused_kernel
from vit.model.attention import MultiHeadSelfAttention

WEIGHTS = "weights = masked_softmax(scores, mask)"
EDITS = {  # talking heads, and values with a gate
    WEIGHTS: WEIGHTS + "\n    weights = 0.4 * weights + 0.6 * weights.roll(1, dims=-3)",
    "kept @ value": "kept @ (value * value.sigmoid())",
}
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Look at the code anew in each test, as in a process of its own."""
    fused_kernel.is_released.cache_clear()
    torch.compiler.reset()


def write(monkeypatch: pytest.MonkeyPatch, edits: dict[str, str]) -> None:
    """Edit the function in the source code of its module."""
    source = inspect.getsource(attention.scaled_dot_product_attention)
    for line, replacement in edits.items():
        assert source.count(line) == 1
        source = source.replace(line, replacement)
    names = dict(vars(attention))
    exec(source, names)
    edited = names["scaled_dot_product_attention"]
    monkeypatch.setattr(attention, "scaled_dot_product_attention", edited)


def test_an_edited_function_is_what_the_module_computes(monkeypatch, capsys):
    write(monkeypatch, EDITS)
    module = randomize(MultiHeadSelfAttention(12, 3), 0.6)
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))

    output, (same_output, weights) = module(x), module(x, need_weights=True)

    parts = module.qkv(x).chunk(3, dim=-1)
    q, k, v = (p.detach().double().numpy().reshape(2, 9, 3, 4).swapaxes(1, 2) for p in parts)
    exponentials = np.exp(np.einsum("bhnd,bhmd->bhnm", q, k) / 2)
    each_head = exponentials / exponentials.sum(-1, keepdims=True)
    expected = 0.4 * each_head + 0.6 * each_head[:, [2, 0, 1]]
    attended = torch.from_numpy(expected @ (v / (1 + np.exp(-v)))).float()
    expected_output = module.proj(attended.transpose(1, 2).flatten(2))
    limit = 1e-5
    assert_close(weights.double(), torch.from_numpy(expected), rtol=0, atol=limit)
    assert_close(same_output, expected_output, rtol=0, atol=limit)
    assert_close(output, expected_output, rtol=0, atol=limit)
    assert capsys.readouterr().err.count("attention was edited: using vit/model/attention.py") == 1


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
@pytest.mark.parametrize("device", DEVICES)
def test_the_released_function_is_what_torchs_kernel_computes(device, dtype, limit):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, 2, 3, 197, 8, generator=generator, dtype=torch.float64)
    # Short queries attend nearly uniformly, long ones to a single token.
    inputs[0] *= torch.logspace(-1, 1, 197, dtype=torch.float64)[:, None]
    inputs = inputs.to(device, dtype)

    def results(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        qkv = [part.detach().requires_grad_() for part in inputs[:3]]
        output = attend(*qkv)
        return output, *torch.autograd.grad(output, qkv, inputs[3])

    written = results(lambda *qkv: attention.scaled_dot_product_attention(*qkv)[0])
    for ours, kernels in zip(written, results(F.scaled_dot_product_attention), strict=True):
        assert_close(ours, kernels, rtol=0, atol=limit * kernels.abs().max().item())
    # If this fails after a change of attention.py, RELEASED in fused_kernel.py is to follow.
    function = attention.scaled_dot_product_attention
    assert fused_kernel.uses_fused_kernel(function, torch.device("cpu"), torch.float32, False)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "masked_softmax"])
@pytest.mark.parametrize(
    ("line", "replacement", "same"),
    [(")\n", ")   # a comment\n\n", True), ("scores", "score", False)],
)
def test_any_edit_but_of_comments_and_layout_is_noticed(name, line, replacement, same, tmp_path):
    source = inspect.getsource(getattr(attention, name)).replace(line, replacement)
    (tmp_path / "edited.py").write_text("from vit.model.attention import *\n\n" + source)
    edited = runpy.run_path(str(tmp_path / "edited.py"))[name]
    released = fused_kernel.source_digest(getattr(attention, name))
    assert released in fused_kernel.RELEASED
    assert (fused_kernel.source_digest(edited) == released) == same


def test_a_wrapper_of_the_released_function_is_an_edit():
    @functools.wraps(attention.scaled_dot_product_attention)
    def wrapper(*arguments):
        output, weights = attention.scaled_dot_product_attention(*arguments)
        return 2 * output, weights

    assert not fused_kernel.uses_fused_kernel(wrapper, torch.device("cpu"), torch.float32, False)
    assert fused_kernel.source_digest(wrapper) not in fused_kernel.RELEASED


def test_what_the_function_uses_may_change_later(monkeypatch):
    module, x = randomize(MultiHeadSelfAttention(12, 3), 0.6), torch.randn(2, 5, 12)
    before = module(x)
    monkeypatch.setattr(attention, "masked_softmax", lambda scores, mask: scores.sigmoid())
    output, _ = module(x, need_weights=True)
    assert_close(module(x), output)
    assert (output - before).abs().max() > 0.1


@pytest.mark.parametrize("edited", [False, True])
def test_compiling_and_exporting_ask_before_they_trace(edited, monkeypatch):
    if edited:
        write(monkeypatch, {"** -0.5": "** -0.25"})
    module, x = randomize(MultiHeadSelfAttention(12, 3), 0.6), torch.randn(2, 5, 12)
    expected = module(x, need_weights=True)[0]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_close(compiled(x), expected)
    fused_kernel.is_released.cache_clear()
    program = torch.export.export(module, (x,))
    assert_close(program.module()(x), expected)
    targets = {node.target for node in program.graph.nodes}
    assert (torch.ops.aten.scaled_dot_product_attention.default in targets) != edited


def test_attention_runs_as_written_on_a_cpu_while_a_bias_is_trained(monkeypatch):
    module = MultiHeadSelfAttention(12, 3, grid=(1, 5), rel_pos="bias")
    kernel, calls, tokens = F.scaled_dot_product_attention, [], torch.randn(2, 5, 12)
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *qkv: calls.append(qkv) or kernel(*qkv)
    )
    written = module(tokens)
    assert not calls
    with torch.no_grad():
        assert_close(module(tokens), written)
    assert calls


def test_a_model_has_the_digest_of_the_code_that_ran(tmp_path):
    """Though its file is edited during the run."""
    (file := tmp_path / "edited.py").write_text("def attend(query):\n    return query\n")
    attend = runpy.run_path(str(file))["attend"]
    before = fused_kernel.source_digest(attend)
    file.write_text("def attend(query):\n    return 2 * query\n")
    assert fused_kernel.source_digest(attend) == before != ""
