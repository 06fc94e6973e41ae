"""Positions in attention, compared with loops in NumPy; test_pretrained.py has timm's.

Shapes: B images, H heads, N tokens, P patches, d head width.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from models import PLAIN, draw, randomize
from vit.model.attention import MultiHeadSelfAttention
from vit.model.config import UNFIT, ModelConfig
from vit.model.positions import REACH, BiasPositions, RotaryPositions
from vit.model.vit import VisionTransformer

B, H, D = 2, 3, 8
SMALL = PLAIN | {"img_size": 8, "patch_size": 4, "num_classes": 10, "embed_dim": 24, "num_heads": 3}
GRIDS = pytest.mark.parametrize("grid", [(3, 5), (6, 2)])
PREFIXES = pytest.mark.parametrize("prefix", [0, 1, 3])
KINDS = pytest.mark.parametrize("kind", ["bias", "rope", "relative"])


def test_bias_of_another_grid_depends_on_the_offset_in_patches():
    """Farther patches than in the grid of training count as the farthest there."""
    positions = randomize(BiasPositions(1, D, (3, 3), 2), 1.0)
    table = positions.relative_position_bias_table.detach()[:, 0]
    bias = positions.bias((5, 4)).detach()[0]
    assert bias[0, 2:].eq(table[-3]).all() and bias[2:, :2].eq(table[-2]).all()
    assert bias[:2, :2].eq(table[-1]).all()
    for query in np.ndindex(5, 4):
        for key in np.ndindex(5, 4):
            down, across = (int(np.clip(q - k, -2, 2)) for q, k in zip(query, key, strict=True))
            i, j = (2 + 4 * row + column for row, column in (query, key))
            assert bias[i, j] == table[:-3].view(5, 5)[down + 2, across + 2]


@GRIDS
@PREFIXES
def test_relative_positions_are_their_formula(grid, prefix):
    """Against loops over pairs; the tables are indexed by the offset, then the prefix."""
    size = prefix + math.prod(grid)
    attention = MultiHeadSelfAttention(
        H * D, H, grid=(4, 4), num_prefix_tokens=prefix, rel_pos="relative"
    ).double()
    randomize(attention, 0.5)
    tokens = draw(B, size, H * D)
    output, weights = attention(tokens, need_weights=True, grid=grid)
    tables = {name: table.detach().numpy() for name, table in attention.rel_pos.named_parameters()}

    def vector(kind: str, query: int, key: int) -> np.ndarray:
        if query < prefix:
            index = [2 * REACH + 2] * 2
        elif key < prefix:
            index = [2 * REACH + 1] * 2
        else:
            places = [np.unravel_index(token - prefix, grid) for token in (query, key)]
            index = [
                int(np.clip(k - q, -REACH, REACH)) + REACH for q, k in zip(*places, strict=True)
            ]
        return tables[f"{kind}_rows"][index[0]] + tables[f"{kind}_columns"][index[1]]

    q, k, v = (
        attention.qkv(tokens).detach().numpy().reshape(B, size, 3, H, D).transpose(2, 0, 3, 1, 4)
    )
    scores, heads = np.zeros((B, H, size, size)), np.zeros((B, H, size, D))
    for i in range(size):
        for j in range(size):
            scores[:, :, i, j] = np.einsum(
                "bhd,bhd->bh", q[:, :, i], k[:, :, j] + vector("key", i, j)
            )
    expected = np.exp(scores / math.sqrt(D))
    expected /= expected.sum(-1, keepdims=True)
    for i in range(size):
        for j in range(size):
            heads[:, :, i] += expected[:, :, i, j, None] * (v[:, :, j] + vector("value", i, j))
    assert_close(weights, torch.from_numpy(expected))
    merged = torch.from_numpy(heads.transpose(0, 2, 1, 3).reshape(B, size, H * D))
    assert_close(output, attention.proj(merged))


@KINDS
@pytest.mark.parametrize("attention", ["dot", "cosine", "sigmoid", "differential"])
def test_positions_compose(kind, attention):
    """Weights of a model, masks, other sizes of images, and, for dot, the fused kernel."""
    if (kind, attention) in UNFIT:
        with pytest.raises(ValueError, match=rf"model\.rel_pos: {kind} .* none or bias with"):
            ModelConfig(rel_pos=kind, attention=attention)
        return
    settings = SMALL | {"depth": 2, "reg_tokens": 1}
    model = VisionTransformer(**settings, rel_pos=kind, attention=attention).eval()
    randomize(model, 0.3)
    images = draw(B, 3, 16, 8).float()
    logits, weights = model(images, need_weights=True)
    with torch.no_grad():  # in which a bias is fused, too
        assert_close(model(images), logits, rtol=1e-4, atol=1e-5)
    size = weights.shape[-1]
    keep = torch.ones(B, 1, size, dtype=torch.bool)
    keep[:, :, 5] = False
    masked_logits, masked = model(images, keep, need_weights=True)
    assert_close(model(images, keep), masked_logits, rtol=1e-4, atol=1e-5)
    assert masked[..., 5].abs().max() == 0 and (masked - weights).abs().max() > 1e-4
    logits.sum().backward()
    unused = [
        name
        for name, weight in model.named_parameters()
        if "rel_pos" in name and not weight.grad.any()
    ]
    assert unused == []


def test_impossible_positions_are_refused():
    for arguments, words in (
        ({"rel_pos": "swirl"}, "not one of none, bias, rope, relative"),
        ({"rel_pos": "bias"}, "needs grid"),
        ({"rel_pos": "rope", "head_dim": 6, "grid": (2, 2)}, "that 4 divides"),
    ):
        with pytest.raises(ValueError, match=f"^rel_pos: .*{words}"):
            MultiHeadSelfAttention(24, 3, **arguments)
    with pytest.raises(ValueError, match=r"^rel_pos: bias .* must be none with MultiheadAttention"):
        VisionTransformer(**SMALL, rel_pos="bias", attention=nn.MultiheadAttention)


def test_heads_with_a_bias_start_at_neighbours_and_the_last_one_even():
    positions = BiasPositions(4, 8, (5, 6), num_prefix_tokens=1)
    weights = positions.bias((5, 6)).softmax(dim=-1)[:, 1:, 1:]
    for head, (down, right) in enumerate([(0, 1), (0, -1), (1, 0)]):
        for row, column in itertools.product(range(1, 4), range(1, 5)):
            place = 6 * (row + down) + column + right
            assert weights[head, 6 * row + column].argmax() == place
    assert torch.equal(weights[3], torch.full_like(weights[3], 1 / 31))


def test_a_query_without_keys_gets_nothing_in_spite_of_a_bias():
    attention = randomize(MultiHeadSelfAttention(24, 3, grid=(2, 3), rel_pos="bias"), 0.5).eval()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    output, weights = attention(draw(B, 6, 24).float(), mask, need_weights=True)
    sums = torch.ones(6)
    sums[2] = 0
    assert_close(weights.sum(dim=-1), sums.expand(B, 3, 6))
    assert_close(output[:, 2], attention.proj.bias.expand(B, 24))


def test_rotary_positions_are_exact_in_bfloat16():
    grid, width = (32, 32), 64
    positions = RotaryPositions(1, width, grid, 0)
    tokens = draw(1, 1, 32 * 32, width).bfloat16()
    expected, *_ = positions.before(tokens.float(), tokens.float(), tokens, grid)
    found, *_ = positions.bfloat16().before(tokens, tokens, tokens, grid)
    # Of rounded sines, cosines and sums; of rounded angles, it would be ten times as large.
    assert (found.float() - expected).abs().max() < 2**-6 * tokens.abs().max()
