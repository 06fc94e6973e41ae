"""Layer-wise relevance compared with formulas and frozen models."""

from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from scipy.ndimage import gaussian_filter
from timm.models import vision_transformer as vits
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval
from torch.overrides import TorchFunctionMode
from zennit.composites import LayerMapComposite
from zennit.rules import Pass, ZPlus
from zennit.types import Activation, Convolution

from models import PLAIN, draw, randomize
from vit.explain.lrp import LayerwiseRules, propagate, smooth, token_relevance
from vit.explain.maps import attention_maps, layout_of
from vit.explain.rollout import attention_rollout
from vit.model.attention_model import require_attention
from vit.model.vit import VisionTransformer

VARIANTS = {
    "registers": {"reg_tokens": 2},
    "mean beside class token": {"global_pool": "avg", "fc_norm": False},
    "norms and scales": {"qk_norm": True, "init_values": 0.5, "pre_norm": True},
    "tanh": {"act_layer": "gelu_tanh", "pos_embed": "none", "qkv_bias": False},
    "CLIP": {"act_layer": "quick_gelu", "no_embed_class": True, "head_dim": 5},
}
OURS = {"stem": "conv", "mlp_conv": True, "class_token": False, "global_pool": "avg"}


def draw_vit(variant: dict) -> VisionTransformer:
    sizes = {"img_size": (8, 12), "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    return randomize(VisionTransformer(**(PLAIN | sizes | variant)).double(), 0.6)


def classify_tokens(vit: Any, images: Tensor):
    """The tokens of images, and the function from them to the logits."""
    with torch.no_grad():
        tokens, grid = vit.embed(images)
    return tokens, lambda x: vit.forward_tokens(x, grid)[0]


def pass_back(function, inputs: Tensor, gradient: Tensor) -> Tensor:
    """Pass the relevance of a function's outputs, divided by them, back to its inputs."""
    inputs = inputs.detach().requires_grad_()
    with LayerwiseRules():
        outputs = function(inputs)
    return inputs.detach() * torch.autograd.grad(outputs, inputs, gradient)[0]


def test_a_group_norm_is_linear_once_its_deviations_are_fixed():
    norm, x = nn.GroupNorm(2, 6, eps=1e-2).double(), draw(3, 6, 20)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    deviation = (x.view(3, 2, 60).var(dim=2, correction=0, keepdim=True) + 1e-2).sqrt()

    def fixed(y: Tensor) -> Tensor:
        parts = y.view(3, 2, 60)
        parts = (parts - parts.mean(dim=2, keepdim=True)) / deviation
        return parts.view(y.shape) * norm.weight[:, None] + norm.bias[:, None]

    with LayerwiseRules():
        torch.testing.assert_close(norm(x), fixed(x))
    gradient = draw(3, 6, 20, seed=1)
    expected = torch.autograd.functional.vjp(fixed, x, gradient)[1]
    torch.testing.assert_close(pass_back(norm, x, gradient), x * expected)


def test_a_convolutional_stem_passes_relevance_on_as_that_of_zennit():
    parts: list[nn.Module] = []
    for channels, dim, stride in ((3, 8, 1), (8, 16, 2), (16, 16, 2)):
        norm = nn.BatchNorm2d(dim)
        for values in (norm.running_mean, norm.weight, norm.bias):
            nn.init.normal_(values)
        nn.init.uniform_(norm.running_var, 0.5, 2)
        parts += [nn.Conv2d(channels, dim, 3, stride, 1, bias=False), norm, nn.ReLU(inplace=True)]
    stem = nn.Sequential(*parts).double().eval()
    pairs = zip(stem[::3], stem[1::3], strict=True)
    fused = nn.Sequential(*(m for pair in pairs for m in (fuse_conv_bn_eval(*pair), nn.ReLU())))
    x = draw(2, 3, 16, 16)
    relevance = stem(x).detach() * draw(2, 16, 4, 4, seed=1)
    rule = ZPlus(stabilizer=1e-12, zero_params=None)
    composite = LayerMapComposite([(Activation, Pass()), (Convolution, rule)])
    with composite.context(fused) as modified:
        inputs = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(modified(inputs), inputs, relevance)
    found = pass_back(stem, x, relevance / stem(x).detach().clamp(min=1e-9))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    assert found.abs().mean() > 1e-3


def test_a_batch_norm_after_something_else_is_a_linear_layer():
    norm, x = nn.BatchNorm2d(3).double().eval(), draw(2, 3, 4, 4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    gradient = draw(2, 3, 4, 4, seed=1)
    expected = gradient * x * norm.weight[:, None, None] / (1 + norm.eps) ** 0.5
    torch.testing.assert_close(pass_back(norm, x, gradient), expected)
    conv = nn.Conv2d(3, 3, 1).double()
    after, apart = (nn.Sequential(conv, nn.ReLU(inplace), norm) for inplace in (True, False))
    torch.testing.assert_close(pass_back(after, x, gradient), pass_back(apart, x, gradient))


class Frozen(TorchFunctionMode):
    """Keeps what the rules hold fixed at the first input, and takes it for all later inputs.

    A rule that multiplies a fixed factor is written out here: nothing is differentiated.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.replay: int | None = None
        self.gate: Tensor | None = None

    def fixed(self, value: Tensor) -> Tensor:
        if self.replay is None:
            self.kept.append(value)
            return value
        self.replay += 1
        return self.kept[self.replay - 1]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:  # of attention pooling
            query, key, value = args
            scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
            return self.fixed(scores.softmax(dim=-1)) @ value
        if func in (Tensor.softmax, torch.sigmoid, Tensor.sigmoid):
            return self.fixed(func(*args, **kwargs))
        if func is F.silu:
            self.gate = args[0] * self.fixed(args[0].sigmoid())
            return self.gate
        if func is Tensor.mul and args[0] is self.gate:  # half with each factor fixed
            return sum(x * self.fixed(y) for x, y in (args, args[::-1])) / 2
        if func is F.rms_norm:
            x, _, weight, eps = (*args, *kwargs.values())
            return x * weight / self.fixed((x.square().mean(dim=-1, keepdim=True) + eps).sqrt())
        if func is F.gelu:
            return args[0] * self.fixed(func(*args, **kwargs) / args[0])
        if func is F.layer_norm:
            x, _, weight, bias, eps = (*args, *kwargs.values())
            deviation = self.fixed((x.var(dim=-1, keepdim=True, correction=0) + eps).sqrt())
            return (x - x.mean(dim=-1, keepdim=True)) / deviation * weight + bias
        return func(*args, **kwargs)


@torch.no_grad()
def leave_out(classify, inputs: Tensor, target: int) -> Tensor:
    """By how much a frozen model's logit falls without each value of one input, (1, ...)."""
    with Frozen() as frozen:
        whole = classify(inputs)[0, target]
        found = torch.zeros(inputs.numel(), dtype=inputs.dtype)
        for place in range(inputs.numel()):
            without = inputs.clone()
            without.view(-1)[place] = 0
            frozen.replay = 0
            found[place] = whole - classify(without)[0, target]
    return found.view(inputs.shape)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_relevance_is_what_a_frozen_model_loses_without_a_value(variant):
    vit, image = draw_vit(variant), draw(1, 3, 8, 12)
    tokens, classify = classify_tokens(vit, image)
    _, found = propagate(classify, tokens, torch.tensor([3]))
    torch.testing.assert_close(found, leave_out(classify, tokens, 3), rtol=1e-8, atol=1e-10)


def test_the_rules_leave_no_trace_even_after_an_error():
    vit, images = draw_vit(OURS), draw(3, 3, 8, 12).requires_grad_()
    (before,) = torch.autograd.grad(vit(images).sum(), images)
    _, expected = propagate(vit, images)
    with pytest.raises(ValueError, match="patch_size"):
        propagate(vit, images[..., :7])
    (after,) = torch.autograd.grad(vit(images).sum(), images)
    assert torch.equal(after, before)
    vit.set_grad_checkpointing()
    torch.testing.assert_close(propagate(vit, images)[1], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", [VARIANTS["registers"], OURS])
def test_tokens_of_every_layer_have_the_relevance_that_is_passed_back_to_them(variant):
    vit, images, target = draw_vit(variant), draw(3, 3, 8, 12), torch.tensor([2, 0, 4])
    logits, (found,), weights = token_relevance(vit, images, [target])
    expected_logits, expected_weights, outputs = vit.forward_intermediates(images)
    torch.testing.assert_close(logits, expected_logits.detach())
    torch.testing.assert_close(weights, [layer.detach() for layer in expected_weights])
    tokens, grid = vit.embed(images)
    assert len(found) == len(vit.blocks)
    for number, entering in enumerate([tokens, *outputs[:-1]]):

        def rest(x: Tensor, number: int = number) -> Tensor:
            for later in vit.blocks[number:]:
                x = later(x, grid)
            return vit.forward_head(vit.norm(x))

        _, expected = propagate(rest, entering, target)
        torch.testing.assert_close(found[number], expected.sum(dim=-1))
    # The maps of the model are made of these.
    prefix = vit.num_prefix_tokens
    patches = found[..., prefix:].unflatten(2, (2, 3)).float()
    rolled = attention_rollout(
        weights, readout=layout_of(vit, 8, 8).readout, num_prefix_tokens=prefix
    )
    values = {
        "lrp": patches[0],
        "lrp_rollout": smooth(patches.mean(dim=0).clamp(min=0)) * rolled.unflatten(1, (2, 3)),
        "lrp_pixels": propagate(vit, images, target)[1].sum(dim=1).float(),
    }
    _, maps = attention_maps(vit.float(), images.float(), list(values), target)
    for kind, expected in values.items():
        scaled = expected / expected.abs().mean(dim=(1, 2), keepdim=True).clamp(min=1e-30)
        torch.testing.assert_close(maps[kind], scaled, rtol=1e-3, atol=1e-3)


def test_smoothing_is_that_of_scipy_and_keeps_a_constant():
    maps = draw(2, 3, 4).numpy()
    near, whole = (
        gaussian_filter(values, (0, 1, 1), mode="constant", truncate=9)
        for values in (maps, np.ones_like(maps))
    )
    found = smooth(torch.from_numpy(maps).float())
    torch.testing.assert_close(found, torch.from_numpy(near / whole).float())


TIMMS: dict[str, dict[str, Any]] = {
    "respost": {"block_fn": vits.ResPostBlock, "init_values": 0.3},
    "RMS norm": {"norm_layer": "rmsnorm", "act_layer": "silu"},
    "CLIP": {"act_layer": "quick_gelu", "pre_norm": True, "global_pool": "map"},
    "qk_norm": {"qk_norm": True, "class_token": False, "global_pool": "avg"},
    "SwiGLU and registers": {"model_name": "vit_giant_patch14_reg4_dinov2"},
    "differential": {"model_name": "vit_dwee_patch16_reg1_gap_256"},
    "EVA-02, norm in SwiGLU": {"model_name": "eva02_base_patch14_224", "scale_attn_inner": True},
    "DINOv3": {"model_name": "vit_small_plus_patch16_dinov3", "init_values": 0.3},
    "Perception Encoder": {"model_name": "vit_pe_core_tiny_patch16_384", "init_values": 0.3},
    "Sapiens2": {"model_name": "vit_base_patch16_sapiens2", "num_heads": 2, "num_kv_heads": 1},
    "BEiT": {"model_name": "beit_base_patch16_224", "init_values": 0.3},
}


def draw_timm(variant: str) -> Any:
    settings = {
        "model_name": "vit_tiny_patch16_224", "img_size": (8, 12), "patch_size": 4, "embed_dim": 24,
        "depth": 2, "num_heads": 3, "mlp_ratio": 2, "num_classes": 5,
    }  # fmt: skip
    return randomize(timm.create_model(**(settings | TIMMS[variant])).double(), 0.3)


@pytest.mark.parametrize("variant", TIMMS)
def test_timm_models_conserve_relevance(variant):
    """Relevance and what the frozen model makes of its biases alone are the logit."""
    model, image = draw_timm(variant), draw(1, 3, 8, 12)
    tokens, classify = classify_tokens(require_attention(model), image)
    logits, relevance = propagate(classify, tokens, torch.tensor([3]))
    torch.testing.assert_close(logits, model(image).detach(), rtol=1e-8, atol=1e-10)
    with torch.no_grad(), Frozen() as frozen:
        classify(tokens)
        frozen.replay = 0
        biases = classify(torch.zeros_like(tokens))[:, 3]
        assert frozen.replay == len(frozen.kept)
    torch.testing.assert_close(relevance.sum() + biases, logits[:, 3], rtol=1e-8, atol=1e-8)
    assert biases.abs() > 1e-3 and relevance.abs().mean() > 1e-3
    if variant in ("EVA-02, norm in SwiGLU", "BEiT", "differential"):
        expected = leave_out(classify, tokens, 3)
        torch.testing.assert_close(relevance, expected, rtol=1e-8, atol=1e-10)


class Scaled(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(2 * x)


@pytest.mark.parametrize(
    "activation",
    [lambda x: F.gelu(x) * 1.7, lambda x: F.silu(x, inplace=True), nn.SiLU(inplace=True)],
    ids=["scaled", "in place", "module"],
)
def test_activations_keep_their_values(activation):
    x = draw(2, 4)
    logits, relevance = propagate(Scaled(activation), x, torch.tensor([0, 3]))
    torch.testing.assert_close(logits, Scaled(activation)(x.clone()))
    torch.testing.assert_close(relevance.sum(dim=1), logits[[0, 1], [0, 3]])


def test_what_has_no_rule_inside_is_refused():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    with pytest.raises(ValueError, match=r"relevance cannot be passed through nn\.MultiheadAtt"):
        propagate(lambda x: attention(x, x, x)[0].mean(dim=1), torch.randn(2, 3, 4))
