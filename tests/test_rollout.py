"""Attention rollout against the paper's formula, literal numbers, and its own symmetries."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vit.explain.rollout import attention_maps, attention_rollout
from vit.model.vit import VisionTransformer

CASES = [("mean", 0), ("mean", 1), ("mean", 5), ("class_token", 1), ("class_token", 5)]
with_cases = pytest.mark.parametrize(("readout", "prefix"), CASES)


def draw_weights(layers: int, batch: int, heads: int, tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(
        2 * torch.randn(layers, batch, heads, tokens, tokens, generator=generator), dim=-1
    )


def paper_rollout(weights: Tensor) -> np.ndarray:
    """Write arXiv 2005.00928 out in float64: one image's layers (L, H, N, N) to (N, N)."""
    result = None
    for layer in weights.double().numpy():
        mixed = 0.5 * sum(layer) / len(layer) + 0.5 * np.eye(layer.shape[-1])
        result = mixed if result is None else mixed @ result
    return result


def paper_map(weights: Tensor, readout: str, prefix: int) -> np.ndarray:
    rollout = paper_rollout(weights)
    row = rollout[0] if readout == "class_token" else rollout[prefix:].mean(0)
    return row[prefix:]


@with_cases
@pytest.mark.parametrize("layers", [1, 2, 6])
def test_rollout_is_the_papers_formula(readout, prefix, layers):
    weights = draw_weights(layers, 3, 4, prefix + 9)
    maps = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
    assert maps.shape == (3, 9) and maps.dtype == torch.float32
    expected = np.stack([paper_map(weights[:, b], readout, prefix) for b in range(3)])
    np.testing.assert_allclose(maps.numpy(), expected, rtol=0, atol=1e-5)


# Two layers of two heads over three tokens, and what comes out, worked out on paper:
# the factors are [[3/4, 1/8, 1/8], [0, 1, 0], [0, 1/4, 3/4]] of the first layer and
# [[1/2, 1/4, 1/4], [1/4, 3/4, 0], [0, 0, 1]] of the second; second times first is
# [[3/8, 3/8, 1/4], [3/16, 25/32, 1/32], [0, 1/4, 3/4]].
FIRST = [
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]],
    [[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
]
SECOND = [
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
    [[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
]


@pytest.mark.parametrize(
    ("readout", "prefix", "expected"),
    [
        ("class_token", 1, [3 / 8, 1 / 4]),
        ("class_token", 2, [1 / 4]),
        ("mean", 1, [(25 / 32 + 1 / 4) / 2, (1 / 32 + 3 / 4) / 2]),
        ("mean", 0, [(3 / 8 + 3 / 16) / 3, (3 / 8 + 25 / 32 + 1 / 4) / 3, (1 / 4 + 25 / 32) / 3]),
    ],
)
def test_rollout_by_hand(readout, prefix, expected):
    weights = torch.tensor([FIRST, SECOND])[:, None]
    maps = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
    assert maps.tolist() == [pytest.approx(expected, abs=1e-7)]


def test_the_order_of_layers_matters():
    weights = torch.tensor([SECOND, FIRST])[:, None]
    maps = attention_rollout(weights, readout="class_token", num_prefix_tokens=1)
    # [3/4, 1/8, 1/8] times the second factor: 3/8 + 1/32, 3/16 + 3/32, 3/16 + 1/8.
    assert maps.tolist() == [pytest.approx([9 / 32, 5 / 16], abs=1e-7)]


@with_cases
def test_a_batch_is_its_images(readout, prefix):
    weights = draw_weights(3, 4, 2, prefix + 6)
    maps = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
    for number in range(4):
        alone = attention_rollout(
            weights[:, number : number + 1], readout=readout, num_prefix_tokens=prefix
        )
        torch.testing.assert_close(maps[number], alone[0], rtol=0, atol=1e-6)
    assert (maps[0] - maps[1]).abs().max() > 1e-3


@with_cases
def test_maps_are_shares(readout, prefix):
    weights = draw_weights(12, 3, 3, prefix + 16)
    maps = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
    assert (maps >= 0).all()
    total = maps.sum(1)
    if prefix == 0:
        torch.testing.assert_close(total, torch.ones(3), rtol=0, atol=1e-6)
    else:
        assert (total < 1).all()


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_uniform_attention_makes_a_uniform_map(prefix):
    tokens, layers = prefix + 9, 3
    weights = torch.full((layers, 2, 4, tokens, tokens), 1 / tokens)
    for readout in ("mean", "class_token") if prefix else ("mean",):
        maps = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
        # Each factor keeps half; what attention has touched once is uniform over all tokens.
        kept = 0.5**layers
        share = (1 - kept) / tokens + (kept / 9 if readout == "mean" else 0)
        torch.testing.assert_close(maps, torch.full((2, 9), share), rtol=0, atol=1e-7)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.permutations(range(7)), st.sampled_from(CASES), st.integers(0, 100))
def test_permuting_patches_permutes_the_map(order, case, seed):
    readout, prefix = case
    weights = draw_weights(3, 2, 2, prefix + 7, seed)
    tokens = [*range(prefix), *(prefix + place for place in order)]
    permuted = weights[..., tokens, :][..., tokens]
    maps = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
    others = attention_rollout(permuted, readout=readout, num_prefix_tokens=prefix)
    torch.testing.assert_close(others, maps[:, order], rtol=0, atol=1e-6)


def test_half_precision_weights_are_rolled_out_in_float32():
    weights = draw_weights(6, 2, 3, 10).bfloat16()
    maps = attention_rollout(weights, readout="mean", num_prefix_tokens=1)
    assert maps.dtype == torch.float32
    expected = attention_rollout(weights.float(), readout="mean", num_prefix_tokens=1)
    assert torch.equal(maps, expected)


def test_weights_stay():
    weights = draw_weights(2, 1, 2, 5)
    attention_rollout(weights, readout="mean", num_prefix_tokens=0)
    assert torch.equal(weights, draw_weights(2, 1, 2, 5))


@pytest.mark.parametrize(
    ("readout", "prefix", "message"),
    [
        ("max", 1, "readout: 'max' is not class_token or mean"),
        ("class_token", 0, "readout: class_token needs num_prefix_tokens of at least 1"),
    ],
)
def test_readouts_that_cannot_be(readout, prefix, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        attention_rollout(draw_weights(1, 1, 1, 4), readout=readout, num_prefix_tokens=prefix)


# Of a model.

MODELS = {
    "class token": {},
    "class token and registers": {"reg_tokens": 4},
    "mean": {"class_token": False, "global_pool": "avg"},
    "mean beside class token": {"global_pool": "avg"},
    "mean and registers": {"class_token": False, "reg_tokens": 4, "global_pool": "avg"},
}
with_models = pytest.mark.parametrize("variant", MODELS.values(), ids=MODELS)


def draw_vit(variant: dict, std: float = 0.5) -> VisionTransformer:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=16, embed_dim=12, depth=3, num_classes=5, **variant)
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return vit.eval()


def draw_images() -> Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@with_models
def test_maps_of_a_model(variant):
    vit, images = draw_vit(variant), draw_images()
    logits, found = attention_maps(vit, images)
    maps = found["rollout"]
    assert maps.shape == (3, 4, 4) and not maps.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(logits, vit(images), rtol=0, atol=1e-5)
        _, weights = vit(images, need_weights=True)
    pooled = variant.get("global_pool") == "avg"
    prefix = variant.get("class_token", True) + variant.get("reg_tokens", 0)
    for number in range(3):
        shares = paper_map(weights[:, number], "mean" if pooled else "class_token", prefix)
        expected = shares.reshape(4, 4) * (16 + prefix)
        np.testing.assert_allclose(maps[number].numpy(), expected, rtol=0, atol=1e-4)
    assert maps.std() > 0.05
    if prefix == 0:
        torch.testing.assert_close(maps.mean((1, 2)), torch.ones(3), rtol=0, atol=1e-5)


@with_models
def test_one_is_uniform_attention(variant):
    vit = draw_vit(variant)
    for block in vit.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
        torch.nn.init.zeros_(block.attn.qkv.bias)
    maps = attention_maps(vit, draw_images())[1]["rollout"]
    # An eighth never passes through attention: it stays with the patches, or the class token.
    pooled = variant.get("global_pool") == "avg"
    kept = vit.pos_embed.shape[1] / 16 if pooled else 0
    expected = torch.full((3, 4, 4), 7 / 8 + kept / 8)
    torch.testing.assert_close(maps, expected, rtol=0, atol=1e-5)


def test_maps_find_the_patch_all_attend_to():
    vit = draw_vit(MODELS["mean"])
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.zero_()
        vit.pos_embed[0, 1 * 4 + 2, 0] = 1.0  # row 1, column 2
        for block in vit.blocks:
            block.norm1.weight.fill_(1.0)
            block.attn.qkv.bias[:12] = 10.0  # queries: all channels
            block.attn.qkv.weight[12:24, 0] = 10.0  # keys: the marked channel
    maps = attention_maps(vit, draw_images())[1]["rollout"]
    assert (maps[:, 1, 2] > 10).all()
    maps[:, 1, 2] = 0
    assert maps.max() < 1
