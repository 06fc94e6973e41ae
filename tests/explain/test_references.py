"""Occlusion, integrated gradients, RISE and the logit lens, compared with direct computations."""

import functools
import itertools
from typing import Any

import captum.attr
import pytest
import timm
import torch
from torch import Tensor, nn

from models import PLAIN, randomize
from vit.explain.interventions import logit_lens
from vit.explain.maps import attention_maps
from vit.explain.references import integrated_gradients, occlusion, rise, to_patches
from vit.model.attention_model import prefix_names, require_attention
from vit.model.vit import VisionTransformer

GRID = (2, 3)  # of patches of 4 pixels


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    sizes = {"img_size": (8, 12), "embed_dim": 12, "num_classes": 5}
    return randomize(VisionTransformer(**(PLAIN | sizes)), 0.4)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(3, 3, 8, 12, generator=torch.Generator().manual_seed(0))


REFERENCES = ("occlusion", "integrated_gradients", "rise")
TARGET = torch.tensor([2, 0, 4])


def test_occlusion_is_feature_ablation_of_captum(model, images):
    found = occlusion(model, images, GRID, TARGET)
    numbers = torch.arange(6).view(GRID).repeat_interleave(4, 0).repeat_interleave(4, 1)
    oracle = captum.attr.FeatureAblation(model)
    expected = oracle.attribute(images, target=TARGET, feature_mask=numbers[None, None])
    torch.testing.assert_close(found, expected[:, 0, ::4, ::4], rtol=1e-4, atol=1e-5)
    assert found.abs().min() > 1e-4 and (found < 0).any()


def test_integrated_gradients_are_those_of_captum(model, images):
    steps = 3
    found = integrated_gradients(model, images, TARGET, steps)
    expected = captum.attr.IntegratedGradients(model).attribute(
        images, target=TARGET, n_steps=steps, method="riemann_middle"
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not found.requires_grad


@torch.no_grad()
def banzhaf(model, images: Tensor) -> Tensor:
    """The mean change of the probability by each patch, over all sets of the other patches."""
    values = {}
    for shown in itertools.product([False, True], repeat=6):
        mask = torch.tensor(shown).view(GRID).repeat_interleave(4, 0).repeat_interleave(4, 1)
        share = model(images * mask).softmax(dim=1)
        values[shown] = share.gather(1, TARGET[:, None])[:, 0]
    changes = torch.zeros(len(images), 6)
    for shown, value in values.items():
        for patch, present in enumerate(shown):
            changes[:, patch] += (value if present else -value) / 2**5
    return changes.unflatten(1, GRID)


def test_rise_approaches_banzhaf_values(model, images):
    expected = banzhaf(model, images)
    errors = []
    for count in (10, 500):
        found = rise(model, images, GRID, TARGET, count, torch.Generator().manual_seed(0))
        errors.append((found - expected).abs().mean().item())
    assert errors[1] < 0.06 * expected.abs().max() and errors[1] < errors[0] / 3


def test_references_are_kinds_of_map_and_made_in_float32(model, images, monkeypatch):
    few = functools.partial(rise, num_masks=20)
    monkeypatch.setattr("vit.explain.references.rise", few)
    logits, maps = attention_maps(model, images, [*REFERENCES, "rollout"])
    _, others = attention_maps(model, images, REFERENCES, logits.argmax(dim=1), torch.bfloat16)
    target = logits.argmax(dim=1)
    gradients = integrated_gradients(model, images, target).sum(dim=1)
    expected = {
        "occlusion": occlusion(model, images, GRID, target),
        "integrated_gradients": to_patches(gradients, GRID),
        "rise": few(model, images, GRID, target),
    }
    for kind, found in expected.items():
        scaled = found / found.abs().mean(dim=(1, 2), keepdim=True)
        torch.testing.assert_close(maps[kind], scaled)
        torch.testing.assert_close(others[kind], maps[kind], rtol=1e-4, atol=1e-4)


# The logit lens.


TINY = {
    "img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean without fc_norm": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "registers": {"reg_tokens": 2, "class_token": True, "global_pool": "avg"},
}
TIMMS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"reg_tokens": 2, "global_pool": "avg"},
    "distilled": {"model_name": "deit_tiny_distilled_patch16_224"},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "rotary": {"model_name": "vit_small_patch16_dinov3"},
}
NOT_ALONE = ("distilled", "attention pooling")
CASES = [*(("ours", name) for name in OURS), *(("timm", name) for name in TIMMS)]


def build(maker: str, variant: str) -> nn.Module:
    if maker == "ours":
        return randomize(VisionTransformer(**(PLAIN | TINY | OURS[variant])), 0.3)
    settings = {"model_name": "vit_tiny_patch16_224"} | TINY | TIMMS[variant]
    return randomize(timm.create_model(**settings), 0.3)


@torch.no_grad()
@pytest.mark.parametrize(("maker", "variant"), CASES)
def test_lens_reads_every_layer_as_the_model_without_its_later_layers(maker, variant):
    model, images = build(maker, variant), torch.randn(3, 3, 32, 32)
    reader = require_attention(model)
    _, _, tokens = reader.forward_intermediates(images)
    classes, probabilities = logit_lens(reader.read_tokens, tokens, k=3)
    count = tokens[0].shape[1]
    readings = 1 if variant in NOT_ALONE else 1 + count
    assert classes.shape == probabilities.shape == (3, 3, readings, 3)
    blocks = model.blocks
    for layer in range(3):
        model.blocks = blocks[: layer + 1]
        shares, best = model(images).softmax(dim=1).topk(3)
        assert torch.equal(classes[layer, :, 0], best)
        torch.testing.assert_close(probabilities[layer, :, 0], shares, rtol=1e-4, atol=1e-5)
        for number in range(readings - 1):  # a token is read as if there were no others
            same = model.norm(tokens[layer])[:, number : number + 1].expand(-1, count, -1)
            shares, _ = model.forward_head(same).softmax(dim=1).topk(3)
            found = probabilities[layer, :, 1 + number]
            torch.testing.assert_close(found, shares, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("maker", "variant", "names"),
    [
        ("ours", "registers", ["class token", "register 1", "register 2"]),
        ("timm", "distilled", ["class token", "distillation token"]),
        ("timm", "attention pooling", []),
    ],
)
def test_prefix_tokens_have_names(maker, variant, names):
    assert prefix_names(build(maker, variant)) == names
