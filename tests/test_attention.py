"""Attention compared with torch, timm and NumPy."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers import Attention as TimmAttention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from vit.model import attention
from vit.model.attention import (
    MultiHeadSelfAttention,
    causal_mask,
    padding_mask,
    scaled_dot_product_attention,
)

QUERIES, KEYS, WIDTH, VALUE_WIDTH = 5, 7, 4, 6

# Leading dimensions of query, key and value, and the shape of the mask.
SHAPES = [
    ((), None),
    ((2,), (5, 7)),
    ((2, 3), (5, 1)),
    ((2, 3), (2, 1, 1, 7)),
    ((2, 1, 3), (2, 1, 3, 5, 7)),
]

# Each is for 3 sequences of 5 tokens; None is no mask.
MASKS = {
    "none": None,
    "causal and padding": causal_mask(5) & padding_mask(torch.tensor([1, 3, 5]), 5),
}
with_masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

property_test = settings(max_examples=25)


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
    """Build a module in float64, in eval mode, all of whose parameters are random."""
    module = MultiHeadSelfAttention(dim, num_heads, *args, **kwargs).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5, generator=generator)
    return module


def torch_twin(module: MultiHeadSelfAttention) -> nn.MultiheadAttention:
    """Build torch's module with the same weights."""
    twin = nn.MultiheadAttention(module.proj.out_features, module.num_heads, batch_first=True)
    twin = twin.double().eval()
    with torch.no_grad():
        twin.in_proj_weight.copy_(module.qkv.weight)
        twin.in_proj_bias.zero_()
        if module.qkv.bias is not None:
            twin.in_proj_bias.copy_(module.qkv.bias)
        twin.out_proj.load_state_dict(module.proj.state_dict())
    return twin


def draw_tokens(batch: int = 3, tokens: int = 5, dim: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(batch, tokens, dim, generator=generator, dtype=torch.float64)


def gradients(module: nn.Module, x: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the gradients of a weighted sum of the output: first to x, then to the parameters."""
    x = x.clone().requires_grad_()
    output = module(x, mask)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).to(output)
    return list(torch.autograd.grad((output * factors).sum(), [x, *module.parameters()]))


# --- scaled_dot_product_attention ---


@pytest.mark.parametrize(("leading", "mask_shape"), SHAPES)
def test_attention_equals_torch_and_numpy(leading, mask_shape):
    query, key, value = draw_qkv(*leading)
    mask = draw_mask(mask_shape)

    output, weights = scaled_dot_product_attention(query, key, value, mask)

    expected_output, expected_weights = numpy_attention(query, key, value, mask)
    assert_close(output, expected_output, rtol=0, atol=1e-12)
    assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    torch_output = F.scaled_dot_product_attention(query, key, value, mask)
    assert_close(output, torch_output, rtol=0, atol=1e-12)


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
    ("dtype", "tolerance", "masked"),
    [(torch.float32, 1e-6, True), (torch.float16, 1e-3, False), (torch.bfloat16, 8e-3, True)],
)
def test_large_logits_stay_finite_and_right(dtype, tolerance, masked):
    # Multiples of 32, so that all scores are multiples of 512 and exact in every dtype: what is
    # left to get wrong is the softmax of scores up to 3e4.
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randint(-4, 5, (2, 64, 4), generator=generator) * 32.0
    value = torch.randn(64, 8, generator=generator).to(dtype)
    mask = torch.rand(64, 64, generator=generator) < 0.5 if masked else None

    output, weights = scaled_dot_product_attention(query.to(dtype), key.to(dtype), value, mask)

    scores = query @ key.T / 2
    assert 1e4 < scores.abs().max() < torch.finfo(torch.float16).max
    expected_output, expected_weights = numpy_attention(query, key, value, mask)
    assert_close(weights.double(), expected_weights, rtol=0, atol=tolerance)
    assert_close(output.double(), expected_output, rtol=0, atol=4 * tolerance)


def test_product_of_query_and_key_may_exceed_float16_if_the_score_does_not():
    query = torch.full((1, 16), 100.0, dtype=torch.float16)
    key = torch.stack([query[0], -query[0], query[0]])  # products ±160,000, scores ±40,000
    value = torch.tensor([[1.0], [10.0], [3.0]], dtype=torch.float16)

    output, weights = scaled_dot_product_attention(query, key, value)

    assert weights.tolist() == [[0.5, 0, 0.5]]
    assert output.item() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masked_key_gets_nothing_even_where_all_other_scores_are_far_below(dtype):
    query = torch.full((1, 1), 256.0, dtype=dtype)
    key = torch.tensor([[-128.0], [0.0], [-128.0]], dtype=dtype)  # scores -32,768, 0, -32,768
    value = torch.tensor([[1.0], [10.0], [3.0]], dtype=dtype)

    output, weights = scaled_dot_product_attention(
        query, key, value, torch.tensor([True, False, True])
    )

    assert weights.tolist() == [[0.5, 0, 0.5]]
    assert output.item() == 2


def test_dropout_scales_what_it_keeps_and_returns_the_weights_before_it():
    torch.manual_seed(0)
    query, key, _ = draw_qkv()
    draws = 5000
    query = query.expand(draws, QUERIES, WIDTH)

    # With the identity as value the output is the weights after dropout.
    identity, dropout = torch.eye(KEYS).double(), nn.Dropout(0.25)
    kept, weights = scaled_dot_product_attention(query, key, identity, dropout=dropout)

    _, expected = scaled_dot_product_attention(query, key, torch.eye(KEYS).double())
    assert_close(weights, expected, rtol=0, atol=1e-12)
    dropped = kept == 0
    assert_close(kept[~dropped], (expected / 0.75)[~dropped], rtol=0, atol=1e-12)
    five_deviations = 5 * (0.25 * 0.75 / draws) ** 0.5  # of the share of draws
    share = torch.full((QUERIES, KEYS), 0.25).double()
    assert_close(dropped.double().mean(0), share, rtol=0, atol=five_deviations)
    assert_close(kept.mean(0), expected[0], rtol=five_deviations / 0.75, atol=0)


# --- masks ---


def test_causal_mask_lets_a_token_see_itself_and_those_before():
    assert causal_mask(3).tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, True],
    ]


def test_padding_mask_shows_as_many_tokens_as_are_real():
    assert padding_mask(torch.tensor([0, 2, 3]), 3).tolist() == [
        [[False, False, False]],
        [[True, True, False]],
        [[True, True, True]],
    ]


# --- MultiHeadSelfAttention against others ---


@with_masks
@pytest.mark.parametrize(("num_heads", "qkv_bias"), [(1, True), (3, False)])
def test_module_equals_torch_multihead_attention(mask, num_heads, qkv_bias):
    ours = draw_attention(12, num_heads, qkv_bias=qkv_bias)
    x = draw_tokens()

    output, weights = ours(x, mask, need_weights=True)

    if mask is not None:  # True hides there; one mask for each sequence and head
        mask = ~mask.expand(3, 5, 5).repeat_interleave(num_heads, dim=0)
    expected_output, expected_weights = torch_twin(ours)(
        x, x, x, attn_mask=mask, average_attn_weights=False
    )
    assert_close(output, expected_output, rtol=0, atol=1e-12)
    assert_close(weights, expected_weights, rtol=0, atol=1e-12)


@with_masks
@pytest.mark.parametrize(
    ("num_heads", "head_dim", "qkv_bias", "qk_norm"),
    [(3, None, False, False), (2, 5, True, True)],
)
def test_module_equals_timm(mask, kernel, num_heads, head_dim, qkv_bias, qk_norm):
    ours = draw_attention(12, num_heads, head_dim, qkv_bias, qk_norm)
    theirs = TimmAttention(
        12,
        num_heads,
        attn_head_dim=head_dim,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    ).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = draw_tokens()
    timm_mask = None if mask is None else mask.expand(3, 5, 5)[:, None]

    assert_close(ours(x, mask), theirs(x, timm_mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", [*MASKS.values(), "full row"], ids=[*MASKS, "full row"])
def test_kernels_agree(mask, device, monkeypatch):
    if mask == "full row":
        mask = padding_mask(torch.tensor([0, 3, 5]), 5).expand(3, 5, 5).clone()
        mask[1, 2] = False
    mask = mask if mask is None else mask.to(device)
    module = draw_attention(12, 3, qk_norm=True).float().to(device)
    x = draw_tokens().float().to(device)
    found = []
    for fused in (True, False):
        monkeypatch.setattr(attention, "uses_fused_kernel", lambda *kind, fused=fused: fused)
        found.append([module(x, mask), *gradients(module, x, mask)])

    for number, (value, expected) in enumerate(zip(*found, strict=True)):
        assert expected.isfinite().all()
        assert_close(value, expected, rtol=1e-5 if number else 0, atol=5e-5 if number else 1e-5)


class RecordCalls(TorchFunctionMode):
    """Remember which functions of torch were called."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.called.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_kernel_is_used_where_it_is_faster(dtype, need_weights, device):
    module = draw_attention(12, 3).to(device, dtype)
    with RecordCalls() as record:
        module(draw_tokens().to(device, dtype), need_weights=need_weights)
    faster = device == "cuda" or dtype == torch.float32
    expected = faster and not need_weights
    assert (F.scaled_dot_product_attention in record.called) == expected


# --- MultiHeadSelfAttention's own properties ---


def test_padding_changes_nothing(kernel):
    module = draw_attention(12, 3)
    lengths = [1, 3, 5]
    mask = padding_mask(torch.tensor(lengths), 5)
    x = draw_tokens()
    other = torch.where(mask.mT, x, 1e3 * torch.randn(x.shape).double())

    output, weights = module(x, mask, need_weights=True)
    other_output, other_weights = module(other, mask, need_weights=True)

    for i, length in enumerate(lengths):
        unpadded_output, unpadded_weights = module(x[i : i + 1, :length], need_weights=True)
        assert (weights[i, :, :, length:] == 0).all()
        for padded in (output, other_output, module(other, mask)):
            assert_close(padded[i, :length], unpadded_output[0], rtol=0, atol=1e-12)
        for padded in (weights, other_weights):
            assert_close(padded[i, :, :length, :length], unpadded_weights[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("place", ["attn_drop", "proj_drop"])
def test_dropout_acts_in_training_only(place, kernel):
    torch.manual_seed(0)
    module = draw_attention(12, 3, **{place: 0.25})
    expected = draw_attention(12, 3)(draw_tokens(batch=1))
    draws = 3000
    x = draw_tokens(batch=1).expand(draws, 5, 12)

    assert_close(module(x), expected.expand_as(x), rtol=0, atol=1e-12)
    outputs = module.train()(x)

    share_of_zeros = (outputs == 0).double().mean().item()
    assert share_of_zeros == pytest.approx(0.25 if place == "proj_drop" else 0, abs=0.01)
    deviation = (outputs.mean(0) - expected[0]) / (outputs.std(0) / draws**0.5)
    assert deviation.abs().max() < 5


@property_test
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 6),
    num_heads=st.integers(1, 4),
    head_dim=st.integers(1, 5),
    dim=st.none() | st.integers(1, 9),
)
def test_shapes(batch, tokens, num_heads, head_dim, dim):
    if dim is None:  # left to the module: dim / num_heads
        module = MultiHeadSelfAttention(num_heads * head_dim, num_heads)
    else:
        module = MultiHeadSelfAttention(dim, num_heads, head_dim)
    x = torch.randn(batch, tokens, module.proj.out_features)

    output, weights = module(x, need_weights=True)

    assert module.qkv.weight.shape == (3 * num_heads * head_dim, x.shape[-1])
    assert output.shape == module(x).shape == x.shape
    assert weights.shape == (batch, num_heads, tokens, tokens)
    assert_close(weights.sum(-1), torch.ones(batch, num_heads, tokens), rtol=0, atol=1e-5)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="num_heads: 5 does not divide dim=12; set head_dim"):
        MultiHeadSelfAttention(12, 5)


@with_masks
def test_module_gradcheck(mask):
    module = draw_attention(4, 2, qk_norm=True)
    names = [name for name, _ in module.named_parameters()]
    inputs = [draw_tokens(dim=4), *(parameter.detach() for parameter in module.parameters())]

    def forward(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        output, weights = torch.func.functional_call(module, named, (x, mask, True))
        return torch.cat([output.flatten(), weights.flatten()])

    assert torch.autograd.gradcheck(
        forward, [x.clone().requires_grad_() for x in inputs], atol=1e-7, fast_mode=True
    )


@with_masks
def test_bfloat16_autocast_is_close_to_float32(mask, kernel):
    module = draw_attention(12, 3, qk_norm=True).float()
    x = draw_tokens().float()
    expected_output, expected_weights = module(x, mask, need_weights=True)

    with torch.autocast("cpu", torch.bfloat16):
        output = module(x, mask)
        output_too, weights = module(x, mask, need_weights=True)

    assert output.dtype == torch.bfloat16
    assert_close(output.float(), expected_output, rtol=0.02, atol=0.05)
    assert_close(output_too.float(), expected_output, rtol=0.02, atol=0.05)
    assert_close(weights.float(), expected_weights, rtol=0, atol=0.02)
