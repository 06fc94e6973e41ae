"""The logit lens, against models whose later layers are left out and heads that read one token."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from models import PLAIN
from vit.explain.lens import logit_lens
from vit.model.attention_model import prefix_names, require_attention
from vit.model.vit import VisionTransformer

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
OURS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean without fc_norm": {"class_token": False, "global_pool": "avg", "fc_norm": False},
    "registers": {"reg_tokens": 2, "class_token": True, "global_pool": "avg"},
}
TIMMS: dict[str, dict[str, Any]] = {
    "class token": {},
    "registers": {"reg_tokens": 2, "global_pool": "avg"},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "attention pooling": {"global_pool": "map", "class_token": False},
    "rotary": {"name": "vit_small_patch16_dinov3"},
}
NOT_ALONE = ("distilled", "attention pooling")
CASES = [*(("ours", name) for name in OURS), *(("timm", name) for name in TIMMS)]


def build(maker: str, variant: str) -> nn.Module:
    torch.manual_seed(0)
    if maker == "ours":
        model: nn.Module = VisionTransformer(**(PLAIN | TINY | {"depth": 3} | OURS[variant]))
    else:
        settings = TINY | {"depth": 3} | TIMMS[variant]
        name = settings.pop("name", "vit_tiny_patch16_224")
        model = timm.create_model(name, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize(("maker", "variant"), CASES)
def test_lens_reads_every_layer_as_the_model_without_its_later_layers(maker, variant) -> None:
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
def test_prefix_tokens_have_names(maker: str, variant: str, names: list[str]) -> None:
    assert prefix_names(build(maker, variant)) == names
