"""The architecture of weights with timm's names, as fields of `ModelConfig`.

It is read from the names and shapes of tensors, and becomes that of a run's model.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.console import is_out_of_memory
from vit.model.config import NOT_OF_VIT, ModelConfig
from vit.model.timm_model import NORM_EPS

# Settings of a run; all others describe the architecture.
OF_THE_RUN = ("zero_init", "drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate")
ARCHITECTURE = tuple(
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.name not in NOT_OF_VIT + OF_THE_RUN
)
# Fields that are arguments of timm's Eva and Beit, and more of its VisionTransformer.
OF_TIMM = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", NORM_EPS, "global_pool")
OF_TIMMS_VIT = (
    *OF_TIMM, "init_values", "qkv_bias", "class_token", "reg_tokens", "no_embed_class", "fc_norm",
    "act_layer",
)  # fmt: skip
LAYER_SCALE = 1e-5  # placeholder for initial values that the weights replace
NOT_IN_TIMM = {"stem": "linear", "stem_width": None, "mlp_conv": False, "attention": "dot"}
# The table of `BiasPositions` in a block, by its number; timm's `RelPosBias` has the same.
TABLE = ".attn.rel_pos.relative_position_bias_table"
BEITS_TABLE = ".attn.relative_position_bias_table"
BIAS_TABLE = f"blocks.{{}}{TABLE}"


@contextlib.contextmanager
def understood(name: str) -> Iterator[None]:
    """Report any error in reading weights in one line with their name."""
    try:
        yield
    except OSError:  # it names the file
        raise
    except Exception as error:  # of many kinds, some of them our own messages
        if str(error).startswith("model.") or is_out_of_memory(error):
            raise
        raise ValueError(f"model.pretrained: {name} is incomplete or damaged: {error!r}") from None


def by_our_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights for which timm's Eva and Beit have names of their own."""
    ours = {re.sub(r"\.gamma_([12])$", r".ls\1.gamma", key): w for key, w in weights.items()}
    ours = {key.replace(BEITS_TABLE, TABLE): weight for key, weight in ours.items()}
    for attn in [key.removesuffix("v_bias") for key in ours if key.endswith(".attn.v_bias")]:
        value = ours.pop(f"{attn}v_bias")
        query = ours.pop(f"{attn}q_bias", torch.zeros_like(value))
        ours[f"{attn}qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
    return ours


def by_their_names(weights: Mapping[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    """Rename weights as a timm model calls them, by its names: the inverse of `by_our_names`.

    Beit has no bias of keys, which would add the same to all scores of a query.
    """
    theirs: dict[str, Tensor] = {}
    for key, weight in weights.items():
        name = re.sub(r"\.ls([12])\.gamma$", r".gamma_\1", key).replace(TABLE, BEITS_TABLE)
        attn = key.removesuffix("qkv.bias")
        if f"{attn}q_bias" in names:
            query, _, value = weight.chunk(3)
            theirs |= {f"{attn}q_bias": query.clone(), f"{attn}v_bias": value.clone()}
        else:
            theirs[name if name in names else key] = weight
    return theirs


def settings_of_config(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that describe an architecture: ours, or a timm model and its arguments."""
    keys = ARCHITECTURE if model.name == "vit" else ("name", "timm_args")
    return {key: getattr(model, key) for key in keys}


def settings_of_weights(weights: Mapping[str, Tensor], num_heads: int, name: str) -> dict[str, Any]:
    """Infer an architecture from the names and shapes of a state dict with timm's names.

    A model with a class token and a norm before pooling is taken to classify the class token. The
    number of heads is used unless the norms of queries and keys determine it. Rotary positions have
    no weights, so they cannot be detected.

    Returns:
        Fields of `ModelConfig` without no_embed_class, norm_eps and act_layer.

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
        **NOT_IN_TIMM,
        "embed_dim": dim,
        "depth": 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks.")),
        "num_heads": num_heads,
        "head_dim": None if attention_dim == dim else attention_dim // num_heads,
        "mlp_ratio": mlp_ratio,
        "qkv_bias": "blocks.0.attn.qkv.bias" in weights,
        "qk_norm": qk_norm is not None,
        "init_values": LAYER_SCALE if "blocks.0.ls1.gamma" in weights else None,
        "class_token": class_token,
        "reg_tokens": 0 if registers is None else registers.shape[1],
        "global_pool": "token" if class_token and "fc_norm.weight" not in weights else "avg",
        "pos_embed": "learned" if "pos_embed" in weights else "none",
        "rel_pos": "bias" if BIAS_TABLE.format(0) in weights else "none",
        "pre_norm": "norm_pre.weight" in weights,
        "fc_norm": "fc_norm.weight" in weights,
    }


def adopt(config: ModelConfig, settings: Mapping[str, Any], name: str) -> ModelConfig:
    """Take the architecture of pretrained weights, with the timm model they need, into a config.

    Settings that differ from the defaults must agree with the weights, except for patch_size, to
    which a linear patch embedding is resampled, and a timm model's arguments, which override them.

    Raises:
        ValueError: A setting contradicts the weights.
    """
    if config.name == "vit" and "name" in settings:
        config = dataclasses.replace(config, name=settings["name"])
    if config.name != "vit":
        ours = {key: settings[key] for key in OF_TIMMS_VIT if key in settings}
        arguments = {**(settings.get("timm_args", ours) or {}), **(config.timm_args or {})}
        return dataclasses.replace(config, timm_args=arguments or None)
    defaults = ModelConfig(pretrained=name)
    for key, value in settings.items():
        ours = getattr(config, key)
        agree = ours in (value, getattr(defaults, key))
        if key == "attention":  # its file may be in another folder now
            agree |= Path(ours).name == Path(value).name
        if key == "patch_size" and settings["stem"] == "linear":
            agree = True
        elif key == "init_values" and ours is not None:  # the weights replace the value
            agree = value is not None
        if not agree:
            raise ValueError(
                f"model.{key}: {json.dumps(ours)} is not allowed; {name} has {json.dumps(value)}; "
                "leave the key out to use that, or train without model.pretrained"
            )
    kept = {"patch_size": config.patch_size or settings["patch_size"]}
    if config.attention != defaults.attention:
        kept["attention"] = config.attention
    return dataclasses.replace(config, **{**settings, **kept})
