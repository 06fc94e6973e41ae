"""The doctor for attention: planted faults are found by their row, and nothing else is reported."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention as TimmAttention
from torch import Tensor, nn

from vit.attention_check.watch import Row
from vit.commands.check import check as check_with_cost
from vit.commands.check import run
from vit.commands.config import CheckConfig
from vit.model.attention import scaled_dot_product_attention
from vit.model.definitions import read_definitions
from vit.model.variants import ATTENTION

check = partial(check_with_cost, with_cost=False)

RIGHT = """
import math
import torch
import torch.nn.functional as F
from torch import Tensor, nn

class Mine(nn.Module):
    def __init__(self, dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads, self.d = num_heads, dim // num_heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.out, self.dropout = nn.Linear(dim, dim), nn.Dropout(dropout)

    def forward(self, x, mask=None):
        B, N, D = x.shape
        q = self.q(x).view(B, N, self.num_heads, self.d).transpose(1, 2)
        k = self.k(x).view(B, N, self.num_heads, self.d).transpose(1, 2)
        v = self.v(x).view(B, N, self.num_heads, self.d).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        weights = torch.softmax(scores, dim=-1)
        heads = self.dropout(weights) @ v
        return self.out(heads.transpose(1, 2).reshape(B, N, D)), weights
"""
END = RIGHT[RIGHT.index("weights = ") :]
SPLIT = ".view(B, N, self.num_heads, self.d).transpose(1, 2)"
MASK = "if mask is not None:\n            scores = scores.masked_fill(mask == 0, -1e9)"
# Old code, new code, the row that reports it, words of its advice.
FAULTS: dict[str, tuple[str, str, str, str]] = {
    "softmax over heads": ("dim=-1)", "dim=1)", "rows of weights", "over the heads"),
    "softmax over the batch": ("dim=-1)", "dim=0)", "rows of weights", "over the batch"),
    "scale of the width": ("math.sqrt(self.d)", "math.sqrt(D)", "scores are divided", "√32"),
    "view alone": (SPLIT, ".view(B, self.num_heads, N, self.d)", "permuting", "a view alone"),
    "merged without transpose": (
        "heads.transpose(1, 2).reshape", "heads.reshape", "permuting", "a view alone"
    ),
    "causal": (MASK, "scores = scores + torch.full((N, N), -1e9).triu(1)", "permuting", "causal"),
    "mask ignored": (MASK, "", "mask", "is ignored"),
    "mask inverted": ("mask == 0", "mask == 1", "mask", "is inverted"),
    "mask inverted, and added masks": ("mask == 0", "mask != 0", "mask", "is inverted"),
    "detached after norms": (
        "q @ k.transpose(-2, -1)",
        "F.normalize(q.detach(), dim=-1) @ F.normalize(k.detach(), dim=-1).transpose(-2, -1)",
        "all weights", "get no gradient",
    ),
    "mask of the first image": ("mask == 0", "mask[:1] == 0", "mask", "of one image"),
    "mask too weak": ("-1e9", "-1.0", "mask", "keep weight"),
    "mask after the softmax": (
        f"{MASK}\n        weights = torch.softmax(scores, dim=-1)",
        "weights = torch.softmax(scores, dim=-1)\n        if mask is not None:\n"
        "            weights = weights * mask",
        "mask", "after the softmax",
    ),
    "NaN": ("-1e9", "-torch.inf", "mask", "NaN"),
    "weights after dropout": (
        "heads = self.dropout(weights) @ v", "weights = self.dropout(weights)\n"
        "        heads = weights @ v", "weights are from before dropout", "after dropout",
    ),
    "residual": ("return self.out(", "return x + self.out(", "output has no residual", "again"),
    "normalized": (
        "self.out(heads.transpose(1, 2).reshape(B, N, D)), weights",
        "F.layer_norm(self.out(heads.transpose(1, 2).reshape(B, N, D)), (D,)), weights",
        "output has no residual", "is normalized",
    ),
    "shared projection": ("k = self.k(x)", "k = self.q(x)", "queries and keys have", "symmetric"),
    "detached": ("v = self.v(x)", "v = self.v(x).detach()", "all weights", "v.bias get no"),
    "one head for all": (
        "scores = q @ k", "q = q.mean(dim=1, keepdim=True).expand_as(q)\n        scores = q @ k",
        "heads are independent", "heads are mixed",
    ),
    "exp overflows": (
        "torch.softmax(scores, dim=-1)", "scores.exp() / scores.exp().sum(-1, keepdim=True)",
        "finite with large scores", "torch.softmax",
    ),
    "layers in a list": (
        "self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)",
        "self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)\n"
        "        self.layers = [nn.Linear(dim, dim)]\n        self.v = lambda x: self.layers[0](x)",
        "all weights", "nn.ModuleList",
    ),
    "dropout of scores": (
        "torch.softmax(scores", "torch.softmax(self.dropout(scores)",
        "weights are from before dropout", "acts on the scores",
    ),
    "dropout that is always on": (
        "self.dropout(weights)", "F.dropout(weights, self.dropout.p)", "evaluation is",
        "active in evaluation",
    ),
    "rows that hide all": (
        "scores = q @ k", "q = q * math.nan\n        scores = q @ k", "evaluation is", "NaN"
    ),
    "two softmaxes": (
        "torch.softmax(scores, dim=-1)", "torch.softmax(torch.softmax(scores, dim=-1), dim=-1)",
        "rows of weights", "2 softmaxes",
    ),
    "a parameter that forward makes anew": (
        "B, N, D = x.shape",
        "B, N, D = x.shape\n        self.v.bias = nn.Parameter(self.v.bias.detach().clone())",
        "all weights", "v.bias get no gradient",
    ),
    "no bfloat16": (
        "B, N, D = x.shape",
        "B, N, D = x.shape\n        if torch.is_autocast_enabled('cpu'):\n"
        "            raise TypeError('no bfloat16')",
        "finite in bfloat16", "TypeError: no bfloat16",
    ),
    "repeated in place": ("B, N, D = x.shape", "B, N, D = x.relu_().shape", "eval", "in place"),
    "dropout that is not applied": ("self.dropout(weights)", "weights", "weights are", "no effect"),
    "no output projection": ("self.out(heads", "(heads", "equals torch's", "output projection"),
    "mean over tokens": (
        "return self.out(heads.transpose(1, 2).reshape(B, N, D))",
        "return self.out(heads.transpose(1, 2).reshape(B, N, D).mean(1, True).expand(B, N, D))",
        "equals torch's", "something else",
    ),
    "no transpose": (
        f"q = self.q(x){SPLIT}\n        k = self.k(x){SPLIT}\n        v = self.v(x){SPLIT}",
        "q, k, v = (f(x).view(B, N, self.num_heads, self.d) for f in (self.q, self.k, self.v))",
        "shapes", "the weights must be [3, 2, 10, 10]",
    ),
    "heads before images": (
        END,
        END.replace("torch.softmax(scores, dim=-1)", "torch.sigmoid(scores)").replace(
            "), weights", "), weights.transpose(0, 1).flatten(0, 1)"
        ),
        "shapes", "all images of one head",
    ),
    "mask of another shape": ("mask == 0", "mask[:, :, 0, 0, 0] == 0", "mask", "IndexError"),
    "wrong shape": ("reshape(B, N, D)", "reshape(B, N, D)[:, :-1]", "can be called", "[3, 9, 64]"),
}  # fmt: skip


def define(folder: Path, source: str) -> Any:
    file = folder / "mine.py"
    file.write_text(source)
    return read_definitions(file).Mine


def notable(rows: list[Row]) -> dict[str, Row]:
    return {row.property: row for row in rows if row.result in ("failed", "remark")}


def test_right_attention_passes(tmp_path):
    with torch.no_grad():  # as a notebook may leave it
        rows = check_with_cost(define(tmp_path, RIGHT))
    assert [row.result for row in rows] == ["passed"] * len(rows) and len(rows) > 14


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_reported_in_its_row(fault, tmp_path):
    old, new, row, words = FAULTS[fault]
    assert old in RIGHT
    found = notable(check(define(tmp_path, RIGHT.replace(old, new))))
    (name,) = [key for key in found if key.startswith(row)]
    assert words in found[name].advice


@pytest.mark.parametrize(("old", "new"), [
    ("\n    def forward", "\n        nn.init.zeros_(self.out.weight)\n    def forward"),
    ("super().__init__()", "super().__init__()\n        self.out = nn.Linear(dim, dim)"),
    (SPLIT, ".view(B, N, self.d, self.num_heads).permute(0, 3, 1, 2)"),
    (
        "weights = torch.softmax(scores, dim=-1)",
        "weights = torch.softmax(scores.transpose(0, 1).flatten(0, 1), dim=-1)\n"
        "        weights = weights.view(self.num_heads, B, N, N).transpose(0, 1)",
    ),
    (
        f"{MASK}\n        weights = torch.softmax(scores, dim=-1)",
        "weights = torch.softmax(scores, dim=-1)\n        if mask is not None:\n"
        "            weights = weights * mask\n"
        "            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)",
    ),
])  # fmt: skip
def test_equivalent_implementations_pass(old, new, tmp_path):
    """Zeros at the start, other orders of layers and heads, and weights masked alike."""
    results = {row.result for row in check(define(tmp_path, RIGHT.replace(old, new)))}
    assert old in RIGHT and results <= {"passed", "unknown"}


def test_a_convolution_of_values_is_a_choice(tmp_path):
    layers = "self.out, self.dropout = nn.Linear(dim, dim)"
    source = RIGHT.replace(
        layers, f"self.near = nn.Conv1d(dim, dim, 3, padding=1)\n        {layers}"
    )
    source = source.replace("self.v(x)", "self.near(self.v(x).transpose(1, 2)).transpose(1, 2)")
    row = notable(check(define(tmp_path, source)))["permuting tokens permutes outputs"]
    assert row.result == "remark" and "place of a token" in row.advice


class BatchSecond(nn.Module):
    """As in torch's module by default; a norm hides by which factor images differ."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(dim), nn.MultiheadAttention(dim, num_heads)

    def forward(self, x: Tensor) -> Any:
        x = self.norm(x)
        return self.attend(x, x, x)


def test_images_that_attend_to_each_other_are_told_apart_after_a_norm():
    found = notable(check(BatchSecond))
    assert "batch_first=True" in found["images are independent"].advice


def test_unrecognized_projections_fail_no_check(tmp_path):
    """Values without a projection, and queries and keys in another order."""
    for old, new in (("self.v(x)", "x"), ("q = self.q(x)", "v = self.v(x)\n        q = self.q(x)")):
        assert old in RIGHT
        rows = check(define(tmp_path, RIGHT.replace(old, new)))
        assert not [
            row for row in rows if row.result == "failed" and "gradient" not in row.property
        ]


class TokensFirst(nn.Module):
    """torch's module, which takes (N, B, D) without batch_first."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_attention_along_the_batch_is_found():
    assert "batch_first" in notable(check(TokensFirst))["images are independent"].advice


def test_projections_without_layers_are_found(tmp_path):
    layers = (
        "self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)"
    )
    matrices = "self.wq, self.wk = (nn.Parameter(torch.randn(dim, dim) / 8) for _ in range(2))"
    source = RIGHT
    for old, new in (
        ("self.q(x)", "(x @ self.wq)"),
        ("self.k(x)", "(x @ self.wk)"),
        (layers, f"{matrices}\n        self.v = nn.Linear(dim, dim)"),
    ):
        assert old in source
        source = source.replace(old, new)
    rows = check(define(tmp_path, source))
    assert [row for row in rows if row.result != "passed"] == []


def few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Any:
    """A function without dropout."""
    return scaled_dot_product_attention(query, key, value, mask)


@pytest.mark.parametrize("attention", [
    scaled_dot_product_attention, nn.MultiheadAttention, TimmAttention, ATTENTION["cosine"], few,
])  # fmt: skip
def test_attention_of_libraries_gives_no_false_alarm(attention):
    assert not notable(check(attention))


@pytest.mark.parametrize("name", ["sigmoid", "differential"])
def test_sigmoid_and_differential_attention_get_one_remark(name):
    found = notable(check(ATTENTION[name]))
    assert {key: row.result for key, row in found.items()} == {"rows of weights sum to 1": "remark"}


def average(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Uniform attention, which uses neither queries nor keys."""
    weights = torch.full((*query.shape[:-1], key.shape[-2]), 1 / key.shape[-2])
    return weights @ value, weights


class TalkingHeads(nn.Module):
    """Heads exchange weights (arXiv 2003.02436), with a bias as in CaiT."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads, self.mix = num_heads, nn.Linear(num_heads, num_heads)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, dim=-1))
        q, k, v = (part.transpose(1, 2) for part in parts)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
        weights = self.mix(weights.movedim(1, -1)).movedim(-1, 1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class BareHead(nn.Module):
    """A head's class without mask and dropout."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
        return average(query, key, value)


def test_what_may_be_meant_is_no_failure_and_calls_say_what_is_passed():
    rows = [row for attention in (average, TalkingHeads) for row in check(attention)]
    assert "failed" not in {row.result for row in rows}
    (row,) = check(BareHead)
    assert "called with query, key, value, mask and dropout" in row.advice


class PositionTable(nn.Module):
    """A bias for each offset, of more offsets than ten tokens have."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads, self.table = num_heads, nn.Parameter(torch.randn(31, num_heads))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        bias = self.table[(place - place[:, None]).clamp(-15, 15) + 15].permute(2, 0, 1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for part in self.qkv(x).chunk(3, dim=-1))  # fmt: skip
        weights = (q @ k.mT * q.shape[-1] ** -0.5 + bias).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def test_rows_of_a_table_that_few_tokens_do_not_use_are_no_fault():
    rows = {row.property: row.result for row in check(PositionTable)}
    assert rows["all weights get gradients"] == "passed"


class Loop(nn.Module):
    """Attention of one image and one head at a time."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = n_heads, nn.Linear(d, 3 * d)

    def forward(self, sequences: Tensor) -> Tensor:
        images = []
        for image in sequences:
            parts = zip(*(x.chunk(self.heads, dim=-1) for x in self.qkv(image).chunk(3, dim=-1)),
                        strict=True)  # fmt: skip
            heads = [(q @ k.T * q.shape[-1] ** -0.5).softmax(dim=-1) @ v for q, k, v in parts]
            images.append(torch.cat(heads, dim=-1))
        return torch.stack(images)


class LoopOverImages(Loop):
    """Of one image, but all heads, which is not understood."""

    def forward(self, sequences: Tensor) -> Tensor:
        images = []
        for image in sequences:
            q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(0, 1)
                       for x in self.qkv(image).chunk(3, dim=-1))  # fmt: skip
            images.append(((q @ k.mT).softmax(dim=-1) @ v).transpose(0, 1).flatten(1))
        return torch.stack(images)


def test_attention_in_loops_gives_no_false_alarm():
    assert not [row for row in check(Loop) if row.result == "failed"]
    (row,) = (row for row in check(LoopOverImages) if row.result == "failed")
    assert "its softmax has the shape [2, 10, 10] instead of [3, 2, 10, 10]" in row.advice


def test_json_output_replaces_only_earlier_output(tmp_path, monkeypatch):
    monkeypatch.setitem(ATTENTION, "mine.py:Mine", None)  # removed at the end
    file, own, other = (tmp_path / name for name in ("mine.py", "rows.json", "package.json"))
    file.write_text(RIGHT)
    other.write_text('[{"name": "mine"}]')
    for target in (own, own):
        run(f"{file}:Mine", CheckConfig(json=str(target)))
    with pytest.raises(ValueError, match=r"^json: .*package\.json exists and is not of this"):
        run(f"{file}:Mine", CheckConfig(json=str(other)))
    assert other.read_text() == '[{"name": "mine"}]' and '"passed"' in own.read_text()


def test_a_class_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="the class Row is not a torch"):
        check(Row)


class Uniform(nn.Module):
    """Attention without parameters, and with a table that is not trained."""

    def __init__(self, dim):
        super().__init__()
        self.table = nn.Parameter(torch.ones(65), requires_grad=False)

    def forward(self, x):
        return (x @ x.mT * self.table[: x.shape[1]]).softmax(dim=-1) @ x


def test_nothing_has_to_be_trained():
    rows = {row.property: row.result for row in check_with_cost(Uniform)}
    assert rows["all weights get gradients"] == "passed"
    assert rows["time and memory of a training step"] == "passed"


def test_a_failed_property_ends_with_exit_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ATTENTION, "wrong.py:Mine", None)  # removed at the end
    (file := tmp_path / "wrong.py").write_text(RIGHT.replace("dim=-1)", "dim=1)"))
    with pytest.raises(SystemExit) as ended:
        run(f"{file}:Mine", CheckConfig())
    assert ended.value.code == 1 and "✗ rows of weights sum to 1" in capsys.readouterr().out
