"""Whole attention modules: weights, masks and muting are those of their own softmax."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from models import save_untrained, with_gates
from small_runs import small
from vit.attention_check.trial import check_attention
from vit.commands.check import check
from vit.commands.config import ExportConfig
from vit.commands.export import write_exports
from vit.commands.train import train
from vit.explain.interventions import Interventions, gated_weights, gates_of
from vit.model import variants
from vit.model.config import ModelConfig
from vit.model.vit import VisionTransformer
from vit.model.whole_attention import WholeAttention, build_attention
from vit.pretrained.load import load
from vit.pretrained.sources import resolve_pretrained
from vit.reporting.live import graph_of
from vit.run.checkpoint import checkpoint_paths

pytestmark = pytest.mark.usefixtures("few_test_images")
B, N, D = 2, 17, 48
GRID = 4, 4  # and a class token
SIZES = {"img_size": 32, "patch_size": 8, "in_chans": 3, "num_classes": 10, "embed_dim": D}


class Plain(nn.Module):
    """As in many notebooks, with fields of its own for the softmax that it has computed."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.heads = nhead
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.scaled: dict[int, float] = {}  # what rows of a head are multiplied by

    def split(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, (B, H, N, d) each."""
        parts = self.qkv(x).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def merge(self, heads: Tensor) -> Tensor:
        return self.out(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        self.weights = F.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        scale = torch.tensor([self.scaled.get(head, 1.0) for head in range(self.heads)])
        return self.merge((self.weights * scale[:, None, None]) @ v)


class Fused(Plain):
    """The same with torch's function, which returns no weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(F.scaled_dot_product_attention(*self.split(x)))


class HeadsFirst(Plain):
    """A softmax of (H·B, N, N): all images of the first head, then those of the second."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.cat(part.chunk(self.heads, dim=-1)) for part in self.qkv(x).chunk(3, dim=-1)
        )
        weights = F.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        heads = (weights @ v).unflatten(0, (self.heads, -1))
        return self.out(heads.permute(1, 2, 0, 3).flatten(2))


def tokens() -> Tensor:
    return torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[Plain, Fused, HeadsFirst, nn.MultiheadAttention])
def pair(request: pytest.FixtureRequest) -> tuple[WholeAttention, Plain]:
    """A module in its place, and the plain one with the same weights, to compare with."""
    placed, own = WholeAttention(request.param, D, 3, GRID, 1).eval(), Plain(D, 3)
    state = placed.module.state_dict()
    names = {"in_proj_": "qkv.", "out_proj.": "out."}
    for old, new in names.items():
        state = {key.replace(old, new): value for key, value in state.items()}
    own.load_state_dict(state)
    return placed, own


def test_weights_are_those_of_the_softmax(pair):
    placed, own = pair
    expected, x = own(tokens()), tokens()
    assert_close(placed(x), expected)
    output, weights = placed(x, need_weights=True)
    assert_close(output, expected)
    assert_close(weights, own.weights, rtol=0, atol=1e-6)


def test_a_muted_head_has_rows_of_zeros(pair):
    placed, own = pair
    placed.gates[1], own.scaled[1] = 0.0, 0.0
    output, weights = placed(tokens(), need_weights=True)
    assert_close(output, own(tokens()))
    assert_close(weights, own.weights, rtol=0, atol=1e-6)  # still what the head attends to
    placed.gates[:] = 0.0  # the layer has no attention branch, and so no bias
    assert not placed(tokens(), need_weights=True)[0].any()


def test_a_masked_key_gets_no_weight(pair):
    placed, own = pair
    keep = torch.ones(B, 1, N, dtype=torch.bool)
    keep[0, :, 3:6] = False
    output, weights = placed(tokens(), keep, need_weights=True)
    assert not weights[0, :, :, 3:6].any()
    assert_close(weights.sum(dim=-1), torch.ones(B, 3, N))
    alone = torch.cat([tokens()[:1, :3], tokens()[:1, 6:]], dim=1)
    others = torch.cat([output[:1, :3], output[:1, 6:]], dim=1)
    assert_close(others, own(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The tensor attribute self.module.weights")
def test_export_is_the_module(pair):
    placed, _ = pair
    with torch.no_grad():
        free = {"x": {0: torch.export.Dim("batch")}, "need_weights": None}
        given = (tokens(),), {"need_weights": True}
        program = torch.export.export(placed, *given, dynamic_shapes=free).module()
        x = torch.cat([tokens(), tokens()[:1]])
        results = program(x, need_weights=True), placed(x, need_weights=True)
        assert all(map(torch.equal, *results))


class Undecided(HeadsFirst):
    """With scores that are all equal at first."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        nn.init.zeros_(self.qkv.weight.data[: 2 * d_model])
        nn.init.zeros_(self.qkv.bias.data[: 2 * d_model])


def test_a_trial_finds_out_how_a_module_works_whatever_its_weights(tmp_path):
    with torch.device("meta"):
        blocks = VisionTransformer(**SIZES, depth=2, num_heads=3, attention=Undecided).blocks
    traits = blocks[0].attn.traits
    assert traits.orders == (True, True) and traits.has_softmax and traits.can_mute
    assert traits is blocks[1].attn.traits  # because it takes time
    settings = {"attention": "torch.nn:MultiheadAttention", "embed_dim": D, "num_heads": 3}
    model = load(save_untrained(tmp_path, {**settings, "depth": 1}), "cpu").model
    assert model.blocks[0].attn.traits.can_mute


class OneHead(nn.Module):
    def __init__(self, input_dim: int, output_dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(input_dim, output_dim)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
        scores = self.proj(query) @ key.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return scores.softmax(-1) @ value


class Sigmoid(OneHead):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
        weights = torch.sigmoid(self.proj(query) @ key.transpose(-2, -1))
        return weights @ value, weights


class Hidden(OneHead):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
        return torch.sigmoid(self.proj(query) @ key.transpose(-2, -1)) @ value


class Long(OneHead):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Any = None) -> Any:
        return super().forward(query, key, value, mask)[:, :-1]


class Doubled(Plain):
    """A softmax with twice as many heads, of which half are used."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.cat([q @ k.mT for q, k, _ in [self.split(x)] * 2], dim=1).softmax(dim=-1)
        self.weights = weights[:, : self.heads]
        return self.merge(self.weights @ self.split(x)[2])


class Unknown(OneHead):
    def __init__(self, input_dim: int, kernel: int) -> None:
        super().__init__(input_dim, input_dim)


class WithPositions(OneHead):
    def forward(self, x: Tensor, pos_embed: Tensor) -> Any:
        return super().forward(x + pos_embed, x + pos_embed, x)


class FourHeads(Plain):
    def __init__(self, d_model: int) -> None:
        super().__init__(d_model, 4)


@pytest.mark.parametrize("module", [Sigmoid, Hidden])
def test_weights_without_a_softmax_are_those_that_are_returned_or_multiplied(module):
    placed = WholeAttention(module, D, 1, GRID, 1)
    output, weights = placed(tokens(), need_weights=True)
    assert weights.shape == (B, 1, N, N) and weights.sum(dim=-1).max() > 2
    assert_close((weights @ tokens()[:, None])[:, 0], output)


class Difference(Plain):
    """Two softmaxes, of whose difference the output is made."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        weights = (q @ k.mT).softmax(dim=-1) - (k @ q.mT).softmax(dim=-1) / 2
        return self.merge(weights @ v), weights


class DifferenceByHead(Plain):
    """The same, head by head."""

    def forward(self, x: Tensor) -> Any:
        parts = zip(*(part.unbind(dim=1) for part in self.split(x)), strict=True)
        heads = [((q @ k.mT).softmax(-1) - (k @ q.mT).softmax(-1) / 2, v) for q, k, v in parts]
        output = torch.stack([weights @ v for weights, v in heads], dim=1)
        return self.merge(output), torch.stack([weights for weights, _ in heads], dim=1)


@pytest.mark.parametrize("module", [Difference, DifferenceByHead])
def test_weights_that_are_returned_count_where_there_are_two_softmaxes(module):
    placed = WholeAttention(module, D, 3, GRID, 1)
    output, weights = placed(tokens(), need_weights=True)
    assert_close(weights.sum(dim=-1), torch.full((B, 3, N), 0.5))
    if module is Difference:
        assert torch.autograd.grad(output.sum(), weights)[0].any()
        return
    placed.is_gated = True
    with pytest.raises(ValueError, match="computes several softmaxes for each head, so no token"):
        placed(tokens())


class Silent(Difference):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0]


class Mixed(Plain):
    """Heads exchange weights after the softmax (arXiv 2003.02436)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT).softmax(dim=-1)
        self.weights = weights @ torch.ones(N, N).triu() / 2 + weights.flip(1)
        return self.merge(torch.einsum("bhnm,bhmd->bhnd", self.weights, v))


class Transposed(Plain):
    """Weights with the heads first in the product, but not in the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        self.weights = (q @ k.mT).softmax(dim=-1)
        return self.merge((self.weights.transpose(0, 1) @ v.transpose(0, 1)).transpose(0, 1))


class Reordered(Plain):
    """Weights with the heads first in the softmax, but not in the product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT).transpose(0, 1).flatten(0, 1).softmax(dim=-1)
        self.weights = weights.unflatten(0, (self.heads, -1)).transpose(0, 1)
        return self.merge(self.weights @ v)


class InDouble(Plain):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        self.weights = F.softmax(q @ k.mT, dim=-1, dtype=torch.float64).to(v.dtype)
        return self.merge(self.weights @ v)


class ByImage(Plain):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = [(of_q @ of_k.mT)[0] for of_q, of_k in zip(q, k, strict=True)]
        self.weights = torch.stack([one.softmax(dim=-1) for one in scores])[:, None]
        return self.merge(self.weights @ v)


class MixedLater(Plain):
    """Heads that a matrix mixes and a number scales, but not before training."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        self.mix, self.alpha = nn.Parameter(torch.eye(nhead)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        weights = (q @ k.mT).softmax(dim=-1)
        mix = self.mix / self.mix.sum(dim=0)  # rows still sum to 1
        self.weights = torch.einsum("bhnm,hg->bgnm", weights, mix) + self.alpha * weights.mT
        return self.merge(self.weights @ v)


class MixedHeads(Plain):
    """A softmax for each head, and weights that are mixed before their product."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        pairs = zip(q.unbind(1), k.unbind(1), strict=True)
        weights = torch.stack([(of_q @ of_k.mT).softmax(dim=-1) for of_q, of_k in pairs], dim=1)
        self.weights = weights + weights.flip(1) / 2
        return self.merge(self.weights @ v)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize(
    "module",
    [Silent, Mixed, Doubled, Transposed, Reordered, InDouble, ByImage, MixedLater, MixedHeads],
)
def test_weights_are_those_that_are_multiplied_by_the_values(module, prefix):
    heads, grid = 1 if module is ByImage else 3, GRID if prefix else (1, N)
    placed = WholeAttention(module, D, heads, grid, prefix).eval()
    if module is MixedLater:
        with torch.no_grad():
            placed.module.mix.copy_(torch.rand(3, 3))
            placed.module.alpha.fill_(0.5)
    output, weights = placed(tokens(), need_weights=True)
    placed(tokens())
    own = getattr(placed.module, "weights", None)
    own = Difference.forward(placed.module, tokens())[1] if own is None else own
    assert_close(weights, own, rtol=0, atol=1e-6, check_dtype=False)
    assert torch.autograd.grad(output.sum(), weights)[0].any()
    assert placed.traits.can_mute == (module not in (Mixed, Doubled, MixedLater, MixedHeads))


class ValuesFirst(Plain):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        self.weights = (q @ k.mT).softmax(dim=-1)
        return self.merge((v.mT @ self.weights.mT).mT)


class LocalBranch(Plain):
    """Weights that do not depend on the tokens, beside those that do."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        self.weights = (q @ k.mT).softmax(dim=-1)
        near = torch.eye(x.shape[1]).expand_as(self.weights)
        return self.merge(self.weights @ v + near @ v)


class SharedPrior(Plain):
    """All heads share a softmax of an image besides their own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        prior = (x @ x.mT).softmax(dim=-1)
        self.weights = ((q @ k.mT).softmax(dim=-1) + prior[:, None]) / 2
        return self.merge(self.weights @ v)


@pytest.mark.parametrize("module", [ValuesFirst, LocalBranch, SharedPrior])
def test_what_is_no_weight_of_a_head_is_not_taken_for_one(module):
    """Values and heads are as wide as there are tokens."""
    placed, x = WholeAttention(module, D, 3, GRID).eval(), tokens()[:, 1:]
    output, weights = placed(x, need_weights=True)
    assert_close(output, placed(x))
    assert_close(weights, placed.module.weights, rtol=0, atol=1e-6)


SHARED = nn.Parameter(torch.zeros(3))


class SharesATensor(Plain):
    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        self.shared = SHARED


class ImageLoop(Plain):
    """A softmax (H, N, N) for each image, which looks like one of a head if H = B."""

    def forward(self, x: Tensor) -> Tensor:
        images = zip(*self.split(x), strict=True)
        return self.merge(torch.stack([(q @ k.mT).softmax(-1) @ v for q, k, v in images]))


class InFloat32(Plain):
    def forward(self, x: Tensor) -> Any:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("no bfloat16")
        return super().forward(x)


class SequenceFirst(Plain):
    def forward(self, x: Tensor) -> Any:
        output = super().forward(x.transpose(0, 1))
        return output.transpose(0, 1), self.weights.mean(dim=1)


def test_a_trial_changes_no_module_and_knows_the_precision_of_the_run(monkeypatch):
    WholeAttention(SharesATensor, D, 3, GRID)
    assert not SHARED.any()
    monkeypatch.setitem(variants.ATTENTION, "mine", InFloat32)
    model = ModelConfig(attention="mine", num_heads=3, embed_dim=D)
    check_attention(model, GRID)
    with pytest.raises(ValueError, match="gives TypeError: no bfloat16"):
        check_attention(model, GRID, precision=torch.bfloat16)
    rows = {row.property: row.result for row in check(SequenceFirst, with_cost=False)}
    assert rows["images are independent"] == "failed" and "can be called" not in rows


class Branches(Plain):
    """Two softmaxes, each with a product of its own."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        return self.merge((q @ k.mT).softmax(dim=-1) @ v + (k @ q.mT).softmax(dim=-1) @ v)


def test_a_note_says_which_of_two_softmaxes_is_shown(monkeypatch, capsys):
    for module, words in ((Silent, ""), (Branches, "computes 2 softmaxes, of which the last")):
        monkeypatch.setitem(variants.ATTENTION, "mine", module)
        check_attention(ModelConfig(attention="mine", num_heads=3, embed_dim=D), GRID, 1)
        assert words in (noted := capsys.readouterr().err) and bool(noted) == bool(words)


class Table(Plain):
    """A bias for each pair of tokens, which fits one number of tokens."""

    def __init__(self, d_model: int, nhead: int, context_length: int) -> None:
        super().__init__(d_model, nhead)
        self.bias = nn.Parameter(torch.zeros(context_length, context_length))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge((q @ k.mT + self.bias).softmax(dim=-1) @ v)


def test_attention_is_tried_as_it_is_built_also_with_fewer_tokens(monkeypatch):
    monkeypatch.setitem(variants.ATTENTION, "mine", Table)
    model = ModelConfig(attention="mine", num_heads=3, embed_dim=D)
    check_attention(model, GRID, 1)
    with pytest.raises(ValueError, match=r"RuntimeError: .*with no fewer$"):
        check_attention(model, (3, 3), 1, "; --train.small_share 0 trains with no fewer", GRID)


class ByHand(Plain):
    """A softmax without torch's function, and weights of four dimensions."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).exp()
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.merge(weights @ v), weights


class ByHandMasked(ByHand):
    """The same with a mask of its own, (B, 1, N, N)."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        output, weights = super().forward(x)
        return output, weights if mask is None else weights * mask.view(len(x), 1, N, N)


class ByHandMaskedTable(ByHandMasked):
    """For a fixed number of tokens, so it cannot be tried with another."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        self.table = nn.Parameter(torch.zeros(N, 1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x + self.table, mask)


@pytest.mark.parametrize("module", [ByHandMasked, ByHandMaskedTable])
def test_without_a_softmax_the_module_gets_the_mask(module):
    keep = torch.ones(B, 1, N, dtype=torch.bool)
    keep[0, :, 3:6] = False
    weights = WholeAttention(module, D, 3, GRID, 1)(tokens(), keep, need_weights=True)[1]
    assert not weights[0, :, :, 3:6].any() and weights[1].all()


def test_weights_by_hand_have_gradients_and_cannot_be_masked(monkeypatch):
    monkeypatch.setitem(variants.ATTENTION, "mine", ByHand)
    check_attention(ModelConfig(attention="mine", num_heads=3, embed_dim=D), GRID, 1)
    placed = WholeAttention(ByHand, D, 3, GRID, 1)
    output, weights = placed(tokens(), need_weights=True)
    assert torch.autograd.grad(output.sum(), weights)[0].any()
    placed.is_gated = True
    for mask in (None, torch.ones(N, N, dtype=torch.bool)):
        with pytest.raises(
            ValueError, match="ByHand computes no softmax that can be read for each head, so no"
        ):
            placed(tokens(), mask)


def test_heads_without_a_softmax_cannot_be_muted_in_the_tab():
    alone, several = (
        VisionTransformer(**SIZES, depth=1, num_heads=heads, attention=ByHand) for heads in (1, 3)
    )
    gated_weights(alone, gates_of(alone))
    with pytest.raises(
        ValueError, match="ByHand computes no softmax that can be read for each head, so none"
    ):
        gated_weights(several, gates_of(several))


class Lazy(nn.Module):
    """Layers whose widths come from the first tokens, as in d2l.ai."""

    def __init__(self, num_hiddens: int, num_heads: int) -> None:
        super().__init__()
        self.inner, self.first = Plain(num_hiddens, num_heads), nn.LazyLinear(num_hiddens)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def test_lazy_layers_are_made_before_the_model_is_initialised():
    model = VisionTransformer(**SIZES, depth=1, num_heads=3, attention=Lazy)
    assert model.blocks[0].attn.module.first.weight.shape == (D, D)


class Variadic(Plain):
    def __init__(self, dim: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(dim, 1)


def test_a_variadic_argument_is_no_config():
    for key, value in {"num_heads": 3, "head_dim": 8, "attn_drop_rate": 0.1}.items():
        with pytest.raises(ValueError, match=f"^{key}: {value} is not allowed"):
            build_attention(Variadic, D, **({"num_heads": 1} | {key: value}), grid=GRID)


class Bare(nn.Module):
    """Attention without parameters."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT / self.dim**0.5).softmax(dim=-1) @ x


@pytest.mark.slow
@pytest.mark.parametrize("module", [ByHand, Plain, nn.MultiheadAttention, Bare])
def test_runs_finish_with_attention_that_cannot_be_muted_copied_or_read(
    module, tmp_path, monkeypatch
):
    """Heads are not muted, graphs of stored weights are left out, the report explains mistakes."""
    monkeypatch.setitem(variants.ATTENTION, "mine", module)
    model = {"attention": "mine", "proj_drop_rate": 0, "attn_drop_rate": 0}
    model["num_heads"] = 1 if module is Bare else 2
    changes = {"optim": {"ema_decay": None}, "train": {"epochs": 2, "small_share": 0.9}}
    config = small(tmp_path / "run", model=model, **changes)
    result = train(config)
    assert result is not None and result["mistakes"]
    assert not [row for row in check(module, with_cost=False) if row.property == "can be called"]


class Linear(Plain):
    """Linear attention (arXiv 1812.01243): softmaxes of queries and keys, and no weights."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(q.softmax(-1) @ (k.softmax(-2).mT @ v))


class ByHead(nn.Module):
    """A softmax for each head, with its scores as a keyword."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, 3 * dim // num_heads) for _ in range(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).chunk(3, dim=-1) for layer in self.layers]
        return torch.cat([torch.softmax(input=q @ k.mT, dim=-1) @ v for q, k, v in heads], dim=-1)


class Forgotten(Plain):
    """Of which a model file stores a part."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        self.offset = torch.randn(d_model)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.offset


class Late(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1 and not hasattr(self, "late"):  # not in the constructor of a model
            self.late = nn.Linear(D, D)
        return super().forward(x)


class Complex(Plain):
    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        self.register_buffer("turns", torch.polar(torch.ones(N), torch.arange(N).float()))


class Infinite(Plain):
    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__(d_model, nhead)
        mask = torch.full((N, N), -torch.inf).triu(1)
        self.mask = nn.Parameter(mask, requires_grad=False)


class AcrossImages(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(dim=0))


class Backwards(Plain):
    """Of which the first token sees only itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.merge(F.scaled_dot_product_attention(*self.split(x), is_causal=True))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (AcrossImages, "of one image that depend on another"),
        (Forgotten, "tensors that are neither parameters"),
        (Late, "it makes parameters outside of"),
        (Backwards, r"class token sees only itself, .* --model\.class_token"),
        (Complex, r"it has complex numbers: store torch\.view_as_real"),
        (Infinite, r"parameters that are not finite: use buffers"),
    ],
)
def test_what_would_go_wrong_later_is_refused_before_training(module, words, monkeypatch):
    """Weights of other images, what a model file would not store, and a blind class token."""
    model = ModelConfig(attention="mine", num_heads=2, embed_dim=D)
    monkeypatch.setitem(variants.ATTENTION, "mine", Plain)
    check_attention(model, GRID, 1)
    monkeypatch.setitem(variants.ATTENTION, "mine", module)
    with pytest.raises(ValueError, match=words):
        check_attention(model, GRID, 1)
    if module is Backwards:
        check_attention(replace(model, class_token=False, global_pool="avg"), GRID)


class Extra(nn.MultiheadAttention):
    def __init__(self, embed_dim: int, num_heads: int, batch_first: bool) -> None:
        super().__init__(embed_dim, num_heads, batch_first=batch_first, add_zero_attn=True)


@pytest.mark.parametrize(
    "setting", [{"qk_norm": True}, {"qkv_bias": False}, {"attn_drop_rate": 0.1}, {"head_dim": 7}]
)
def test_settings_that_a_module_does_not_take_are_refused(setting, monkeypatch):
    (key,), words = setting, "with Plain, a whole module that does not take it"
    with pytest.raises(ValueError, match=f"^{key}: .* {words}"):
        VisionTransformer(img_size=8, in_chans=3, num_classes=2, attention=Plain, **setting)
    monkeypatch.setitem(variants.ATTENTION, "mine", Plain)
    with pytest.raises(ValueError, match=f"^model.{key}: .* {words}"):
        check_attention(ModelConfig(attention="mine", **setting), GRID)


@pytest.mark.parametrize(
    ("module", "width", "heads", "words"),
    [
        (OneHead, D, 3, "num_heads: 3 is not allowed; it must be 1 with OneHead"),
        (Long, D, 1, "Long returns [2, 16, 48] for tokens of [2, 17, 48]"),
        (Unknown, D, 1, "the constructor of Unknown takes kernel, which is not known here"),
        (Extra, D, 3, "bias_k, bias_v and add_zero_attn"),
        (ImageLoop, D, 2, "ImageLoop computes no softmax that can be read for each head"),
        (WithPositions, D, 1, "WithPositions needs positions (pos_embed); give a default"),
        (FourHeads, D, 1, "its softmax has the shape [2, 4, 17, 17] instead of [2, 1, 17, 17]"),
        (FourHeads, D, 1, "; if it has heads, call their number num_heads in its constructor"),
        # Of queries and keys: their shape is that of weights where heads are as wide as that.
        (
            Linear,
            2 * N,
            2,
            "Linear computes no softmax that can be read for each head; let its forward return",
        ),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_line(module, width, heads, words):
    with pytest.raises(ValueError) as info:
        WholeAttention(module, width, heads, GRID, 1)(torch.randn(B, N, width), need_weights=True)
    assert words in str(info.value) and "\n" not in str(info.value)


# In a run.

NOTEBOOK = """
import torch, nobody_has_this
from torch import nn

class Attention(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.numbers = [x.item() for x in 2.0 ** -torch.arange(n_heads)], torch.ones(1).numpy()
        self.near = torch.eye(3).nonzero()
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.same = self.out
        self.register_buffer("future", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, query, key, value):
        B, N, D = query.shape
        q, k, v = self.qkv(query).view(B, N, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, N, D)), weights

print(Attention(8, 2)(torch.zeros(1, 2, 8)))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attribute")
def test_a_module_of_a_notebook_is_trained_resumed_explained_and_exported(
    tmp_path, monkeypatch, capsys
):
    cells = [{"cell_type": "code", "source": ["%pip list\n", NOTEBOOK]}]
    (tmp_path / "notes.ipynb").write_text(json.dumps({"cells": cells}))
    name = f"{tmp_path}/notes.ipynb:Attention"
    monkeypatch.setattr(variants, "ATTENTION", dict(variants.ATTENTION))
    model = {"attention": name, "num_heads": 2, "embed_dim": 24, "depth": 2, "patch_size": 8}
    model |= {"attn_drop_rate": 0.0, "proj_drop_rate": 0.0}
    config = small(tmp_path / "run", model=model, track={"probes": 2}, train={"epochs": 2})
    train(config)
    assert "attention fails" not in capsys.readouterr().out
    run = load(tmp_path / "run", "cpu")
    assert run.threads == 1  # the module might store what it computes
    tuned = replace(config, out=str(tmp_path / "tuned"))
    tuned = replace(tuned, model=replace(config.model, pretrained=str(tmp_path / "run")))
    assert resolve_pretrained(tuned, None)[1] is not None
    for path in (run.path, checkpoint_paths(tmp_path / "run")[-1]):
        path.unlink()
    train(config)  # resumes after the first epoch
    again = load(tmp_path / "run", "cpu").model.state_dict()
    for key, weight in run.model.state_dict().items():
        assert torch.equal(weight, again[key]), key

    images = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)
    inputs = run.normalize(images)
    logits, weights, _ = run.model.forward_intermediates(inputs)
    assert_close(logits, run.logits(images))
    # The last block, by hand, with a head that is muted.
    before, block = run.model.forward_intermediates(inputs)[2][0], run.model.blocks[1]
    own, grid = block.attn.module, (4, 4)
    query, key, value = own.qkv(block.norm1(before)).view(4, -1, 3, 2, 12).permute(2, 0, 3, 1, 4)
    rows = (query @ key.mT * 12**-0.5).softmax(dim=-1)
    assert_close(weights[1], rows, rtol=0, atol=1e-6)
    heads = (rows * torch.tensor([0.0, 1.0])[:, None, None]) @ value
    after = before + own.out(heads.transpose(1, 2).flatten(2))
    after = after + block.mlp(block.norm2(after), grid)
    expected = run.model.forward_head(run.model.norm(after))
    gates = gates_of(run.model)
    gates[1, 0] = 0.0
    assert_close(Interventions(run.model)(inputs, gates, torch.ones(1, 16))[0], expected)
    assert_close(with_gates(run.model, gates)(inputs), expected)
    (file,) = write_exports(run, ExportConfig(formats=("onnx",)))  # any batch; compares logits
    assert file.is_file()
    with pytest.raises(ValueError, match=r"timm is not possible, because timm has no .*attention"):
        write_exports(run, ExportConfig(formats=("timm",)))
    assert graph_of(run)
    maps = run.explain(images[0].movedim(0, -1).numpy()).maps
    assert all(values.isfinite().all() for values in maps.values())


class Head(nn.Module):
    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * head_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1) @ v


class HeadList(nn.Module):
    """As in nanoGPT's lecture: a softmax for each head, and a width that is a constant."""

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head(head_size) for _ in range(num_heads))
        self.proj = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class ImageByImage(HeadList):
    """As in a tutorial: a softmax for each head of each image."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([super(ImageByImage, self).forward(image) for image in x])


@pytest.mark.parametrize("module", [HeadList, ImageByImage])
def test_a_softmax_for_each_head_gives_weights_and_gradients_of_all(module):
    placed, keep = WholeAttention(module, D, 3, GRID, 1), torch.ones(B, 1, N, dtype=torch.bool)
    keep[0, :, :4] = False
    output, weights = placed(tokens(), keep, need_weights=True)
    q, k, v = placed.module.heads[2].qkv(tokens()).chunk(3, dim=-1)
    scores = (q @ k.mT / 4).masked_fill(~keep, -torch.inf)
    assert_close(weights[:, 2], scores.softmax(dim=-1))
    placed.gates[2] = 0.0
    muted = placed(tokens(), keep, need_weights=True)[0]
    change = (weights[:, 2] @ v) @ placed.module.proj.weight[:, 32:].T
    assert_close(output - muted, change, rtol=1e-4, atol=1e-5)
    # Gradients of a head's weights are the values times the gradient of what the head adds.
    placed.gates[2] = 1.0
    output, weights = placed(tokens(), need_weights=True)
    (gradient,) = torch.autograd.grad(output.sum(), weights)
    for head, module in enumerate(placed.module.heads):
        values = module.qkv(tokens()).chunk(3, dim=-1)[2]
        added = placed.module.proj.weight.sum(dim=0)[16 * head : 16 * head + 16]
        assert_close(gradient[:, head], (values @ added)[:, None].expand(B, N, N))


class Causal(nn.Module):
    """torch's module inside, with dropout, a mask, and other keys than queries."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(embed_dim, num_heads, 0.5, batch_first=True)
        self.keys = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(N, N, dtype=torch.bool).triu(1)
        padding = torch.zeros(B, N, dtype=torch.bool)
        padding[1, 2:4] = True
        return self.attend(x, self.keys(x), x, padding, need_weights=False, attn_mask=hidden)[0]


class Shared(Plain):
    """torch's function for pairs of heads that share a head of keys and values."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True))


@pytest.mark.parametrize("module", [Causal, Shared])
def test_torchs_attention_inside_a_module_is_what_it_is_without_weights(module):
    placed = WholeAttention(module, D, 4, GRID, 1).eval()
    output, weights = placed(tokens(), need_weights=True)
    assert_close(output, placed(tokens()))
    assert weights.shape == (B, 4, N, N)
    if module is Causal:
        assert not weights.triu(1).any() and not weights[1, :, :, 2:4].any()
    assert_close(weights.sum(dim=-1), torch.ones(B, 4, N))


class Configured(Plain):
    """A constructor with one object, and a mask (B, N, N) to which heads are added."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.n_embd, config.n_head)
        self.register_buffer("length", torch.tensor(config.block_size))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        return self.merge(F.softmax(scores, dim=-1) @ v)


class Dictionary(Plain):
    """A constructor with a dictionary, and a mask that is repeated for the heads."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config["hidden_size"], config["num_attention_heads"])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in self.split(x))
        scores = q @ k.mT
        if mask is not None:
            scores = scores.masked_fill(mask.repeat_interleave(self.heads, dim=0) == 0, -1e9)
        return self.merge((scores.softmax(dim=-1) @ v).unflatten(0, (-1, self.heads)))


class FlatFused(Plain):
    """torch's function for (B·H, N, d), in a constructor with the arguments of a head's."""

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__(num_heads * head_dim, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.flatten(0, 1) for part in self.split(x))
        return self.merge(F.scaled_dot_product_attention(q, k, v).unflatten(0, (-1, self.heads)))


class Wrapped(nn.Module):
    """torch's module, in whose masks True hides a key."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return self.attend(x, x, x, attn_mask=attn_mask)[0]


class OwnMask(Plain):
    """A mask that is used in another way: True hides, for keys, or added to the scores."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.split(x)
        scores = q @ k.mT
        weights = (scores if mask is None else self.hide(scores, mask)).softmax(dim=-1)
        return self.merge(weights @ v), weights


class TrueHides(OwnMask):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask, -1e9)


class OfKeys(OwnMask):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask.view(len(scores), -1)[:, None, None] == 0, -1e9)


class Added(OwnMask):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores + mask


class AddedCausal(Added):
    """As in GPT-2: the first rows can attend to hidden keys only."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.split(x)
        scores = (q @ k.mT).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1) > 0, -1e9)
        weights = (scores if mask is None else self.hide(scores, mask)).softmax(dim=-1)
        return self.merge(weights @ v), weights


class OverQueries(Plain):
    """A softmax over the queries, with its scores and dimension as keywords."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.merge(torch.softmax(input=q @ k.mT, dim=-2) @ v)


def test_a_mask_keeps_the_dimension_of_the_softmax():
    placed, shown = WholeAttention(OverQueries, D, 3, GRID, 1), torch.ones(N, N, dtype=torch.bool)
    assert torch.equal(placed(tokens(), shown), placed(tokens()))
    shown[:, 4] = False
    weights = placed(tokens(), shown, need_weights=True)[1]
    assert not weights[..., 4].any() and weights[..., 5].all()


class ByHandAdded(ByHand):
    """A mask that is added to the scores, with no softmax to mask instead."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        q, k, v = self.split(x)
        weights = (q @ k.mT + (0 if mask is None else mask)).exp()
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.merge(weights @ v), weights


@pytest.mark.parametrize(("module", "result", "words"), [
    (ByHandAdded, "failed", "keep weight"),
    (TrueHides, "remark", "is inverted"), (OfKeys, "passed", ""), (Added, "passed", ""),
    (AddedCausal, "passed", ""),
])  # fmt: skip
def test_the_doctor_tries_the_modules_own_mask(module, result, words):
    rows = {row.property: row for row in check(module, with_cost=False)}
    assert rows["mask"].result == result and words in rows["mask"].advice


@pytest.mark.parametrize("module", [
    Configured, Dictionary, FlatFused, Wrapped, ByHead, ImageByImage, TrueHides, OfKeys, Added,
    OneHead,
])  # fmt: skip
def test_a_mask_leaves_the_other_weights_in_proportion(module):
    """Whatever mask the module itself takes; it differs between images and heads."""
    heads = 1 if module is OneHead else 3
    placed = build_attention(module, D, heads, grid=GRID, num_prefix_tokens=1).eval()
    if module is Configured:  # by an object with what constructors take
        assert (placed.module.heads, placed.module.length) == (3, N)
    mask = torch.rand(B, heads, N, N, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0] = True
    kept = placed(tokens(), need_weights=True)[1] * mask
    weights = placed(tokens(), mask, need_weights=True)[1]
    assert_close(weights, kept / kept.sum(dim=-1, keepdim=True), rtol=1e-4, atol=1e-6)


class Repeated(nn.Module):
    """A list that repeats one head."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(dim, 3 * dim // num_heads)] * num_heads)

    forward = ByHead.forward


def test_heads_that_share_all_layers_are_found():
    rows = {row.property: row for row in check(Repeated, with_cost=False)}
    assert rows["heads are independent"].result == "failed"
    rows = {row.property: row for row in check(ByHead, with_cost=False)}
    assert rows["heads are independent"].result == "passed"


class Cached(Plain):
    """Makes a mask for the first tokens that it sees."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "ones"):
            self.ones = torch.ones(x.shape[1], 1)
        return super().forward(x) * self.ones


def test_building_a_model_leaves_nothing_in_a_module():
    module = WholeAttention(Cached, D, 2, GRID, 1)
    assert not hasattr(module.module, "ones")
    assert module(torch.randn(B, N, D)).shape == (B, N, D)


class LocalAndGlobal(Plain):
    """Half of the output attends to pooled tokens, which no mask is for."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        pooled = (part.unflatten(2, (-1, 3)).mean(dim=3) for part in (k, v))
        everywhere = F.scaled_dot_product_attention(q, *pooled)
        return self.merge(F.scaled_dot_product_attention(q, k, v) + everywhere)


def test_a_mask_is_for_attention_over_all_tokens_alone():
    placed = build_attention(LocalAndGlobal, D, 3, grid=(3, 3)).eval()
    tokens = torch.randn(B, 9, D)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    _, weights = placed(tokens, mask, need_weights=True)
    assert (weights[..., ~mask] == 0).all() and (weights[..., mask] > 0).all()


class Renormalized(Plain):
    """The larger weights, divided by their sum."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.split(x)
        weights = (q @ k.mT).softmax(dim=-1)
        weights = weights * (weights > 1 / x.shape[1])
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.merge(weights @ v), weights


class ReturnsScores(Plain):
    def forward(self, x: Tensor) -> Any:
        q, k, _ = self.split(x)
        return super().forward(x), q @ k.mT


def test_weights_that_are_returned_are_not_taken_for_dropout():
    row = "weights are from before dropout"
    (found,) = [x for x in check(ReturnsScores, with_cost=False) if x.property == row]
    assert "other weights than it multiplies by the values" in found.advice
    (found,) = [x for x in check(Renormalized, with_cost=False) if x.property == row]
    assert found.result == "passed" and "those that multiply the values" in found.number


def test_heads_whose_weights_are_divided_by_their_sum_cannot_be_muted():
    placed = build_attention(Renormalized, D, 3, grid=GRID, num_prefix_tokens=1).eval()
    mask = torch.ones(N, N, dtype=torch.bool).tril()
    assert placed(tokens(), mask)[0].isfinite().all()
    placed.is_gated = True
    with pytest.raises(ValueError, match=r"changes weights after .*, so no head can be muted"):
        placed(tokens())


class HalfLocal(Plain):
    """Two of four heads attend in one call, two in another."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        halves = zip(q.chunk(2, 1), k.chunk(2, 1), v.chunk(2, 1), strict=True)
        return self.merge(torch.cat([F.scaled_dot_product_attention(*h) for h in halves], 1))


def test_heads_may_attend_in_groups():
    placed = build_attention(HalfLocal, D, 4, grid=GRID, num_prefix_tokens=1).eval()
    q, k, _ = placed.module.split(x := tokens())
    expected = (q @ k.mT / q.shape[-1] ** 0.5).softmax(dim=-1)
    _, weights = placed(x, need_weights=True)
    assert_close(weights, expected)
    mask = torch.rand(B, 4, N, N, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[..., 0] = True
    _, weights = placed(x, mask, need_weights=True)
    assert_close(weights, expected * mask / (expected * mask).sum(dim=-1, keepdim=True))


class MeanOfHeads(nn.Module):
    """torch's module, whose second result is the mean over heads."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(
            d_model, nhead, kdim=d_model // 2, vdim=d_model // 2, batch_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        half = x[..., : x.shape[-1] // 2]
        output, weights = self.inner(x, half, half)
        return output * weights.diagonal(dim1=1, dim2=2)[..., None]


def test_torchs_module_returns_in_a_module_what_it_returns_alone():
    placed = build_attention(MeanOfHeads, D, 3, grid=GRID, num_prefix_tokens=1).eval()
    assert_close(placed(tokens(), need_weights=True)[0], placed.module(tokens()))
