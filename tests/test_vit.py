"""The whole Vision Transformer against timm's, and properties of its own."""

import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import calculate_drop_path_rates
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from torch.testing import assert_close

from vit.config import ModelConfig
from vit.model.attention import causal_mask
from vit.model.embed import sincos_pos_embed
from vit.model.vit import VisionTransformer

TINY = {
    "img_size": 16,
    "patch_size": 4,
    "num_classes": 7,
    "embed_dim": 12,
    "depth": 3,
    "num_heads": 3,
    "mlp_ratio": 2.0,
}
AVG = {"class_token": False, "global_pool": "avg"}

# What timm's model can do too.
SHARED = {
    "class token": {},
    "mean": AVG,
    "mean beside class token": {"global_pool": "avg"},
    "registers": {"reg_tokens": 2},
    "registers and mean": {"reg_tokens": 2, **AVG},
    "registers, class token and mean": {"reg_tokens": 2, "global_pool": "avg"},
    "no positions": {"pos_embed": "none"},
    "no positions, mean": {"pos_embed": "none", **AVG},
    "qk norm": {"qk_norm": True},
    "no qkv bias": {"qkv_bias": False},
    "layer scale": {"init_values": 0.1},
    "patch of 8": {"patch_size": 8},
    "single head": {"num_heads": 1},
    "one grey layer": {"in_chans": 1, "depth": 1},
    "fused": {"attn_kernel": "fused"},
}
ALL = SHARED | {
    "conv stem": {"stem": "conv", **AVG},
    "free head width": {"head_dim": 5},
    "sincos": {"pos_embed": "sincos"},
    "mixing mlp": {"mlp_conv": True},
    "mixing mlp, pooled": {"mlp_conv": True, **AVG},
    "all": {
        "stem": "conv",
        "mlp_conv": True,
        "qk_norm": True,
        "init_values": 0.1,
        "reg_tokens": 2,
        "head_dim": 5,
    },
}
with_shared = pytest.mark.parametrize("variant", SHARED.values(), ids=SHARED)
with_all = pytest.mark.parametrize("variant", ALL.values(), ids=ALL)


def draw_vit(**kwargs) -> VisionTransformer:
    """Build a tiny model in float64, in eval mode, all of whose parameters are random."""
    model = VisionTransformer(**(TINY | kwargs)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def timm_twin(model: VisionTransformer, **kwargs) -> TimmVisionTransformer:
    """Build timm's model with the weights of ours, which it takes and gives back strictly."""
    kwargs = TINY | kwargs
    kwargs.pop("attn_kernel", None)
    kwargs["pos_embed"] = "none" if kwargs.get("pos_embed") == "none" else "learn"
    twin = TimmVisionTransformer(**kwargs).double().eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(twin.state_dict(), strict=True)
    return twin


def draw_images(batch: int = 3, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, 16, 16, generator=generator, dtype=torch.float64)


# --- against timm ---


@with_shared
def test_tokens_logits_and_gradients_equal_timm(variant):
    ours = draw_vit(**variant)
    theirs = timm_twin(ours, **variant)
    images = draw_images(channels=variant.get("in_chans", 3))

    tokens = ours.forward_features(images)
    logits, expected = ours(images), theirs(images)

    assert_close(tokens, theirs.forward_features(images), rtol=0, atol=1e-10)
    assert_close(logits, expected, rtol=0, atol=1e-10)
    for output in (logits, expected):
        F.cross_entropy(output, torch.tensor([0, 3, 6])).backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    expected_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert_close(gradients, expected_gradients, rtol=0, atol=1e-10)


@with_shared
def test_logits_equal_timm_in_float32(variant):
    ours = draw_vit(**variant)
    theirs = timm_twin(ours, **variant).float()
    images = draw_images(channels=variant.get("in_chans", 3)).float()
    assert_close(ours.float()(images), theirs(images), rtol=0, atol=1e-5)


def test_mask_acts_in_every_block_as_in_timm():
    ours = draw_vit(attn_kernel="math")
    mask = causal_mask(17)
    logits, weights = ours(draw_images(), mask, need_weights=True)
    expected = timm_twin(ours)(draw_images(), attn_mask=mask)
    assert_close(logits, expected, rtol=0, atol=1e-10)
    assert_close(ours(draw_images(), mask), expected, rtol=0, atol=1e-10)
    assert (weights[..., ~mask] == 0).all()
    assert (logits - ours(draw_images())).abs().max() > 1e-3


@pytest.mark.parametrize(
    "rate", ["drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate"]
)
def test_training_equals_timm_at_the_same_seed(rate):
    variant = {rate: 0.5, "attn_kernel": "fused"}
    ours = draw_vit(**variant)
    theirs = timm_twin(ours, **variant).train()
    images = draw_images(batch=8)
    undropped = draw_vit()(images)
    assert_close(ours(images), undropped, rtol=0, atol=1e-12)  # none in eval mode

    torch.manual_seed(2)
    logits = ours.train()(images)
    torch.manual_seed(2)
    expected = theirs(images)

    assert_close(logits, expected, rtol=0, atol=1e-10)
    assert (logits - undropped).abs().max() > 1e-3


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drop_path_rises_linearly_from_zero(depth):
    model = VisionTransformer(**(TINY | {"depth": depth}), drop_path_rate=0.2)
    expected = [0.0] if depth == 1 else [0.2 * layer / (depth - 1) for layer in range(depth)]
    assert expected == pytest.approx(calculate_drop_path_rates(0.2, depth))
    assert [block.drop_path1.p for block in model.blocks] == pytest.approx(expected)
    assert [block.drop_path2.p for block in model.blocks] == pytest.approx(expected)


def test_fresh_weights_are_drawn_as_in_timm():
    variant = {"embed_dim": 96, "reg_tokens": 2}
    torch.manual_seed(3)
    ours = VisionTransformer(**(TINY | variant))
    theirs = TimmVisionTransformer(**(TINY | variant))
    for (name, parameter), expected in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        deviation, expected_deviation = parameter.detach().std(), expected.detach().std()
        assert_close(deviation, expected_deviation, rtol=0.3, atol=0, msg=name)
        assert_close(parameter.mean(), expected.mean(), rtol=0, atol=0.5 * deviation, msg=name)


@with_all
def test_bfloat16_autocast_is_close_to_float32(variant):
    model = draw_vit(**variant).float()
    images = draw_images(channels=variant.get("in_chans", 3)).float()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    assert_close(logits.float(), model(images), rtol=0.05, atol=0.1)


# --- attention weights ---


@with_all
def test_weights_are_row_stochastic_and_change_no_logits(variant):
    model = draw_vit(**variant)
    images = draw_images(channels=variant.get("in_chans", 3))

    logits, weights = model(images, need_weights=True)

    size = TINY | variant
    tokens = model.num_prefix_tokens + (16 // size["patch_size"]) ** 2
    assert weights.shape == (size["depth"], 3, size["num_heads"], tokens, tokens)
    assert (weights >= 0).all()
    assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]).double(), rtol=0, atol=1e-12)
    assert_close(logits, model(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("layer", range(3))
def test_weights_are_in_order_of_the_layers(layer):
    model = draw_vit()
    _, before = model(draw_images(), need_weights=True)
    with torch.no_grad():
        model.blocks[layer].attn.qkv.weight.mul_(2)
    _, after = model(draw_images(), need_weights=True)
    changed = [bool((a - b).abs().max() > 1e-6) for a, b in zip(after, before, strict=True)]
    assert changed == [other >= layer for other in range(3)]


def test_weights_of_every_layer_can_be_differentiated():
    model = draw_vit()
    logits, weights, tokens = model.forward_intermediates(draw_images())
    for layer in range(3):
        for part in (weights[layer], tokens[layer]):
            (gradient,) = torch.autograd.grad(logits.square().sum(), part, retain_graph=True)
            assert gradient.shape == part.shape and gradient.abs().max() > 1e-6
        qkv = model.blocks[layer].attn.qkv.weight
        (gradient,) = torch.autograd.grad(weights[layer].square().sum(), qkv, retain_graph=True)
        assert gradient.abs().max() > 1e-6


# --- gradients and initialisation ---


@with_all
def test_every_parameter_gets_a_gradient(variant):
    model = draw_vit(**variant).train()
    images = draw_images(channels=variant.get("in_chans", 3))
    F.cross_entropy(model(images), torch.tensor([0, 3, 6])).backward()
    for name, parameter in model.named_parameters():
        if name.endswith("k_norm.bias"):  # adds the same to all scores of a row: softmax ignores it
            assert parameter.grad.abs().max() < 1e-12, name
        else:
            assert parameter.grad.abs().max() > 1e-6, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("variant", [{}, {"init_values": 0.1}, {"qk_norm": True, "reg_tokens": 2}])
def test_zero_init_makes_every_block_the_identity(variant):
    torch.manual_seed(4)
    model = VisionTransformer(**TINY, zero_init=True, **variant)
    tokens = torch.randn(3, 17, 12)
    for block in model.blocks:
        assert_close(block(tokens), tokens, rtol=0, atol=0)
        assert (block.attn.qkv.weight != 0).any()
        assert (block.mlp.fc1.weight != 0).any()


def test_without_zero_init_no_block_is_the_identity():
    torch.manual_seed(4)
    tokens = torch.randn(3, 17, 12)
    for block in VisionTransformer(**TINY).blocks:
        assert (block.attn(block.norm1(tokens)) != 0).any()
        assert (block.mlp(block.norm2(tokens)) != 0).any()


def test_zero_init_lets_the_output_projections_learn_first():
    torch.manual_seed(4)
    model = VisionTransformer(**TINY, zero_init=True)
    F.cross_entropy(model(draw_images().float()), torch.tensor([0, 3, 6])).backward()
    for block in model.blocks:
        assert (block.attn.qkv.weight.grad == 0).all()
        assert (block.mlp.fc1.weight.grad == 0).all()
        assert (block.attn.proj.weight.grad != 0).any()
        assert (block.mlp.fc2.weight.grad != 0).any()


# --- positions ---


@pytest.mark.parametrize(
    ("pos_embed", "notices"), [("none", False), ("learned", True), ("sincos", True)]
)
@pytest.mark.parametrize("pooling", [AVG, {"global_pool": "avg", "reg_tokens": 2}, {}])
def test_only_positions_tell_where_a_patch_is(pos_embed, notices, pooling):
    model = draw_vit(pos_embed=pos_embed, **pooling)
    images = draw_images()
    patches = rearrange(images, "b c (y i) (x j) -> b (y x) c i j", i=4, j=4)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(5))
    shuffled = rearrange(patches[:, order], "b (y x) c i j -> b c (y i) (x j)", y=4)

    difference = (model(shuffled) - model(images)).abs().max()

    assert difference > 1e-3 if notices else difference < 1e-12


@pytest.mark.parametrize("prefix", [AVG, {}, {"reg_tokens": 2}])
def test_sincos_positions_are_saved_but_not_learned(prefix):
    model = draw_vit(pos_embed="sincos", **prefix)

    assert "pos_embed" in model.state_dict()
    assert "pos_embed" not in dict(model.named_parameters())
    first = model.num_prefix_tokens
    assert (model.pos_embed[0, :first] == 0).all()
    assert_close(model.pos_embed[0, first:].float(), sincos_pos_embed((4, 4), 12), rtol=0, atol=0)
    twin = timm_twin(model, **prefix)
    assert_close(model(draw_images()), twin(draw_images()), rtol=0, atol=1e-10)


@pytest.mark.parametrize("stem", ["linear", "conv"])
@pytest.mark.parametrize("pos_embed", ["learned", "sincos", "none"])
def test_under_autocast_tokens_stay_in_bfloat16_between_blocks(stem, pos_embed):
    model = VisionTransformer(
        embed_dim=24, depth=2, num_heads=2, reg_tokens=1, stem=stem, pos_embed=pos_embed
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        images = torch.randn(2, 3, 32, 32)
        assert model.embed(images).dtype == torch.bfloat16
        _, _, tokens = model.forward_intermediates(images)
    assert {layer.dtype for layer in tokens} == {torch.bfloat16}


@pytest.mark.parametrize("size", [16, 24, 48])
@pytest.mark.parametrize("prefix", [0, 2])
def test_images_of_another_size_as_in_timm(size, prefix):
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "num_classes": 5, "embed_dim": 24, "depth": 2}
    shared = {**sizes, "num_heads": 2, "reg_tokens": prefix, "class_token": False}
    ours = VisionTransformer(**shared, global_pool="avg")
    theirs = TimmVisionTransformer(**shared, global_pool="avg", dynamic_img_size=True)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(2, 3, size, size)
    assert_close(ours.eval()(images), theirs.eval()(images), rtol=0, atol=1e-5)


def test_neighbours_stay_neighbours_in_images_of_another_size():
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=4, embed_dim=24, depth=1, num_heads=2, mlp_conv=True,
        class_token=False, global_pool="avg", pos_embed="none",
    )  # fmt: skip
    small = VisionTransformer(
        img_size=24, patch_size=4, embed_dim=24, depth=1, num_heads=2, mlp_conv=True,
        class_token=False, global_pool="avg", pos_embed="none",
    )  # fmt: skip
    small.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 24, 24)
    assert_close(model.eval()(images), small.eval()(images), rtol=0, atol=0)


def test_learned_positions_are_a_parameter():
    model = VisionTransformer(**TINY, reg_tokens=2)
    assert isinstance(model.pos_embed, nn.Parameter)
    assert model.pos_embed.shape == (1, 1 + 2 + 16, 12)


# --- errors and config ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_token": False}, "global_pool: token needs class_token=True; or use avg"),
        ({"global_pool": "max"}, "global_pool: 'max' is not token or avg"),
        ({"patch_size": 5}, "patch_size: 5 does not divide img_size=16"),
        ({"num_heads": 5}, "num_heads: 5 does not divide dim=12; set head_dim"),
        ({"pos_embed": "rotary"}, "pos_embed: 'rotary' is not learned, sincos or none"),
        ({"pos_embed": "sincos", "embed_dim": 6}, "dim: 6 is not a multiple of 4"),
        ({"stem": "mlp"}, "stem: 'mlp' is not linear or conv"),
        ({"img_size": 12, "patch_size": 3, "stem": "conv"}, "patch_size: 3 is not a power of two"),
        ({"attn_kernel": "flash"}, "kernel: 'flash' is not auto, math or fused"),
    ],
)
def test_impossible_model_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**(TINY | arguments))


def test_model_config_builds_a_model():
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert fields <= inspect.signature(VisionTransformer).parameters.keys()

    model = VisionTransformer(**dataclasses.asdict(ModelConfig()))

    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_sizes_reach_every_block():
    model = VisionTransformer(**(TINY | {"img_size": 32, "num_classes": 100}), head_dim=5)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert len(model.blocks) == 3
    for block in model.blocks:
        assert block.attn.qkv.weight.shape == (3 * 3 * 5, 12)
        assert block.mlp.fc1.weight.shape == (24, 12)
