"""Parameter groups, their learning rates by layer, and Muon."""

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer as TimmViT
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from models import PLAIN
from vit.config import OptimConfig
from vit.model.vit import VisionTransformer
from vit.training.optim import build_optimizers

FUSED = ("attn.qkv.weight", "attn.module.in_proj_weight")  # queries, keys and values
BLOCK_MATRICES = (
    *FUSED, "attn.proj.weight", "attn.module.out_proj.weight", "mlp.fc1.weight", "mlp.fc2.weight"
)  # fmt: skip
RATES = {
    "lr": 0.01, "weight_decay": 0.5,
    "muon_lr": 0.02, "muon_weight_decay": 0.75, "muon_momentum": 0.9,
}  # fmt: skip

TINY = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
CONV = {
    "mean": {"class_token": False, "global_pool": "avg", "stem": "conv", "mlp_conv": True},
    "all": {"stem": "conv", "reg_tokens": 1, "qk_norm": True, "init_values": 0.1, "head_dim": 6},
}


def build_vit(**changes) -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(**(PLAIN | TINY | {"num_classes": 3} | changes))


def is_matrix(key: str, parameter: Tensor) -> bool:
    in_block = key.startswith("blocks.") and key.endswith(BLOCK_MATRICES)
    return in_block or (key.startswith("patch_embed.") and parameter.ndim == 4)


def apart(key: str, tensor: Tensor) -> tuple[Tensor, ...]:
    """Take a weight apart into the matrices that Muon is to make orthogonal."""
    if tensor.ndim == 4:
        return (tensor.permute(0, 2, 3, 1).flatten(1),)
    return tensor.chunk(3) if key.endswith(FUSED) else (tensor,)


@pytest.mark.parametrize("name", ["pvt_v2_b0", "twins_svt_small"])
def test_models_that_spare_no_set_of_weights_train(name):
    """timm's models return a dictionary or a list of names."""
    model = timm.create_model(name)
    (adamw,) = build_optimizers(model, OptimConfig(name="adamw"))
    assert sum(len(group["params"]) for group in adamw.param_groups) == len([*model.parameters()])


@pytest.mark.parametrize(
    "variant", [{"stem": "linear"}, {"stem": "conv"}, {"attention": nn.MultiheadAttention}]
)
def test_muon_updates_each_matrix_as_torchs_does(variant):
    model = build_vit(**variant)
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


def names(model: nn.Module, groups: list[dict]) -> dict[str, dict]:
    """Return the group of each parameter by name."""
    by_id = {id(parameter): group for group in groups for parameter in group["params"]}
    return {key: by_id[id(value)] for key, value in model.named_parameters() if id(value) in by_id}


def of_timm(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Return timm's learning rate and weight decay of each parameter."""
    groups = param_groups_layer_decay(
        model, 0.5, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.7
    )
    return {
        key: (0.01 * group["lr_scale"], group["weight_decay"])
        for key, group in names(model, groups).items()
    }


def of_adamw(model: nn.Module) -> dict[str, tuple[float, float]]:
    (adamw,) = build_optimizers(model, OptimConfig(name="adamw", **RATES, layer_decay=0.7))
    return {
        key: (group["initial_lr"], group["weight_decay"])
        for key, group in names(model, adamw.param_groups).items()
    }


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"reg_tokens": 2, "init_values": 0.1, "qk_norm": True},
        {"class_token": False, "global_pool": "avg"},
    ],
    ids=["class token", "all", "mean"],
)
def test_rates_by_layer_are_timms_for_its_model_and_ours(variant):
    model = build_vit(**variant)
    theirs = TimmViT(**TINY, num_classes=3, mlp_ratio=4, **{"global_pool": "token", **variant})
    expected = of_timm(theirs)
    assert of_adamw(model) == of_timm(model) == of_adamw(theirs) == expected
    assert expected["head.weight"] == (0.01, 0.5)
    assert expected["blocks.2.attn.qkv.weight"][0] == pytest.approx(0.01 * 0.7)
    assert expected["patch_embed.proj.weight"][0] == pytest.approx(0.01 * 0.7**4)


@pytest.mark.parametrize("variant", CONV.values(), ids=CONV)  # which timm does not have
def test_every_parameter_is_in_muon_or_its_adamw_with_the_rate_of_its_layer(variant):
    model = build_vit(**variant)
    optimizers = build_optimizers(model, OptimConfig(name="muon", **RATES, layer_decay=0.7))
    expected = of_timm(model)
    assert of_adamw(model) == expected
    assert expected["patch_embed.proj.0.weight"][0] == pytest.approx(0.01 * 0.7**4)
    left = dict(model.named_parameters())
    for optimizer, lr in zip(optimizers, (0.01, 0.02), strict=True):
        assert optimizer.param_groups[0]["initial_lr"] == max(
            group["initial_lr"] for group in optimizer.param_groups
        )  # the rate that is logged
        for key, group in names(model, optimizer.param_groups).items():
            assert is_matrix(key, left.pop(key)) == (lr == 0.02), key
            assert group["initial_lr"] / lr == pytest.approx(expected[key][0] / 0.01), key
            assert group["weight_decay"] == (0.75 if lr == 0.02 else expected[key][1]), key
    assert not left
