"""timm's attention, family by family: weights, masks and muted heads, against timm's code.

The oracle sees the queries, keys and masks that timm's own forward hands to the fused kernel.
"""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import ResPostBlock
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models import randomize
from vit.explain.interventions import Interventions, gates_of
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.model.attention_model import attention_model, require_attention

SIZE = (32, 48)
PADDED: dict[str, Any] = {"depth": 1, "dynamic_img_size": True, "dynamic_img_pad": True}
ROTARY: dict[str, Any] = {"patch_size": 8, "dynamic_img_size": True}
# What docs/timm.md says of a family, and small models of it.
FAMILIES: dict[str, tuple[dict[str, Any], ...]] = {
    "`vit_*`, `deit*`, CLIP, DINOv2, SigLIP, AIMv2": (
        {"model_name": "vit_tiny_patch16_224", "patch_size": 8},
        {"model_name": "vit_giant_patch14_reg4_dinov2", "patch_size": 8},
    ),
    "the same behind convolutions: `vit_*_r26_s32_*`, `vit_*_mci_*`, `vitamin_*`": (
        {"model_name": "vit_tiny_r_s16_p8_224", "img_size": (128, 192)},
    ),
    "`vit_dwee_*`, `vit_dlittle_*`": (
        {"model_name": "vit_dwee_patch16_reg1_gap_256", "patch_size": 8},
    ),
    "EVA-02, DINOv3, `eva_giant_*`": (
        {"model_name": "eva02_tiny_patch14_224", "patch_size": 8},
        {"model_name": "vit_small_plus_patch16_dinov3", **ROTARY},
        {"model_name": "eva02_enormous_patch14_clip_224", "patch_size": 8},
    ),
    "Perception Encoder, `vit_*_rope_*`, Sapiens2": (
        {"model_name": "vit_pe_core_tiny_patch16_384", "patch_size": 8},
        {"model_name": "vit_small_patch16_rope_mixed_224", "patch_size": 8},
    ),
    "`beit_*`, `beitv2_*`": (
        {"model_name": "beit_base_patch16_224", "patch_size": 8},
        {"model_name": "beitv2_base_patch16_224", "patch_size": 8, "use_shared_rel_pos_bias": True},
    ),
}
# Options of timm's VisionTransformer that the families above do not have.
OPTIONS: list[dict[str, Any]] = [
    {"reg_tokens": 2, "no_embed_class": True, "qk_norm": True, "scale_attn_norm": True},
    {"global_pool": "map", "class_token": False, "pre_norm": True, "dynamic_img_size": True},
    {"block_fn": ResPostBlock, "init_values": 0.5, "global_pool": "avg"},
    {"model_name": "deit_tiny_distilled_patch16_224"},
]
PLAIN = {"model_name": "vit_tiny_patch16_224", "patch_size": 8}
MODELS = [model for models in FAMILIES.values() for model in models]
MODELS += [PLAIN | options for options in OPTIONS]
with_models = pytest.mark.parametrize(
    "model", MODELS, ids=[model["model_name"] for model in MODELS]
)


def build(settings: dict[str, Any]) -> Any:
    """A family's smallest model, with random weights in every part of it."""
    sizes = {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": SIZE, "num_classes": 5}
    return randomize(timm.create_model(**(sizes | settings)), 0.12)


def images_for(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    patch_embed = getattr(model, "patch_embed", None)
    sides = getattr(patch_embed, "img_size", None) or SIZE
    return torch.randn(3, 3, *sides, generator=generator)


class Kernel(TorchFunctionMode):
    """Records the weights that torch's fused attention uses, under a mask, from its arguments."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.weights: list[Tensor] = []
        self.mask = None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            query, key = args[:2]
            scores = torch.einsum("bhnd,bhmd->bhnm", query.double(), key.double())
            scores = scores / query.shape[-1] ** 0.5
            mask = kwargs["attn_mask"]
            if self.mask is not None and query.shape == key.shape:  # else this is attention pooling
                mask = self.mask if mask is None else mask + self.mask
                kwargs = {**kwargs, "attn_mask": mask}
            self.weights.append((scores if mask is None else scores + mask).softmax(-1).float())
        return func(*args, **(kwargs or {}))


def weights_of(model: Any, images: Tensor) -> list[Tensor]:
    """What timm's own forward computes in each block, differences of two softmaxes too."""
    with Kernel() as kernel:
        model(images)
    blocks = model.blocks
    if not hasattr(blocks[0].attn, "lambda_init"):
        return kernel.weights[: len(blocks)]  # then comes attention pooling
    pairs = zip(kernel.weights[::2], kernel.weights[1::2], strict=True)
    return [subtract(block.attn, *pair) for block, pair in zip(blocks, pairs, strict=True)]


def subtract(attn: Any, signal: Tensor, noise: Tensor) -> Tensor:
    """The difference of the heads' two softmaxes (arXiv 2410.05258, eq. 1 and 2)."""
    if attn.dual_lambda:
        rising, falling = attn.lambda_a, attn.lambda_b
    else:
        rising, falling = attn.lambda_q1 @ attn.lambda_k1, attn.lambda_q2 @ attn.lambda_k2
    return signal - (rising.exp() - falling.exp() + attn.lambda_init) * noise


@with_models
@torch.no_grad()
def test_weights_logits_and_masks_are_timms(model):
    timms = build(model)
    images, reader = images_for(timms), require_attention(timms)
    logits, weights, tokens = reader.forward_intermediates(images)
    torch.testing.assert_close(logits, timms(images), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        timms.norm(tokens[-1]), timms.forward_features(images), rtol=1e-5, atol=1e-5
    )
    rows, columns = reader.patch_embed.grid(*images.shape[-2:])
    assert (rows, columns) == (4, 6)
    for found, expected in zip(weights, weights_of(timms, images), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert found.shape[-1] == reader.num_prefix_tokens + rows * columns
        assert found.std() > 0.005  # not uniform, so the comparison means something
    torch.manual_seed(0)
    mask = (torch.rand(found.shape[-2:]) < 0.5) | torch.eye(found.shape[-1], dtype=torch.bool)
    logits, masked, _ = reader.forward_intermediates(images, mask.expand(3, -1, -1))
    with Kernel(mask):
        torch.testing.assert_close(logits, timms(images), rtol=1e-5, atol=1e-5)
    assert not torch.stack(masked)[..., ~mask].any()
    for block in timms.blocks:
        block.attn.fused_attn = False
    assert all(map(torch.equal, reader.forward_intermediates(images)[1], weights))


@with_models
@torch.no_grad()
def test_heads_are_muted_and_patches_left_out(model):
    timms = build(model)
    images, interventions = images_for(timms), Interventions(timms)
    layers, heads = gates_of(timms).shape
    gates, keep = torch.ones(layers, heads), torch.ones(1, 24)
    gates[1, 0], keep[:, 5:9] = 0, 0
    muted, *_ = interventions(images, gates, torch.ones(1, 24))
    proj = timms.blocks[1].attn.proj
    width = proj.in_features // heads
    hook = proj.register_forward_pre_hook(lambda _, x: F.pad(x[0][..., width:], (width, 0)))
    torch.testing.assert_close(muted, timms(images), rtol=1e-5, atol=1e-5)
    hook.remove()
    assert not torch.allclose(muted, timms(images), atol=1e-3)
    _, weights, *_ = interventions(images, torch.ones(layers, heads), keep)
    left_out = slice(-24 + 5, -24 + 9)
    assert not weights[..., left_out].any() and weights[..., -1].all()


@with_models
def test_every_kind_of_map_is_finite_and_not_constant(model):
    timms = build(model)
    images = images_for(timms)
    logits, maps = attention_maps(timms, images, list(MAP_KINDS))
    torch.testing.assert_close(logits, timms(images).detach(), rtol=1e-4, atol=1e-4)
    for kind, found in maps.items():
        assert found.shape == (3, *(images.shape[-2:] if kind == "lrp_pixels" else (4, 6)))
        assert found.isfinite().all() and found.std() > 1e-3


def test_the_table_in_the_docs_is_that_of_the_families():
    lines = ["| models | timm class | attention |", "|---|---|---|"]
    for names, members in FAMILIES.items():
        models = [build(member) for member in members]
        ((cls, attention),) = {(type(m).__name__, type(m.blocks[0].attn).__name__) for m in models}
        lines.append(f"| {names} | `{cls}` | `{attention}` |")
    text = (Path(__file__).parents[2] / "docs/timm.md").read_text()
    assert "\n".join(lines) in text


@pytest.mark.parametrize(
    ("name", "settings", "unread"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 224}, "SwinTransformer"),
        ("vit_small_patch16_18x2_224", {"depth": 1}, "ParallelThingsBlock"),
        ("vit_relpos_small_patch16_224", {"depth": 1}, "VisionTransformerRelPos"),
        ("vit_tiny_patch16_224", PADDED, "PatchEmbed with dynamic_img_pad"),
    ],
)
def test_other_classes_are_refused_by_name(name, settings, unread):
    with torch.device("meta"):
        model = timm.create_model(name, **settings)
    assert attention_model(model) is None
    with pytest.raises(ValueError, match=f"not available for {name}: .* unlike .*{unread}"):
        require_attention(model)
