"""The complete Vision Transformer compared with timm's, and its own properties."""

import dataclasses
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from torch.testing import assert_close

from models import PLAIN, draw, randomize
from vit.model.config import NOT_OF_VIT, ModelConfig
from vit.model.encoder import NeighbourConv
from vit.model.vit import VisionTransformer

TINY = {
    "img_size": 16, "patch_size": 4, "num_classes": 7, "embed_dim": 12, "depth": 3, "num_heads": 3,
    "mlp_ratio": 2.0,
}  # fmt: skip
AVG = {"class_token": False, "global_pool": "avg"}

# What timm's model can do too.
SHARED = {
    "class token": {},
    "mean": AVG,
    "mean, norm before pooling": {"global_pool": "avg", "fc_norm": False},
    "registers and mean": {"reg_tokens": 2, **AVG},
    "no positions": {"pos_embed": "none"},
    "sincos": {"pos_embed": "sincos", "reg_tokens": 2},
    "positions of patches alone": {"no_embed_class": True},
    "qk norm, no qkv bias": {"qk_norm": True, "qkv_bias": False},
    "layer scale, pre-norm": {"init_values": 0.1, "pre_norm": True},
    "rectangles of two patches": {"img_size": (8, 24), "patch_size": 8},
    "one grey layer with a single head": {"in_chans": 1, "depth": 1, "num_heads": 1},
}
# What it cannot do: the reference is `logits_step_by_step`.
OURS = {
    "conv stem": {"stem": "conv", **AVG},
    "free head width": {"head_dim": 5},
    "mixing mlp, pooled, sincos": {"mlp_conv": True, "pos_embed": "sincos", **AVG},
    "all": {"stem": "conv", "mlp_conv": True, "init_values": 0.1, "reg_tokens": 2, "head_dim": 5},
}
with_shared = pytest.mark.parametrize("variant", SHARED.values(), ids=SHARED)
with_ours = pytest.mark.parametrize("variant", OURS.values(), ids=OURS)

# Of a model for 16 x 16 pixels and patches of 4: as many patches in another aspect, wider, taller,
# a single row, a single patch.
SIZES = [(16, 16), (8, 32), (12, 20), (48, 40), (4, 64), (4, 4)]


def draw_vit(**kwargs) -> VisionTransformer:
    """Build a tiny model in float64, in eval mode, all of whose parameters are random."""
    return randomize(VisionTransformer(**(PLAIN | TINY | kwargs)).double(), 0.3)


def timm_twin(model: VisionTransformer, **kwargs) -> TimmVisionTransformer:
    """Build timm's model with the weights of ours, which it takes and gives back strictly."""
    kwargs = TINY | kwargs
    kwargs["pos_embed"] = "none" if kwargs.get("pos_embed") == "none" else "learn"
    twin = TimmVisionTransformer(**kwargs, dynamic_img_size=True).double().eval()
    twin.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(twin.state_dict(), strict=True)
    return twin


def draw_images(batch: int = 3, channels: int = 3, size: tuple[int, int] = (16, 16)) -> Tensor:
    return draw(batch, channels, *size, seed=1)


# --- against timm ---


@with_shared
def test_tokens_logits_and_gradients_equal_timm(variant, kernel):
    ours = draw_vit(**variant)
    theirs = timm_twin(ours, **variant)
    channels = variant.get("in_chans", 3)
    for size in ((16, 16), (8, 24), (24, 8)):
        # timm resamples position embeddings in float32.
        atol = 1e-10 if size == variant.get("img_size", (16, 16)) else 1e-5
        images = draw_images(channels=channels, size=size)
        logits, expected = ours(images), theirs(images)
        tokens = ours.forward_features(images)
        assert_close(tokens, theirs.forward_features(images), rtol=0, atol=atol)
        assert_close(logits, expected, rtol=0, atol=atol)
        for model, output in ((ours, logits), (theirs, expected)):
            model.zero_grad()
            F.cross_entropy(output, torch.tensor([0, 3, 6])).backward()
        gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
        others = {name: theirs.get_parameter(name).grad for name in gradients}
        assert_close(gradients, others, rtol=0, atol=10 * atol)


@pytest.mark.parametrize(
    "rate", ["drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate"]
)
def test_training_equals_timm_at_the_same_seed(rate, kernel):
    variant = {rate: 0.5}
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


def test_fresh_weights_are_drawn_as_in_timm():
    variant = {"embed_dim": 96, "reg_tokens": 2}
    torch.manual_seed(3)
    ours = VisionTransformer(**(PLAIN | TINY | variant))
    theirs = TimmVisionTransformer(**(TINY | variant))
    for (name, parameter), expected in zip(
        ours.named_parameters(), theirs.parameters(), strict=True
    ):
        deviation, expected_deviation = parameter.detach().std(), expected.detach().std()
        assert_close(deviation, expected_deviation, rtol=0.3, atol=0, msg=name)
        assert_close(parameter.mean(), expected.mean(), rtol=0, atol=0.5 * deviation, msg=name)


# --- step by step ---


def add_neighbours(tokens: Tensor, conv: nn.Conv2d, grid: tuple[int, int], prefix: int) -> Tensor:
    """Add a depthwise 3 x 3 convolution, as a sum over shifted copies of the grid."""
    rows, columns = grid
    image = tokens[:, prefix:].reshape(len(tokens), rows, columns, -1)
    padded = F.pad(image, (0, 0, 1, 1, 1, 1))
    for down, across in itertools.product(range(3), repeat=2):
        shifted = padded[:, down : down + rows, across : across + columns]
        image = image + conv.weight[:, 0, down, across] * shifted
    patches = (image + conv.bias).reshape(len(tokens), rows * columns, -1)
    return torch.cat([tokens[:, :prefix], patches], dim=1)


def logits_step_by_step(model: VisionTransformer, images: Tensor) -> Tensor:
    """Classify images with a model's layers and timm's positions; the grid is the stem's."""
    image = model.patch_embed.proj(images)
    grid = (image.shape[2], image.shape[3])
    x = image.flatten(2).mT
    prefix = [token for token in (model.cls_token, model.reg_token) if token is not None]
    x = torch.cat([*(token.expand(len(x), -1, -1) for token in prefix), x], dim=1)
    first_patch = model.num_prefix_tokens
    x = x + resample_abs_pos_embed(
        model.pos_embed, grid, model.patch_embed.grid_size, num_prefix_tokens=first_patch
    )
    for block in model.blocks:
        x = x + block.ls1(block.attn(block.norm1(x)))
        hidden = block.mlp.fc1(block.norm2(x))
        if isinstance(block.mlp.conv, NeighbourConv):
            hidden = add_neighbours(hidden, block.mlp.conv.conv, grid, first_patch)
        x = x + block.ls2(block.mlp.fc2(F.gelu(hidden)))
    x = model.norm(x)
    pooled = x[:, 0] if model.global_pool == "token" else x[:, first_patch:].mean(dim=1)
    return model.head(model.fc_norm(pooled))


@with_ours
def test_images_of_any_size_step_by_step(variant):
    model = draw_vit(**variant)
    for size in SIZES:
        images = draw_images(size=size)
        logits, weights = model(images, need_weights=True)
        assert_close(logits, logits_step_by_step(model, images), rtol=1e-5, atol=1e-5)
        assert_close(model(images), logits, rtol=0, atol=1e-12)
        tokens = model.num_prefix_tokens + size[0] * size[1] // 16
        assert weights.shape == (3, 3, 3, tokens, tokens) and (weights >= 0).all()
        assert_close(weights.sum(-1), torch.ones(3, 3, 3, tokens).double(), rtol=0, atol=1e-12)
    mixing = [block.mlp.conv is not None for block in model.blocks]
    pooled = model.global_pool == "avg"  # otherwise the last block's patches are not read
    assert mixing == [variant.get("mlp_conv", False)] * 2 + [
        variant.get("mlp_conv", False) and pooled
    ]


@pytest.mark.parametrize(
    "variant", [{"reg_tokens": 1}, {"pos_embed": "sincos"}, {"pos_embed": "none"}, *OURS.values()]
)
def test_bfloat16_autocast_is_close_to_float32(variant):
    model = draw_vit(**variant).float()
    images = draw_images(size=(8, 24)).float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits, _, tokens = model.forward_intermediates(images)
    if "init_values" not in variant:  # layer scale multiplies by float32
        assert {layer.dtype for layer in tokens} == {torch.bfloat16}
    assert_close(logits.float(), model(images), rtol=0.05, atol=0.1)


# --- initialisation and positions ---


def test_zero_init_makes_every_block_the_identity_that_can_learn():
    torch.manual_seed(4)
    model = VisionTransformer(**(PLAIN | TINY | {"zero_init": True, "init_values": 0.1}))
    tokens = torch.randn(3, 17, 12)
    F.cross_entropy(model(draw_images().float()), torch.tensor([0, 3, 6])).backward()
    for block in model.blocks:
        assert_close(block(tokens, (4, 4)), tokens, rtol=0, atol=0)
        assert (block.attn.qkv.weight != 0).any() and (block.mlp.fc1.weight != 0).any()
        assert (block.attn.proj.weight.grad != 0).any() and (block.mlp.fc2.weight.grad != 0).any()
    for block in VisionTransformer(**(PLAIN | TINY)).blocks:
        assert (block.attn(block.norm1(tokens)) != 0).any()
        assert (block.mlp(block.norm2(tokens), (4, 4)) != 0).any()


# --- errors and config ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"class_token": False}, "global_pool: token needs class_token=True; or use avg"),
        ({"global_pool": "max"}, "global_pool: 'max' is not token or avg"),
        ({"num_heads": 5}, "num_heads: 5 does not divide dim=12; set head_dim"),
        ({"pos_embed": "rotary"}, "pos_embed: 'rotary' is not learned, sincos or none"),
        ({"pos_embed": "sincos", "embed_dim": 6}, "embed_dim: 6 is not a multiple of 4"),
        ({"stem": "mlp"}, "stem: 'mlp' is not linear or conv"),
        ({"img_size": 12, "patch_size": 3, "stem": "conv"}, "patch_size: 3 is not a power of two"),
    ],
)
def test_impossible_model_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**(PLAIN | TINY | arguments))


def test_defaults_are_those_of_the_config():
    signature = inspect.signature(VisionTransformer).parameters
    defaults = {k: p.default for k, p in signature.items() if p.default is not p.empty}
    config = dataclasses.asdict(ModelConfig())
    assert defaults == {key: config[key] for key in config if key not in NOT_OF_VIT}


def test_a_model_of_bfloat16_takes_images_of_another_size():
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_classes": 5}
    model, images = VisionTransformer(**PLAIN | sizes).eval(), torch.randn(1, 3, 48, 48)
    expected = model(images)
    assert (model.bfloat16()(images.bfloat16()) - expected).abs().max() < 0.05
