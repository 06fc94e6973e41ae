"""The architecture of weights with timm's names, as fields of `ModelConfig`.

Nothing is looked up by a model's name: the settings are read from the names and shapes of tensors
and, where there is a timm model, from its modules. A part that our VisionTransformer lacks is
refused by name.
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vit.model.config import ModelConfig
from vit.model.encoder import ACTIVATIONS
from vit.model.vit import VisionTransformer
from vit.settings import shorten

# Settings of a run, whatever its weights come from; all others describe the architecture.
OF_THE_RUN = ("zero_init", "drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate")
ARCHITECTURE = tuple(
    name
    for name, parameter in inspect.signature(VisionTransformer).parameters.items()
    if parameter.default is not parameter.empty and name not in OF_THE_RUN
)
UNKNOWN = ("num_heads", "norm_eps", "act_layer")  # which a state dict does not tell
LAYER_SCALE = 1e-5  # stands for initial values that the weights replace
HEAD = ("head.weight", "head.bias")
COUNTER = "num_batches_tracked"  # of batch norm; old files lack it
# Classes of the modules of timm models that our VisionTransformer can represent.
KNOWN_MODULES = {
    "VisionTransformer", "PatchEmbed", "Conv2d", "Block", "Attention", "Mlp", "Linear", "LayerNorm",
    "LayerScale", "GELU", "GELUTanh", "QuickGELU", "Dropout", "PatchDropout", "DropPath",
    "Identity", "Sequential", "ModuleList",
}  # fmt: skip


def settings_of_config(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that describe an architecture: ours, or a timm model and its arguments."""
    keys = ARCHITECTURE if model.name == "vit" else ("name", "timm_args")
    return {key: getattr(model, key) for key in keys}


def settings_of_timm(model: nn.Module, name: str) -> dict[str, Any]:
    """Read the architecture of a timm model.

    Args:
        model: The model, on any device; only its modules and shapes are read.
        name: For messages.

    Returns:
        Fields of `ModelConfig`.

    Raises:
        ValueError: Our VisionTransformer lacks a part of the model.
    """
    vit: Any = model
    missing = sorted({type(module).__name__ for module in model.modules()} - KNOWN_MODULES)
    if not missing:
        rows, columns = vit.patch_embed.patch_size
        lacking = {
            "patches that are not square": rows != columns,
            f"pooling of type {vit.global_pool!r}": vit.global_pool not in ("token", "avg"),
            "pooling that includes class token and registers": vit.pool_include_prefix,
        }
        missing = [part for part, present in lacking.items() if present]
    if missing:
        raise ValueError(
            f"model.pretrained: {name} has {shorten(', '.join(missing), 200)}, which the "
            "VisionTransformer of this project lacks; choose another, or train the model as timm "
            f"builds it: add --model.name timm:{vit.pretrained_cfg['architecture']}"
        )
    block = vit.blocks[0]
    return {
        **settings_of_weights(model.state_dict(), block.attn.num_heads, name),
        "global_pool": vit.global_pool,
        "no_embed_class": vit.no_embed_class,
        "norm_eps": block.norm1.eps,
        "act_layer": _activation(block.mlp.act),
    }


def _activation(module: nn.Module) -> str:
    """Name the activation of a timm MLP as in `ACTIVATIONS`."""
    values = torch.linspace(-3, 3, 13, device="cpu")  # whatever the default device is
    expected = module(values)
    return next(
        name for name, make in ACTIVATIONS.items() if torch.allclose(make()(values), expected)
    )


def settings_of_weights(weights: Mapping[str, Tensor], num_heads: int, name: str) -> dict[str, Any]:
    """Infer an architecture from the names and shapes of a state dict with timm's names.

    A class token with a norm before the pooling is taken for a model that classifies the class
    token.

    Args:
        weights: The state dict.
        num_heads: Attention heads, unless the norms of queries and keys tell.
        name: For messages.

    Returns:
        Fields of `ModelConfig` but for those of `UNKNOWN` that it does not tell, and
        `no_embed_class`.

    Raises:
        ValueError: These are not the weights of a Vision Transformer with timm's names.
    """
    needed = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight")
    if absent := [key for key in needed if key not in weights]:
        raise ValueError(
            f"model.pretrained: {name} is not a Vision Transformer with timm's names: it has no "
            f"{absent[0]}; if it is another timm model, add --model.name timm:NAME"
        )
    kernel, qkv, hidden = (weights[key] for key in needed)
    if kernel.ndim != 4:
        raise ValueError(
            f"model.pretrained: {name} has {needed[0]} with {kernel.ndim} dimensions instead of 4; "
            "reshape it to (width, channels, rows, columns of a patch)"
        )
    dim, attention_dim = len(kernel), len(qkv) // 3
    qk_norm = weights.get("blocks.0.attn.q_norm.weight")
    num_heads = num_heads if qk_norm is None else attention_dim // len(qk_norm)
    if attention_dim % num_heads:
        raise ValueError(
            f"model.num_heads: {num_heads} is not allowed; {name} does not tell the number of "
            f"heads, which must divide its width {attention_dim}"
        )
    registers, class_token = weights.get("reg_token"), "cls_token" in weights
    mlp_ratio = len(hidden) / dim
    if int(dim * mlp_ratio) != len(hidden):  # rounded down
        mlp_ratio = math.nextafter(mlp_ratio, math.inf)
    return {
        "patch_size": kernel.shape[-1],
        "stem": "linear",
        "embed_dim": dim,
        "depth": 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks.")),
        "num_heads": num_heads,
        "head_dim": None if attention_dim == dim else attention_dim // num_heads,
        "mlp_ratio": mlp_ratio,
        "mlp_conv": False,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": qk_norm is not None,
        "attention": "dot",
        "init_values": LAYER_SCALE if "blocks.0.ls1.gamma" in weights else None,
        "class_token": class_token,
        "reg_tokens": 0 if registers is None else registers.shape[1],
        "global_pool": "token" if class_token and "fc_norm.weight" not in weights else "avg",
        "pos_embed": "learned" if "pos_embed" in weights else "none",
        "pre_norm": "norm_pre.weight" in weights,
        "fc_norm": "fc_norm.weight" in weights,
    }


def settings_of_file(
    weights: Mapping[str, Tensor], config: ModelConfig, name: str
) -> tuple[dict[str, Any], tuple[int, int, int], tuple[str, ...]]:
    """Complete the architecture of a bare state dict.

    Args:
        weights: The state dict.
        config: Gives what a state dict does not tell, see `UNKNOWN`.
        name: For messages.

    Returns:
        Fields of `ModelConfig`; channels, height and width of the images; and the fields that come
        from the config.

    Raises:
        ValueError: As for `settings_of_weights`, or the grid of the positions is not square.
    """
    settings = settings_of_weights(weights, config.num_heads, name)
    grid, prefix_has_positions = 1, True
    if "pos_embed" in weights:
        positions, prefix = weights["pos_embed"].shape[1], num_prefix_tokens(settings)
        grid = math.isqrt(max(positions - prefix, 0))
        prefix_has_positions = grid > 0 and grid**2 == positions - prefix
        grid = grid if prefix_has_positions else math.isqrt(positions)
        if not prefix_has_positions and grid**2 != positions:
            raise ValueError(
                f"model.pretrained: {name} has {positions} position embeddings for {prefix} prefix "
                "tokens and a grid that is not square, so its sides are not known; pass a folder "
                "as timm saves it, with config.json"
            )
    elif config.pos_embed != "none":
        raise ValueError(
            f"model.pretrained: {name} has no position embeddings; rotary positions are not "
            "supported, but if the model has none, set --model.pos_embed none"
        )
    settings["no_embed_class"] = not prefix_has_positions
    settings |= {"norm_eps": config.norm_eps, "act_layer": config.act_layer}
    side = grid * settings["patch_size"]
    assumed = UNKNOWN[1:] if settings["qk_norm"] else UNKNOWN
    return settings, (weights["patch_embed.proj.weight"].shape[1], side, side), assumed


def num_prefix_tokens(settings: Mapping[str, Any]) -> int:
    """Return the number of tokens before the patches."""
    return int(settings["class_token"] + settings["reg_tokens"])


def check_vit(
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    input_size: tuple[int, int, int],
    name: str,
) -> None:
    """Check that weights have the names and shapes of our VisionTransformer with these settings.

    Args:
        weights: By name, on any device.
        settings: Fields of `ModelConfig`.
        input_size: Channels, height and width of its images.
        name: For messages.

    Raises:
        ValueError: They do not; the message names the first difference.
    """
    with torch.device("meta"):
        model = VisionTransformer(
            in_chans=input_size[0], img_size=input_size[1:], num_classes=1, **settings
        )
    expected = model.state_dict()
    advice = "choose other weights, or train them in timm's model: add --model.name timm:NAME"
    check_names(weights, expected, HEAD, f"{name} does not fit our VisionTransformer", advice)
    for key, value in weights.items():
        if key not in HEAD and value.shape != expected[key].shape:
            raise ValueError(
                f"model.pretrained: {name} does not fit our VisionTransformer: {key} is "
                f"{list(value.shape)}, not {list(expected[key].shape)}; {advice}"
            )


def check_names(
    weights: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    head: Collection[str],
    problem: str,
    advice: str,
) -> None:
    """Check that weights have the names of a model's tensors, but for those of the head.

    Raises:
        ValueError: They do not; the message names the first of each kind.
    """
    unknown = [f"{key} has no place in it" for key in weights if key not in {*expected, *head}]
    missing = [
        f"{key} is missing"
        for key in expected
        if key not in {*weights, *head} and not key.endswith(COUNTER)
    ]
    if differences := [*unknown[:1], *missing[:1]]:
        more = len(unknown) + len(missing) - len(differences)
        raise ValueError(
            f"model.pretrained: {problem}: {', and '.join(differences)}"
            + (f" ({more} more)" if more else "")
            + f"; {advice}"
        )


def adopt(config: ModelConfig, settings: Mapping[str, Any], name: str) -> ModelConfig:
    """Take the architecture of pretrained weights into a config, with the timm model they need.

    Args:
        config: The settings of the user. Those that differ from the defaults must agree with the
            pretrained weights, except for patch_size, to which the patch embedding is resampled,
            and the arguments of a timm model, which replace those of the weights.
        settings: The architecture of the weights.
        name: For messages.

    Raises:
        ValueError: A setting contradicts the weights.
    """
    if config.name == "vit" and "name" in settings:
        config = dataclasses.replace(config, name=settings["name"])
    if config.name != "vit":
        arguments = {**(settings["timm_args"] or {}), **(config.timm_args or {})}
        return dataclasses.replace(config, timm_args=arguments or None)
    defaults = ModelConfig()
    for key, value in settings.items():
        ours = getattr(config, key)
        if key == "patch_size":
            if ours not in (None, value) and settings["stem"] == "conv":
                raise ValueError(
                    f"model.patch_size: {ours} is not allowed; {name} has a convolutional stem for "
                    f"patches of {value}, which cannot be resampled; leave the key out"
                )
        elif ours != getattr(defaults, key) and not _agree(key, ours, value):
            raise ValueError(
                f"model.{key}: {json.dumps(ours)} is not allowed; {name} has {json.dumps(value)}; "
                "leave the key out to use that, or train without model.pretrained"
            )
    patch_size = config.patch_size or settings["patch_size"]
    return dataclasses.replace(config, **{**settings, "patch_size": patch_size})


def _agree(key: str, ours: Any, value: Any) -> bool:
    if key == "init_values":  # the weights replace the value
        return (ours is None) == (value is None)
    if isinstance(ours, float) and isinstance(value, float):
        return math.isclose(ours, value, rel_tol=1e-3)
    return bool(ours == value)
