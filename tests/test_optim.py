"""Learning rate, parameter groups, and optimizers that resume exactly."""

import io
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

from models import PLAIN
from vit.distributed.world import World
from vit.model.vit import VisionTransformer
from vit.training.config import OptimConfig
from vit.training.muon import Muon, orthogonalize
from vit.training.optim import build_optimizers, set_lr
from vit.training.schedule import lr_at

SCHEDULES = ["linear", "cosine"]
NAMES = ["adamw", "muon"]
BLOCK_MATRICES = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
RATES = {
    "lr": 0.01, "weight_decay": 0.5, "layer_decay": None,
    "muon_lr": 0.02, "muon_weight_decay": 0.75, "muon_momentum": 0.9,
}  # fmt: skip

VARIANTS = {
    "class token": {},
    "mean": {"class_token": False, "global_pool": "avg"},
    "registers": {"reg_tokens": 2},
    "conv stem": {"stem": "conv"},
    "fixed positions": {"pos_embed": "sincos"},
    "no positions": {"pos_embed": "none"},
    "mixing mlp": {"mlp_conv": True},
    "all": {
        "stem": "conv",
        "reg_tokens": 1,
        "qk_norm": True,
        "init_values": 0.1,
        "head_dim": 6,
    },
}
with_variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
with_names = pytest.mark.parametrize("name", NAMES)


def build_vit(seed: int = 0, **kwargs) -> VisionTransformer:
    torch.manual_seed(seed)
    sizes = {"img_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**(PLAIN | sizes | {"mlp_ratio": 2} | kwargs))


def take_steps(model: VisionTransformer, optimizers: list[Optimizer], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 8, 8, generator=generator)
        labels = torch.randint(3, (4,), generator=generator)
        set_lr(optimizers, lr_at(step, total_steps=8, warmup_steps=2, decay="linear"))
        F.cross_entropy(model(images), labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def is_matrix(key: str, parameter: Tensor) -> bool:
    in_block = key.startswith("blocks.") and key.endswith(BLOCK_MATRICES)
    return in_block or (key.startswith("patch_embed.") and parameter.ndim == 4)


def apart(key: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """Take a weight apart into the matrices that Muon is to make orthogonal."""
    if tensor.ndim == 4:
        return (tensor.permute(0, 2, 3, 1).flatten(1),)
    return tensor.chunk(3) if key.endswith("attn.qkv.weight") else (tensor,)


@settings(max_examples=50)
@given(st.sampled_from(SCHEDULES), st.integers(1, 400), st.data())
def test_rate_rises_to_its_peak_and_falls_to_zero(schedule, total, data):
    warmup = data.draw(st.integers(0, total - 1))
    rates = [lr_at(step, total, warmup, schedule) for step in range(total + 1)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] > 0
    assert rates[warmup] == 1
    assert rates[total] == pytest.approx(0, abs=1e-12)
    up, down = rates[: warmup + 1], rates[warmup:]
    assert all(low < high for low, high in pairwise(up))
    assert all(high > low for high, low in pairwise(down))


def test_linear_rates():
    expected = [1 / 4, 2 / 4, 3 / 4, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0]
    rates = [lr_at(step, 8, 3, "linear") for step in range(9)]
    assert rates == pytest.approx(expected, abs=1e-12)


def test_cosine_rates():
    half = math.sqrt(0.5)
    expected = [1 / 3, 2 / 3, 1, (1 + half) / 2, 1 / 2, (1 - half) / 2, 0]
    rates = [lr_at(step, 6, 2, "cosine") for step in range(7)]
    assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_warmup_the_first_step_is_the_peak(schedule):
    assert lr_at(0, 10, 0, schedule) == 1
    assert lr_at(5, 10, 0, schedule) == pytest.approx(0.5, abs=1e-12)


@with_variants
@with_names
def test_every_parameter_is_updated_by_one_group(variant, name):
    model = build_vit(**variant)
    grouped = [
        place
        for optimizer in build_optimizers(model, OptimConfig(name=name, **RATES))
        for group in optimizer.param_groups
        for parameter in group["params"]
        for place in range(parameter.data_ptr(), parameter.data_ptr() + 4 * parameter.numel(), 4)
    ]
    assert len(grouped) == len(set(grouped))
    assert len(grouped) == sum(parameter.numel() for parameter in model.parameters())


@with_variants
@with_names
def test_what_is_decayed_and_how_much(variant, name):
    model = build_vit(**variant)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)  # leaves nothing but the decay
    for optimizer in build_optimizers(model, OptimConfig(name=name, **RATES)):
        optimizer.step()
    for key, parameter in model.named_parameters():
        if parameter.ndim < 2 or key in ("cls_token", "reg_token", "pos_embed"):
            kept = 1.0
        elif name == "muon" and is_matrix(key, parameter):
            kept = 1 - 0.02 * 0.75
        else:
            kept = 1 - 0.01 * 0.5
        torch.testing.assert_close(
            parameter.data, torch.full_like(parameter, kept), rtol=0, atol=1e-6, msg=key
        )


@with_variants
def test_muon_gets_the_matrices_of_stem_and_blocks_and_nothing_else(variant):
    model = build_vit(**variant)
    adamw, muon = build_optimizers(model, OptimConfig(name="muon", **RATES))
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, Muon)
    ids = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    keys = {key for key, parameter in model.named_parameters() if id(parameter) in ids}
    assert keys == {key for key, value in model.named_parameters() if is_matrix(key, value)}
    assert {f"blocks.{block}.{name}" for block in range(2) for name in BLOCK_MATRICES} < keys


@pytest.mark.parametrize("stem", ["linear", "conv"])
def test_muon_updates_each_matrix_as_torchs_does(stem):
    model = build_vit(stem=stem)
    _, muon = build_optimizers(model, OptimConfig(name="muon", **RATES))
    learned = {key: value for key, value in model.named_parameters() if is_matrix(key, value)}
    expected = {
        key: [torch.nn.Parameter(part.clone()) for part in apart(key, value.detach())]
        for key, value in learned.items()
    }
    torchs = torch.optim.Muon(
        [part for parts in expected.values() for part in parts],
        lr=0.02, weight_decay=0.75, momentum=0.9,
    )  # fmt: skip
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        for key, parameter in learned.items():
            parameter.grad = torch.randn(parameter.shape, generator=draw)
            for part, gradient in zip(expected[key], apart(key, parameter.grad), strict=True):
                part.grad = gradient.clone()
        muon.step()
        torchs.step()
        muon.zero_grad()
        assert all(parameter.grad is None for parameter in learned.values())
    for key, parameter in learned.items():
        for part, found in zip(expected[key], apart(key, parameter.detach()), strict=True):
            # An update is about 0.02 / 4, and is rounded to bfloat16 on its way.
            torch.testing.assert_close(found, part.detach(), rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("shape", [(5, 16, 16), (3, 32, 8), (4, 8, 40), (1, 30, 31)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalize(matrices.bfloat16()).float()
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.3 and values.max() < 1.3
    # The directions stay: U f(S) V for some f.
    between = left.mT @ found @ right.mT
    assert (between - between.diagonal(dim1=1, dim2=2).diag_embed()).abs().max() < 0.1


def test_gradient_of_zero_stays_zero():
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_adamw_is_alone_without_muon():
    (adamw,) = build_optimizers(build_vit(), OptimConfig(name="adamw", **RATES))
    assert isinstance(adamw, torch.optim.AdamW)


def test_set_lr_scales_each_group_from_its_peak():
    optimizers = build_optimizers(build_vit(), OptimConfig(name="muon", **RATES))
    for share in (1.0, 0.25, 0.5, 0.0, 1.0):
        set_lr(optimizers, share)
        adamw, muon = ([g["lr"] for g in optimizer.param_groups] for optimizer in optimizers)
        assert adamw == pytest.approx([0.01 * share] * len(adamw), abs=1e-12)
        assert muon == pytest.approx([0.02 * share], abs=1e-12)


@with_names
def test_a_rate_of_zero_moves_nothing(name):
    model = build_vit()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizers = build_optimizers(model, OptimConfig(name=name, **RATES))
    take_steps(model, optimizers, range(8, 9))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@with_names
@pytest.mark.parametrize("variant", ["class token", "fixed positions", "all"])
def test_optimizers_from_a_file_go_on_identically(name, variant):
    model = build_vit(**VARIANTS[variant])
    start = {key: value.clone() for key, value in model.state_dict().items()}
    optimizers = build_optimizers(model, OptimConfig(name=name, **RATES))
    take_steps(model, optimizers, range(3))
    file = io.BytesIO()
    torch.save((model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]), file)
    take_steps(model, optimizers, range(3, 6))

    other = build_vit(seed=1, **VARIANTS[variant])
    # Other rates, so that those from the file show.
    others = build_optimizers(other, OptimConfig(name=name, lr=1.0, muon_lr=1.0, muon_momentum=0.0))
    weights, states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    other.load_state_dict(weights)
    for optimizer, state in zip(others, states, strict=True):
        optimizer.load_state_dict(state)
    take_steps(other, others, range(3, 6))
    for key, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
    learned = {key for key, _ in model.named_parameters()}
    assert all(not torch.equal(model.state_dict()[key], start[key]) for key in learned)


def test_fixed_positions_stay_fixed():
    model = build_vit(pos_embed="sincos")
    before = model.pos_embed.clone()
    take_steps(model, build_optimizers(model, OptimConfig(name="muon", **RATES)), range(3))
    assert torch.equal(model.pos_embed, before)


class Apart(World):
    """A process that is told nothing by the others."""

    def add(self, tensors: list[torch.Tensor]) -> None:
        pass


@pytest.mark.parametrize("size", [2, 3, 5])
def test_processes_orthogonalize_each_matrix_once(size: int) -> None:
    draw = torch.Generator().manual_seed(0)
    stacks = [torch.randn(shape, generator=draw) for shape in ((4, 8, 8), (1, 8, 16), (1, 16, 8))]
    parts = []
    for rank in range(size):
        some = [{"params": [torch.nn.Parameter(torch.ones(2, 2))]}]
        muon = Muon(some, {}, 1, 0, 0, Apart(rank, size))
        parts.append(muon._orthogonalized(stacks))
    for stack, *updates in zip(stacks, *parts, strict=True):
        torch.testing.assert_close(torch.stack(updates).sum(dim=0), orthogonalize(stack))
        owners = torch.stack([update.abs().sum(dim=(1, 2)) > 0 for update in updates])
        assert (owners.sum(dim=0) == 1).all()
    busy = [any(bool(update.any()) for update in updates) for updates in parts]
    assert all(busy)
