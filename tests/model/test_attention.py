"""Attention compared with torch and NumPy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm import create_model
from torch import Tensor, nn
from torch.testing import assert_close

from models import draw, randomize
from vit.model.attention import (
    MultiHeadSelfAttention,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
)
from vit.model.attention_model import TimmAttentionModel

QUERIES, KEYS, WIDTH, VALUE_WIDTH = 5, 7, 4, 6

# Leading dimensions of query, key and value, and the shape of the mask.
SHAPES = [((), None), ((2, 3), (2, 1, 1, 7)), ((2, 1, 3), (2, 1, 3, 5, 7))]

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def draw_qkv(*leading: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (QUERIES, WIDTH), (KEYS, WIDTH), (KEYS, VALUE_WIDTH)
    query, key, value = (
        torch.randn(*leading, *size, generator=generator, dtype=torch.float64).to(dtype)
        for size in sizes
    )
    return query, key, value


def draw_mask(shape: tuple[int, ...] | None) -> Tensor | None:
    """Draw a mask that lets about half through; its last query attends to nothing."""
    if shape is None:
        return None
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., -1, :] = False
    return mask


def numpy_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention in float64: exp(q·k / √d) over its sum over the keys that are allowed."""
    q, k, v = (x.detach().double().numpy() for x in (query, key, value))
    scores = np.einsum("...nd,...md->...nm", q, k) / np.sqrt(q.shape[-1])
    allowed = True if mask is None else mask.numpy()
    scores = np.where(allowed, scores, -1e9)
    exponentials = allowed * np.exp(scores - scores.max(-1, keepdims=True))
    sums = exponentials.sum(-1, keepdims=True)
    weights = exponentials / np.where(sums > 0, sums, 1)
    return torch.from_numpy(np.einsum("...nm,...me->...ne", weights, v)), torch.from_numpy(weights)


def draw_attention(dim: int, num_heads: int, *args, **kwargs) -> MultiHeadSelfAttention:
    return randomize(MultiHeadSelfAttention(dim, num_heads, *args, **kwargs).double(), 0.5)


def draw_tokens() -> Tensor:
    return draw(3, 5, 12, seed=3)


# --- scaled_dot_product_attention ---


@pytest.mark.parametrize(("leading", "mask_shape"), SHAPES)
def test_attention_equals_numpy(leading, mask_shape):
    query, key, value = draw_qkv(*leading)
    mask = draw_mask(mask_shape)

    output, weights = scaled_dot_product_attention(query, key, value, mask)

    expected_output, expected_weights = numpy_attention(query, key, value, mask)
    assert_close(output, expected_output, rtol=0, atol=1e-12)
    assert_close(weights, expected_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fully_masked_row_gives_zeros_and_no_gradient(dtype):
    query, key, value = (x.requires_grad_() for x in draw_qkv(2, dtype=dtype))
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    mask[2] = False

    output, weights = scaled_dot_product_attention(query, key, value, mask)
    (output.sum() + (weights * torch.arange(KEYS)).sum()).backward()

    assert (output[:, 2] == 0).all()
    assert (weights[:, 2] == 0).all()
    assert (query.grad[:, 2] == 0).all()
    assert (query.grad[:, 0] != 0).any()
    assert all(x.isfinite().all() for x in (output, weights, query.grad, key.grad, value.grad))


@pytest.mark.parametrize(
    ("query", "key", "mask"),
    [
        # Products of ±160,000, which float16 cannot hold, but scores of ±40,000.
        ([100.0] * 16, [[100.0] * 16, [-100.0] * 16, [100.0] * 16], None),
        # Scores of -32,768, and of 0 where the mask hides the key.
        ([256.0], [[-128.0], [0.0], [-128.0]], torch.tensor([True, False, True])),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scores_may_be_as_large_as_float16_can_hold(query, key, mask, dtype):
    value = [[1.0], [10.0], [3.0]]
    inputs = (torch.tensor(each, dtype=dtype) for each in ([query], key, value))
    output, weights = scaled_dot_product_attention(*inputs, mask)
    assert weights.tolist() == [[0.5, 0, 0.5]]
    assert output.item() == 2


# --- masks ---


def test_causal_and_padding_masks():
    assert causal_mask(3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    shown = padding_mask(torch.tensor([0, 2, 3]), 3)
    assert shown.int().tolist() == [[[0, 0, 0]], [[1, 1, 0]], [[1, 1, 1]]]


@pytest.mark.parametrize("kind", ["vit", "timm"])
def test_masks_may_be_written_as_in_torch_and_in_notebooks(kind):
    """Boolean ones of any shape that broadcasts, ones and zeros, and what is added to scores."""
    module, x = draw_attention(12, 3), draw_tokens()
    if kind == "timm":
        model = TimmAttentionModel(create_model("vit_tiny_patch16_224", img_size=32).eval())

        def module(x, mask):
            return model.forward_tokens(x, (2, 2), mask)[0]

        x = torch.randn(3, 5, 192, generator=torch.Generator().manual_seed(0))
    causal, padding = causal_mask(5), padding_mask(torch.tensor([1, 3, 5]), 5)
    for allowed in (
        causal, causal[None, None], padding, padding[:, None], padding[0], padding[0, 0],
    ):  # fmt: skip
        expected = module(x, (allowed if allowed.ndim < 4 else allowed[:, 0]).expand(3, 5, 5))
        added = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
        lowest = torch.finfo(torch.float32).min
        for mask in (allowed, allowed.int(), allowed.float(), added, added.clamp(min=lowest)):
            assert torch.equal(module(x, mask), expected)
    for wrong in (
        torch.zeros(3, 5, dtype=torch.bool), torch.zeros(15, 5, 5, dtype=torch.bool),
        torch.rand(5, 5), -torch.rand(5, 5), 2 * causal.int(), torch.full((5, 5), torch.nan),
        causal[None, None, None], torch.zeros(3, 2, 5, 5, dtype=torch.bool), x,
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^mask: torch.* be boolean .True = may attend."):
            module(x, wrong)


def test_a_mask_may_differ_between_heads_and_is_that_of_torchs_module():
    ours, x = draw_attention(12, 3), draw_tokens()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True).double()
    theirs.in_proj_weight, theirs.in_proj_bias = ours.qkv.weight, ours.qkv.bias
    theirs.out_proj = ours.proj
    allowed = torch.rand(3, 3, 5, 5, generator=torch.Generator().manual_seed(2)) < 0.5
    allowed |= torch.eye(5, dtype=torch.bool)
    expected, _ = theirs(x, x, x, attn_mask=~allowed.flatten(0, 1))
    assert_close(ours(x, allowed), expected, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"^self-attention computes queries, keys and values"):
        ours(x, x, x)


# --- the fused kernel ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_is_used_in_float32_or_on_a_gpu(dtype, need_weights, device, monkeypatch):
    module = draw_attention(12, 3).to(device, dtype)
    kernel, calls = F.scaled_dot_product_attention, []

    def counted(*qkv):
        calls.append(qkv)
        return kernel(*qkv)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    tokens = draw_tokens().to(device, dtype)
    module(tokens, need_weights=need_weights)
    faster = device == "cuda" or dtype == torch.float32
    assert bool(calls) == (faster and not need_weights)
    calls.clear()
    module.attn_drop.p = 0.5
    module.train()(tokens)
    assert not calls  # it cannot drop weights as `Dropout` does
