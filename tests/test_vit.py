"""The complete Vision Transformer compared with timm's, and its own properties."""

import copy
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from timm.layers import calculate_drop_path_rates, resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from torch.testing import assert_close

from models import PLAIN
from vit.model.attention import causal_mask
from vit.model.config import ModelConfig
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
    model = VisionTransformer(**(PLAIN | TINY | kwargs)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model


def timm_twin(model: VisionTransformer, **kwargs) -> TimmVisionTransformer:
    """Build timm's model with the weights of ours, which it takes and gives back strictly."""
    kwargs = TINY | kwargs
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
def test_tokens_logits_and_gradients_equal_timm(variant, kernel):
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
    ours = draw_vit()
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


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drop_path_rises_linearly_from_zero(depth):
    model = VisionTransformer(**(PLAIN | TINY | {"depth": depth}), drop_path_rate=0.2)
    expected = [0.0] if depth == 1 else [0.2 * layer / (depth - 1) for layer in range(depth)]
    assert expected == pytest.approx(calculate_drop_path_rates(0.2, depth))
    for name in ("drop_path1", "drop_path2"):
        rates = [getattr(getattr(block, name), "p", 0.0) for block in model.blocks]
        assert rates == pytest.approx(expected)


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
    model = VisionTransformer(**(PLAIN | TINY | {"zero_init": True} | variant))
    tokens = torch.randn(3, 17, 12)
    for block in model.blocks:
        assert_close(block(tokens, (4, 4)), tokens, rtol=0, atol=0)
        assert (block.attn.qkv.weight != 0).any()
        assert (block.mlp.fc1.weight != 0).any()


def test_without_zero_init_no_block_is_the_identity():
    torch.manual_seed(4)
    tokens = torch.randn(3, 17, 12)
    for block in VisionTransformer(**(PLAIN | TINY)).blocks:
        assert (block.attn(block.norm1(tokens)) != 0).any()
        assert (block.mlp(block.norm2(tokens), (4, 4)) != 0).any()


def test_zero_init_lets_the_output_projections_learn_first():
    torch.manual_seed(4)
    model = VisionTransformer(**(PLAIN | TINY | {"zero_init": True}))
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
    sizes = {"img_size": 32, "num_classes": 10, "embed_dim": 24, "depth": 2, "num_heads": 2}
    options = {"reg_tokens": 1, "stem": stem, "pos_embed": pos_embed}
    model = VisionTransformer(**(PLAIN | sizes | options))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        images = torch.randn(2, 3, 32, 32)
        assert model.embed(images)[0].dtype == torch.bfloat16
        _, _, tokens = model.forward_intermediates(images)
    assert {layer.dtype for layer in tokens} == {torch.bfloat16}


# --- images of any size ---

# Of a model for 16 x 16 pixels and patches of 4: the same square, squares of other sizes, as many
# patches in another aspect, wider, taller, a single row, a single column, a single patch.
SIZES = [
    (16, 16), (24, 24), (8, 8), (8, 32), (32, 8), (64, 4), (4, 64), (12, 20), (20, 12), (16, 32),
    (4, 12), (12, 4), (4, 4), (48, 40),
]  # fmt: skip
PREFIXES = {
    "class token": {},
    "class token and registers": {"reg_tokens": 2},
    "no prefix": AVG,
    "registers": {"reg_tokens": 2, **AVG},
}


def draw_rectangles(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pos_embed", ["learned", "sincos", "none"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_images_of_any_size_as_in_timm(size, pos_embed, prefix):
    ours = draw_vit(pos_embed=pos_embed, **prefix)
    positions = "none" if pos_embed == "none" else "learned"
    theirs = timm_twin(ours, pos_embed=positions, dynamic_img_size=True, **prefix).float()
    images = draw_rectangles(size)
    assert_close(ours.float()(images), theirs(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("img_size", [(8, 20), (20, 8), (4, 16)])
@pytest.mark.parametrize("size", [(8, 20), (20, 8), (12, 20), (4, 16), (24, 24)])
def test_model_for_rectangles_equals_timm(img_size, size):
    ours = draw_vit(img_size=img_size)
    theirs = timm_twin(ours, img_size=img_size, dynamic_img_size=True).float()
    images = draw_rectangles(size)
    assert_close(ours.float()(images), theirs(images), rtol=0, atol=1e-5)


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
    if model.pos_embed is not None:
        old_grid = model.patch_embed.grid_size
        x = x + resample_abs_pos_embed(
            model.pos_embed, grid, old_grid, num_prefix_tokens=first_patch
        )
    for block in model.blocks:
        x = x + block.attn(block.norm1(x))
        hidden = block.mlp.fc1(block.norm2(x))
        if block.mlp.conv is not None:
            hidden = add_neighbours(hidden, block.mlp.conv.conv, grid, first_patch)
        x = x + block.mlp.fc2(F.gelu(hidden))
    x = model.norm(x)
    pooled = x[:, 0] if model.global_pool == "token" else x[:, first_patch:].mean(dim=1)
    return model.head(model.fc_norm(pooled))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pos_embed", ["learned", "sincos", "none"])
@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize(("stem", "mlp_conv"), [("conv", True), ("conv", False), ("linear", True)])
def test_images_of_any_size_step_by_step(size, pos_embed, prefix, stem, mlp_conv):
    model = draw_vit(stem=stem, mlp_conv=mlp_conv, pos_embed=pos_embed, **prefix).float()
    images = draw_rectangles(size)
    assert_close(model(images), logits_step_by_step(model, images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(8, 32), (12, 20), (4, 64)])
def test_neighbours_in_rows_are_not_neighbours_in_columns(size):
    # Without positions, only the convolution over the grid tells rows from columns.
    model = draw_vit(mlp_conv=True, pos_embed="none", **AVG)
    turned = copy.deepcopy(model)
    with torch.no_grad():
        for block in turned.blocks:
            block.mlp.conv.conv.weight.copy_(block.mlp.conv.conv.weight.mT.clone())
        turned.patch_embed.proj.weight.copy_(model.patch_embed.proj.weight.mT.clone())
    images = draw_rectangles(size).double()
    assert_close(turned(images.mT), model(images), rtol=0, atol=1e-10)
    assert (model(images.mT) - model(images)).abs().max() > 1e-3
    patches = rearrange(images, "b c (y i) (x j) -> b (y x) c i j", i=4, j=4)
    other_aspect = rearrange(
        patches, "b (y x) c i j -> b c (y i) (x j)", y=size[1] // 4, x=size[0] // 4
    )
    assert (model(other_aspect) - model(images)).abs().max() > 1e-3


@with_all
@pytest.mark.parametrize("size", [(17, 16), (16, 18), (3, 16), (30, 33)])
def test_images_that_are_no_multiples_of_the_patch_are_refused(variant, size):
    model = draw_vit(**variant).float()
    patch = (TINY | variant)["patch_size"]
    images = torch.randn(1, variant.get("in_chans", 3), *size)
    message = f"patch_size: {patch} does not divide img_size={size[0]} x {size[1]} "
    for need_weights in (False, True):
        with pytest.raises(ValueError, match=message):
            model(images, need_weights=need_weights)


def test_weights_of_rectangular_images_are_over_their_own_patches():
    model = draw_vit(reg_tokens=2)
    _, weights = model(draw_rectangles((8, 20)).double(), need_weights=True)
    assert weights.shape == (3, 2, 3, 3 + 10, 3 + 10)


def test_neighbours_stay_neighbours_in_images_of_another_size():
    torch.manual_seed(0)
    sizes = {"num_classes": 10, "embed_dim": 24, "depth": 1, "num_heads": 2, "mlp_conv": True}
    settings = PLAIN | sizes | AVG | {"pos_embed": "none"}
    for img_size, size in ((32, (24, 24)), (32, (8, 20)), ((8, 20), (20, 8))):
        model = VisionTransformer(**settings, img_size=img_size)
        other = VisionTransformer(**settings, img_size=size)
        other.load_state_dict(model.state_dict())
        images = draw_rectangles(size)
        assert_close(model.eval()(images), other.eval()(images), rtol=0, atol=0)


def test_learned_positions_are_a_parameter():
    model = VisionTransformer(**(PLAIN | TINY), reg_tokens=2)
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
        ({"attention": "flash"}, "model.attention: flash is not known here; it must be one of dot"),
    ],
)
def test_impossible_model_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**(PLAIN | TINY | arguments))


def test_model_config_builds_a_model():
    config = ModelConfig().vit_arguments()
    model = VisionTransformer(img_size=32, in_chans=3, num_classes=10, **config)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_defaults_are_those_of_the_config():
    parameters = inspect.signature(VisionTransformer).parameters
    given = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    assert given == ModelConfig().vit_arguments()
    assert parameters.keys() - given.keys() == {"img_size", "in_chans", "num_classes"}


def test_sizes_reach_every_block():
    model = VisionTransformer(**(PLAIN | TINY | {"img_size": 32, "num_classes": 100}), head_dim=5)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 100)
    assert len(model.blocks) == 3
    for block in model.blocks:
        assert block.attn.qkv.weight.shape == (3 * 3 * 5, 12)
        assert block.mlp.fc1.weight.shape == (24, 12)
