"""Learning rate, parameter groups, and optimizers that resume exactly."""

import dataclasses

import pytest
import torch
from torch import Tensor

from models import PLAIN
from vit.distributed.world import World
from vit.model.vit import VisionTransformer
from vit.training.config import OptimConfig
from vit.training.muon import Muon, orthogonalize
from vit.training.optim import build_optimizers

BLOCK_MATRICES = ("attn.qkv.weight", "attn.proj.weight", "mlp.fc1.weight", "mlp.fc2.weight")
RATES = {
    "lr": 0.01, "weight_decay": 0.5, "layer_decay": None,
    "muon_lr": 0.02, "muon_weight_decay": 0.75, "muon_momentum": 0.9,
}  # fmt: skip

VARIANTS = {
    "fixed_positions": {"pos_embed": "sincos", "mlp_conv": True},
    "all": {"stem": "conv", "reg_tokens": 1, "qk_norm": True, "init_values": 0.1, "head_dim": 6},
}


def build_vit(seed: int = 0, **kwargs) -> VisionTransformer:
    torch.manual_seed(seed)
    sizes = {"img_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**(PLAIN | sizes | {"mlp_ratio": 2} | kwargs))


def is_matrix(key: str, parameter: Tensor) -> bool:
    in_block = key.startswith("blocks.") and key.endswith(BLOCK_MATRICES)
    return in_block or (key.startswith("patch_embed.") and parameter.ndim == 4)


def apart(key: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """Take a weight apart into the matrices that Muon is to make orthogonal."""
    if tensor.ndim == 4:
        return (tensor.permute(0, 2, 3, 1).flatten(1),)
    return tensor.chunk(3) if key.endswith("attn.qkv.weight") else (tensor,)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_group_and_what_is_decayed_and_how_much(variant, name):
    model = build_vit(**variant)
    optimizers = build_optimizers(model, OptimConfig(name=name, **RATES))
    grouped = [
        place
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        for place in range(parameter.data_ptr(), parameter.data_ptr() + 4 * parameter.numel(), 4)
    ]
    assert len(grouped) == len(set(grouped))
    assert len(grouped) == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)  # leaves nothing but the decay
    for optimizer in optimizers:
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


class Apart(World):
    """A process that is told nothing by the others."""

    def add(self, tensors: list[torch.Tensor]) -> None:
        pass


@pytest.mark.parametrize("size", [2, 5])
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


def test_default_rates_are_those_that_the_results_were_measured_with():
    found = dataclasses.asdict(OptimConfig())
    assert found == {
        "name": "muon", "lr": 2e-3, "weight_decay": 0.05, "muon_lr": 0.02,
        "muon_weight_decay": 0.05, "muon_momentum": 0.85, "layer_decay": None,
        "schedule": "linear", "warmup": 0.05, "label_smoothing": 0.1, "clip_grad": None,
        "ema_decay": None,
    }  # fmt: skip
