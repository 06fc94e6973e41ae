"""Architectures of timm's models and of state dicts with timm's names, as fields of `ModelConfig`.

Nothing is looked up by a model's name: the settings are read from its modules and shapes, and a
part that our VisionTransformer lacks is refused by name.
"""

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from vit.model.config import ModelConfig
from vit.model.encoder import ACTIVATIONS

UNKNOWN = ("num_heads", "norm_eps", "act_layer")  # which a state dict does not tell
LAYER_SCALE = 1e-5  # stands for initial values that the weights replace
# What our VisionTransformer lacks, by a part of the names of parameters or classes.
MISSING_PARTS = {
    "rel_pos": "relative positions",
    "relpos": "relative positions",
    "relative_position": "relative positions",
    "rope": "rotary positions",
    "rotary": "rotary positions",
    "attn_pool": "attention pooling",
    "attentionpool": "attention pooling",
    "dist_token": "a distillation token",
    "distilled": "a distillation token",
    "swiglu": "a gated MLP (SwiGLU)",
    "mlp.fc1_g": "a gated MLP (SwiGLU)",
    "mlp.w12": "a gated MLP (SwiGLU)",
    "glumlp": "a gated MLP (SwiGLU)",
    "parallel": "attention and MLP in parallel",
    ".in_proj": "attention and MLP in parallel",
    ".attns.": "attention and MLP in parallel",
    "postblock": "layer norm after attention and MLP",
    "diff": "differential attention",
    "attn.lambda_": "differential attention",
    "q_bias": "separate biases of queries and values",
    "q_proj": "separate projections of queries and keys",
    "rmsnorm": "RMS norm",
    "hybridembed": "a convolutional backbone",
    "patch_embed.backbone": "a convolutional backbone",
    "attn.norm": "a norm inside attention",
    "attn.gate": "gated attention",
    "mlp.norm": "a norm inside the MLP",
}


def settings_of_timm(model: nn.Module, name: str) -> dict[str, Any]:
    """Read the architecture of one of timm's models as fields of `ModelConfig`.

    Args:
        model: The model, on any device; only its modules and shapes are read.
        name: For messages.

    Raises:
        ValueError: Our VisionTransformer lacks a part of the model.
    """
    vit: Any = model
    if missing := _missing_parts(model):
        raise ValueError(
            f"model.pretrained: {name} has {', '.join(missing)}, which the VisionTransformer of "
            "this project lacks; choose another, or train the model as timm builds it: add "
            f"--model.name timm:{vit.pretrained_cfg['architecture']}"
        )
    block: Any = vit.blocks[0]
    dim, attention = vit.embed_dim, block.attn
    has_scale = not isinstance(block.ls1, nn.Identity)
    has_fc_norm = not isinstance(vit.fc_norm, nn.Identity)
    return {
        "patch_size": vit.patch_embed.patch_size[0],
        "stem": "linear",
        "embed_dim": dim,
        "depth": len(vit.blocks),
        "num_heads": attention.num_heads,
        "head_dim": _head_dim(dim, attention.num_heads, attention.head_dim),
        "mlp_ratio": _mlp_ratio(block.mlp.fc1.out_features, dim),
        "mlp_conv": False,
        "qkv_bias": attention.qkv.bias is not None,
        "qk_norm": not isinstance(attention.q_norm, nn.Identity),
        "attention": "dot",
        "init_values": block.ls1.init_values if has_scale else None,
        "class_token": vit.has_class_token,
        "reg_tokens": vit.num_reg_tokens,
        "global_pool": vit.global_pool,
        "pos_embed": "none" if vit.pos_embed is None else "learned",
        "no_embed_class": vit.no_embed_class,
        "pre_norm": not isinstance(vit.norm_pre, nn.Identity),
        "fc_norm": has_fc_norm,
        "norm_eps": block.norm1.eps,
        "act_layer": _activation(block.mlp.act),
    }


def _missing_parts(model: nn.Module) -> list[str]:
    """List the parts of a timm model that ours lacks."""
    from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer

    classes = {type(module).__name__ for module in model.modules()}
    found = _known_parts([*classes, *(name for name, _ in model.named_parameters())])
    if getattr(model, "rope", None) is not None:
        found.add("rotary positions")
    if type(model) is not TimmVisionTransformer:
        return sorted(found) or [f"the layers of a {type(model).__name__}"]
    if found:
        return sorted(found)
    vit: Any = model
    return sorted(_missing_around(vit) | {part for b in vit.blocks for part in _missing_inside(b)})


def _known_parts(names: Collection[str]) -> set[str]:
    """List the missing parts that names of classes or parameters tell of."""
    text = "\n".join(names).lower()
    return {part for word, part in MISSING_PARTS.items() if word in text}


def _missing_around(vit: Any) -> set[str]:
    """List what ours lacks of a timm VisionTransformer's stem and head."""
    from timm.layers.patch_embed import PatchEmbed

    stem, head_norms = vit.patch_embed, (vit.norm, vit.fc_norm)
    if type(stem) is not PatchEmbed:
        return {f"a stem of type {type(stem).__name__}"}
    lacking = {
        "patches that are not square": stem.patch_size[0] != stem.patch_size[1],
        "a norm in the stem": not isinstance(stem.norm, nn.Identity),
        f"pooling of type {vit.global_pool!r}": vit.global_pool not in ("token", "avg"),
        "pooling that includes class token and registers": vit.pool_include_prefix,
        "a head without a layer norm": all(isinstance(norm, nn.Identity) for norm in head_norms),
    }
    return {part for part, present in lacking.items() if present}


def _missing_inside(block: Any) -> set[str]:
    """List what ours lacks of a timm VisionTransformer's encoder block."""
    from timm.layers.attention import Attention
    from timm.layers.mlp import Mlp
    from timm.models.vision_transformer import Block

    if type(block) is not Block:
        return {f"blocks of type {type(block).__name__}"}
    attention, mlp = block.attn, block.mlp
    if type(attention) is not Attention:
        return {f"attention of type {type(attention).__name__}"}
    if type(mlp) is not Mlp:
        return {f"an MLP of type {type(mlp).__name__}"}
    lacking = {
        "norms other than layer norm": not isinstance(block.norm1, nn.LayerNorm),
        "a norm inside attention": not isinstance(attention.norm, nn.Identity),
        "gated attention": attention.gate is not None,
        "projections without bias": attention.proj.bias is None,
        "a norm inside the MLP": not isinstance(mlp.norm, nn.Identity),
        f"the activation {type(mlp.act).__name__}": _activation(mlp.act) is None,
    }
    return {part for part, present in lacking.items() if present}


def _activation(module: nn.Module) -> str | None:
    """Name the activation of a timm MLP as in `ACTIVATIONS`; None if it is another one."""
    if any(True for _ in module.parameters()):
        return None
    values = torch.linspace(-3, 3, 13, device="cpu")  # whatever the default device is
    for name, make in ACTIVATIONS.items():
        if torch.allclose(module(values), make()(values), atol=1e-7):
            return name
    return None


def _head_dim(dim: int, num_heads: int, head_dim: int) -> int | None:
    return None if num_heads * head_dim == dim else head_dim


def _mlp_ratio(hidden: int, dim: int) -> float:
    """Return a ratio of which `int(dim * ratio)` is the hidden width."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else math.nextafter(ratio, math.inf)


def settings_of_weights(
    weights: dict[str, Tensor], config: ModelConfig, name: str
) -> tuple[dict[str, Any], tuple[int, int], tuple[str, ...]]:
    """Infer an architecture from the names and shapes of a state dict with timm's names.

    A class token with a norm before the pooling is taken for a model that classifies the class
    token.

    Args:
        weights: The state dict.
        config: Gives what a state dict does not tell, see `UNKNOWN`.
        name: For messages.

    Returns:
        Fields of `ModelConfig`; the grid of the position embeddings; the fields that come from the
        config.

    Raises:
        ValueError: These are not the weights of a Vision Transformer with timm's names, or of one
            that ours cannot represent.
    """
    _refuse_names(weights, name)
    kernel, qkv = weights["patch_embed.proj.weight"], weights["blocks.0.attn.qkv.weight"]
    dim, patch_size = kernel.shape[0], kernel.shape[-1]
    attention_dim = qkv.shape[0] // 3
    qk_norm = weights.get("blocks.0.attn.q_norm.weight")
    num_heads = config.num_heads if qk_norm is None else attention_dim // len(qk_norm)
    if attention_dim % num_heads:
        raise ValueError(
            f"model.num_heads: {num_heads} is not allowed; {name} does not tell the number of "
            f"heads, which must divide its width {attention_dim}"
        )
    reg_token, cls_token = weights.get("reg_token"), weights.get("cls_token")
    num_prefix = (cls_token is not None) + (0 if reg_token is None else reg_token.shape[1])
    if "pos_embed" in weights:
        grid, no_embed_class = _square_grid(weights["pos_embed"].shape[1], num_prefix, name)
    else:
        grid, no_embed_class = (1, 1), False
        if config.pos_embed != "none":
            raise ValueError(
                f"model.pretrained: {name} has no position embeddings; rotary positions are not "
                "supported, but if the model has none, set --model.pos_embed none"
            )
    has_scale, has_fc_norm = "blocks.0.ls1.gamma" in weights, "fc_norm.weight" in weights
    settings = {
        "patch_size": patch_size,
        "stem": "linear",
        "embed_dim": dim,
        "depth": 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks.")),
        "num_heads": num_heads,
        "head_dim": _head_dim(dim, num_heads, attention_dim // num_heads),
        "mlp_ratio": _mlp_ratio(len(weights["blocks.0.mlp.fc1.weight"]), dim),
        "mlp_conv": False,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": qk_norm is not None,
        "attention": "dot",
        "init_values": LAYER_SCALE if has_scale else None,
        "class_token": cls_token is not None,
        "reg_tokens": 0 if reg_token is None else reg_token.shape[1],
        "global_pool": "avg" if has_fc_norm or cls_token is None else "token",
        "pos_embed": "learned" if "pos_embed" in weights else "none",
        "no_embed_class": no_embed_class,
        "pre_norm": "norm_pre.weight" in weights,
        "fc_norm": has_fc_norm,
        "norm_eps": config.norm_eps,
        "act_layer": config.act_layer,
    }
    assumed = tuple(key for key in UNKNOWN if key != "num_heads" or qk_norm is None)
    return settings, grid, assumed


def _refuse_names(weights: dict[str, Tensor], name: str) -> None:
    """Refuse a state dict whose names say that it is not a ViT that ours can represent.

    Raises:
        ValueError: See above; the message names the missing part.
    """
    found = _known_parts(weights)
    if found:
        raise ValueError(
            f"model.pretrained: {name} has {', '.join(sorted(found))}, which the "
            "VisionTransformer of this project lacks; choose another model, or train it as timm "
            "builds it: add --model.name timm:NAME"
        )
    needed = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    if absent := [key for key in needed if key not in weights]:
        raise ValueError(
            f"model.pretrained: {name} is not a Vision Transformer with timm's names: it has no "
            f"{absent[0]}; if it is another model of timm, add --model.name timm:NAME"
        )
    if (dimensions := weights[needed[0]].ndim) != 4:
        raise ValueError(
            f"model.pretrained: {name} has {needed[0]} with {dimensions} dimensions instead of 4; "
            "reshape it to (width, channels, rows, columns of a patch)"
        )


def _square_grid(positions: int, num_prefix: int, name: str) -> tuple[tuple[int, int], bool]:
    """Find the square grid of position embeddings, and whether the prefix tokens have none."""
    for patches in (positions - num_prefix, positions):
        side = math.isqrt(max(patches, 0))
        if side and side * side == patches:
            return (side, side), patches == positions and num_prefix > 0
    raise ValueError(
        f"model.pretrained: {name} has {positions} position embeddings for {num_prefix} prefix "
        "tokens and a grid that is not square, so its sides are not known; pass a folder as timm "
        "saves it, with config.json"
    )
