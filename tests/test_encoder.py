"""The encoder block compared with timm's and with a direct computation."""

import pytest
import torch
from timm.models.vision_transformer import Block as TimmBlock
from torch import Tensor
from torch.testing import assert_close

from vit.model.attention import causal_mask
from vit.model.encoder import EncoderBlock, NeighbourConv

VARIANTS = {
    "plain": {},
    "all": {"qk_norm": True, "init_values": 0.1, "qkv_bias": False, "mlp_ratio": 2.5},
}
with_variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


GRID = (1, 5)  # of the tokens that draw_tokens draws; a block without convolution ignores it


def draw_block(dim: int = 12, num_heads: int = 3, mlp_ratio: float = 4, **kwargs) -> EncoderBlock:
    """Build a block in float64, in eval mode, all of whose parameters are random."""
    block = EncoderBlock(dim, num_heads, mlp_ratio, **kwargs).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return block


def draw_tokens(batch: int = 3, tokens: int = 5, dim: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, tokens, dim, generator=generator, dtype=torch.float64)


@with_variants
@pytest.mark.parametrize("mask", [None, causal_mask(5)], ids=["no mask", "causal"])
def test_block_equals_timm(variant, mask):
    ours = draw_block(**variant)
    theirs = TimmBlock(12, **({"num_heads": 3, "qkv_bias": True} | variant)).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = draw_tokens()
    assert_close(ours(x, GRID, mask), theirs(x, mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rate", ["attn_drop", "proj_drop", "drop_path"])
def test_block_in_training_equals_timm_at_the_same_seed(rate, kernel):
    ours = draw_block(**{rate: 0.3}).train()
    theirs = TimmBlock(12, 3, qkv_bias=True, **{rate: 0.3}).double().train()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = draw_tokens()

    torch.manual_seed(2)
    output = ours(x, GRID)
    torch.manual_seed(2)
    expected = theirs(x)

    assert_close(output, expected, rtol=0, atol=1e-12)
    assert (output - ours.eval()(x, GRID)).abs().max() > 1e-3


# --- the convolution in the MLP ---


@pytest.mark.parametrize("num_prefix_tokens", [0, 3])
def test_neighbour_conv_adds_what_the_neighbours_weigh(num_prefix_tokens: int) -> None:
    rows, columns, dim = 3, 4, 5
    torch.manual_seed(0)
    layer = NeighbourConv(dim, num_prefix_tokens).double()
    tokens = torch.randn(2, num_prefix_tokens + rows * columns, dim, dtype=torch.float64)
    expected = tokens.clone()
    for row in range(rows):
        for column in range(columns):
            here = num_prefix_tokens + row * columns + column
            expected[:, here] += layer.conv.bias
            for down in (-1, 0, 1):
                for across in (-1, 0, 1):
                    if 0 <= row + down < rows and 0 <= column + across < columns:
                        there = here + down * columns + across
                        weight = layer.conv.weight[:, 0, down + 1, across + 1]
                        expected[:, here] += weight * tokens[:, there]
    found = layer(tokens, (rows, columns))
    assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[:, :num_prefix_tokens], tokens[:, :num_prefix_tokens])
    assert (layer(tokens, (columns, rows)) - expected).abs().max() > 0.1
