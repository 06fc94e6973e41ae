"""Whatever `scaled_dot_product_attention` computes is what predicts, is exported and is drawn.

The function is edited as a user would edit it, line by line, and compared with NumPy.

Shapes: B images, H heads, N tokens, d head width.
"""

import functools
import inspect
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from vit.classifier import Classifier, build_model
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.explain.rollout import attention_rollout
from vit.model import attention, fused_kernel
from vit.model.attention import MultiHeadSelfAttention
from vit.model_file import load, save_model
from vit.reporting.attention_records import attention_records
from vit.reporting.config import ExportConfig
from vit.reporting.export import export_run
from vit.reporting.export_formats import FORMATS
from vit.training.config import from_dict

SCORES = "scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)"
WEIGHTS = "weights = masked_softmax(scores, mask)"
CLASSES = ("cat", "dog", "ship")
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
Array = np.ndarray


def softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def scores_of(q: Array, k: Array) -> Array:
    return np.einsum("bhnd,bhmd->bhnm", q, k) / q.shape[-1] ** 0.5


@dataclass(frozen=True)
class Edit:
    """A line of the function, what replaces it, and the weights (B, H, N, N) in NumPy."""

    line: str
    replacement: str
    weights: Callable[[Array, Array], Array] = lambda q, k: softmax(scores_of(q, k))
    values: Callable[[Array], Array] = lambda v: v


EDITS = {
    "sigmoid": Edit(
        WEIGHTS,
        "weights = scores.sigmoid() / scores.shape[-1]",
        lambda q, k: 1 / (1 + np.exp(-scores_of(q, k))) / q.shape[2],
    ),
    "talking heads": Edit(
        WEIGHTS,
        WEIGHTS + "\n    weights = 0.4 * weights + 0.6 * weights.roll(1, dims=-3)",
        lambda q, k: np.einsum(
            "gh,bhnm->bgnm", 0.4 * np.eye(3) + 0.6 * np.eye(3)[[2, 0, 1]], softmax(scores_of(q, k))
        ),
    ),
    "value gate": Edit(
        "kept @ value", "kept @ (value * value.sigmoid())", values=lambda v: v / (1 + np.exp(-v))
    ),
}
with_edits = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Look at the code anew in each test, as in a process of its own."""
    fused_kernel.is_released.cache_clear()
    torch.compiler.reset()


def write(monkeypatch: pytest.MonkeyPatch, line: str, replacement: str) -> None:
    """Edit the function in the source code of its module."""
    source = inspect.getsource(attention.scaled_dot_product_attention)
    assert source.count(line) == 1
    names = dict(vars(attention))
    exec(source.replace(line, replacement), names)
    edited = names["scaled_dot_product_attention"]
    monkeypatch.setattr(attention, "scaled_dot_product_attention", edited)


def lively(model: torch.nn.Module, std: float) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std, generator=generator)
    return model.eval()


@with_edits
def test_an_edited_function_is_what_the_module_computes(edit, monkeypatch, capsys):
    write(monkeypatch, edit.line, edit.replacement)
    module = lively(MultiHeadSelfAttention(12, 3), std=0.6)
    x = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))

    output, (same_output, weights) = module(x), module(x, need_weights=True)

    parts = module.qkv(x).chunk(3, dim=-1)
    q, k, v = (p.detach().double().numpy().reshape(2, 9, 3, 4).swapaxes(1, 2) for p in parts)
    expected = edit.weights(q, k)
    attended = torch.from_numpy(expected @ edit.values(v)).float()
    expected_output = module.proj(attended.transpose(1, 2).flatten(2))
    limit = 1e-5
    assert_close(weights.double(), torch.from_numpy(expected), rtol=0, atol=limit)
    assert_close(same_output, expected_output, rtol=0, atol=limit)
    assert_close(output, expected_output, rtol=0, atol=limit)
    assert capsys.readouterr().err.count("attention was edited: using vit/model/attention.py") == 1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A model file with random weights for 17 tokens."""
    preprocess = Preprocess((32, 32), (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    settings = {"stem": "linear", "mlp_conv": False, "class_token": True, "global_pool": "token"}
    size = {"embed_dim": 24, "depth": 2, "num_heads": 3, "patch_size": 8}
    config = from_dict({"data": {"root": str(tmp_path / "none")}, "model": settings | size})
    model = lively(build_model(config.model, preprocess, len(CLASSES)), std=0.6)
    classifier = Classifier(model, preprocess, CLASSES, torch.device("cpu"), torch.float32)
    save_model(tmp_path / "model.safetensors", classifier, config, step=1)
    return tmp_path


def predictions(run: Path, images: Tensor) -> dict[str, Tensor]:
    """Return the probabilities of the classes (B, C) by everything that computes them."""
    classifier, found = load(run, "cpu", "float32"), {}
    inputs = classifier.normalize(images)
    with torch.no_grad():
        found["need_weights"], weights = classifier.model(inputs, need_weights=True)
    found["float32"] = classifier.logits(images)
    found["bfloat16"] = load(run, "cpu", "bfloat16").logits(images)
    for name in ("onnx", "torch"):
        (exported,) = export_run(str(run), ExportConfig(formats=(name,)))
        found[name] = FORMATS[name].load(exported)(inputs)
    found["maps"], maps = classifier.maps(images, ("rollout", "relevance", "lrp_pixels"))
    assert all(each.isfinite().all() for each in maps.values())
    rollout = attention_rollout(list(weights), readout="class_token", num_prefix_tokens=1)
    assert_close(maps["rollout"].flatten(1), rollout * 17)
    found = {name: logits.softmax(dim=1) for name, logits in found.items()}
    image_set = ImageSet(images, torch.zeros(len(images), dtype=torch.int64), CLASSES)
    records = [record for _, part in attention_records(classifier, image_set) for record in part]
    found["tab"] = torch.tensor([[dict(r.details.top)[c] for c in range(3)] for r in records])
    stored = torch.from_numpy(np.stack([record.weights for record in records], axis=1))
    assert_close(stored, weights, rtol=0, atol=1e-6)
    return found


@pytest.mark.slow
def test_an_edited_function_is_what_predicts_is_exported_and_is_drawn(run, monkeypatch):
    edit = EDITS["talking heads"]
    images = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    unedited = load(run, "cpu", "float32").logits(images).softmax(dim=1)
    write(monkeypatch, edit.line, edit.replacement)

    found = predictions(run, images)

    assert found.keys() >= {"float32", "bfloat16", "onnx", "torch", "maps", "tab"}
    edited = found["need_weights"]
    change = (edited - unedited).abs().max()
    assert change > 5e-3
    for name, probabilities in found.items():
        error = (probabilities - edited).abs().max()
        assert error < (change / 2 if name == "bfloat16" else 1e-4), name


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
    assert fused_kernel.uses_fused_kernel(function, torch.device("cpu"), torch.float32)


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

    assert not fused_kernel.uses_fused_kernel(wrapper, torch.device("cpu"), torch.float32)
    assert fused_kernel.source_digest(wrapper) not in fused_kernel.RELEASED


def test_what_the_function_uses_may_change_later(monkeypatch):
    module, x = lively(MultiHeadSelfAttention(12, 3), std=0.6), torch.randn(2, 5, 12)
    before = module(x)
    monkeypatch.setattr(attention, "masked_softmax", lambda scores, mask: scores.sigmoid())
    output, _ = module(x, need_weights=True)
    assert_close(module(x), output)
    assert (output - before).abs().max() > 0.1


@pytest.mark.parametrize("edited", [False, True])
def test_compiling_and_exporting_ask_before_they_trace(edited, monkeypatch):
    if edited:
        write(monkeypatch, "** -0.5", "** -0.25")
    module, x = lively(MultiHeadSelfAttention(12, 3), std=0.6), torch.randn(2, 5, 12)
    expected = module(x, need_weights=True)[0]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    assert_close(compiled(x), expected)
    fused_kernel.is_released.cache_clear()
    program = torch.export.export(module, (x,))
    assert_close(program.module()(x), expected)
    targets = {node.target for node in program.graph.nodes}
    assert (torch.ops.aten.scaled_dot_product_attention.default in targets) != edited
