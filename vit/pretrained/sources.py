"""Pretrained weights from timm's hub, folders, files, and models of this project."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.config import Config
from vit.console import shorten
from vit.hub import HUB, download
from vit.model.config import TIMM, ModelConfig
from vit.model.positions import TEMPERATURE, BiasPositions
from vit.model.timm_model import FROM_DATA, REFUSED
from vit.model_file import bundled_models, is_own_file, load_saved
from vit.pretrained.adapt import Pretrained, fit
from vit.pretrained.architecture import (
    BIAS_TABLE,
    adopt,
    by_our_names,
    settings_of_config,
    settings_of_weights,
    understood,
)
from vit.pretrained.transformers import read_transformers, transformers_folder
from vit.run.folder import MODEL_FILE
from vit.settings import suggest

LOCAL = "local-dir:"  # before a folder, in timm's names
WRAPPERS = r"^((model|net|module|_orig_mod)\.)+"  # prefixes that other training loops add
COMPUTED = ("relative_position_index", ".attn_mask")  # what older versions of timm stored
UNKNOWN = ("num_heads", "norm_eps", "act_layer")  # not in a state dict
# Classes of the modules of timm models that our VisionTransformer can represent.
ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
KNOWN_MODULES = {
    "VisionTransformer", "PatchEmbed", "Conv2d", "Block", "Attention", "Mlp", "Linear", "LayerNorm",
    "LayerScale", "Dropout", "PatchDropout", "DropPath", "Identity", "Sequential", "ModuleList",
    "VisionTransformerRelPos", "RelPosBlock", "RelPosAttention", "Eva", "EvaBlock", "AttentionRope",
    "RotaryEmbeddingCat", "Beit", *ACTIVATIONS,
}  # fmt: skip
# Settings with which timm's RotaryEmbeddingCat is our `RotaryPositions`.
ROPE = {
    "temperature": TEMPERATURE, "grid_indexing": "xy", "grid_offset": 0, "ref_feat_shape": None,
    "rotate_half": False, "aug_active": False,
}  # fmt: skip


def resolve_pretrained(config: Config, stored: Config | None) -> tuple[Config, Pretrained | None]:
    """Find the pretrained weights of a run and take their architecture into its config.

    A run that is resumed takes the architecture from its `stored` config, so that it does not need
    the weights any more.

    Returns:
        The config with the architecture of the weights; and the weights, None if the run starts
        from random weights or is resumed.

    Raises:
        ValueError: The weights cannot be found or read, do not fit the model, or contradict the
            config.
    """
    name = config.model.pretrained
    if name is None:
        return config, None
    run, model = Path(config.out), config.model
    if stored is not None and stored.model.pretrained == name:
        if model.name in ("vit", stored.model.name):  # else `check_run` refuses the config
            model = adopt(model, settings_of_config(stored.model), name)
        return dataclasses.replace(config, model=model), None
    place = Path(name.removeprefix(TIMM).removeprefix(LOCAL))
    if place.exists() and place.resolve().is_relative_to(run.resolve()):  # --overwrite empties it
        raise ValueError(
            f"model.pretrained: the new run in {run} would replace {name}, from which it starts; "
            "train in another folder with --out"
        )
    source = find_source(name, model)
    model = adopt(model, source.settings, name)
    return dataclasses.replace(config, model=model), fit(source, model, config.data.spec)


def find_source(name: str, model: ModelConfig) -> Pretrained:
    """Read pretrained weights, named as in `ModelConfig.pretrained`.

    `model.name` says whether they are for our VisionTransformer or a timm model; its other fields
    complete a bare state dict.

    Raises:
        ValueError: There are no such weights, they cannot be read or fetched, or our
            VisionTransformer lacks a part of their model.
    """
    if name.startswith(HUB):
        return dataclasses.replace(find_source(str(download(name)), model), name=name)
    path = Path(name)
    if name.startswith(TIMM):
        return _from_timm(name, name.removeprefix(TIMM), model)
    if folder := transformers_folder(path):
        return read_transformers(folder)[0]
    if (path / "config.json").is_file() and not is_own_file(path / MODEL_FILE):
        return _from_timm(name, f"{LOCAL}{name}", model)
    if path.is_file() and not is_own_file(path):
        return _from_file(name, model)
    if path.exists() or name in bundled_models():
        return _from_own(name, path)
    raise ValueError(
        f"model.pretrained: {name} does not exist; it must be timm:NAME, hf-hub:OWNER/NAME, a "
        ".safetensors or .pth file, a folder as timm or transformers saves it, a run folder, or "
        f"one of {', '.join(bundled_models())}{suggest(name, bundled_models())}"
    )


def _from_own(name: str, path: Path) -> Pretrained:
    """Read a run folder, a model file, a checkpoint or an included model."""
    try:
        saved = load_saved(path, "cpu", "float32")
    except ValueError as error:
        raise ValueError(f"model.pretrained: {error}") from None
    preprocess = saved.preprocess
    return Pretrained(
        saved.with_progress(name),
        settings_of_config(saved.config.model),
        saved.model.state_dict(),
        (preprocess.channels, *preprocess.image_size),
        preprocess.mean,
        preprocess.std,
        saved.classes,
        config=saved.config,
        fingerprint=saved.fingerprint,
    )


def _from_timm(name: str, timm_name: str, model: ModelConfig) -> Pretrained:
    """Let timm fetch a model from the hub, or read it from a folder."""
    settings: dict[str, Any] = {}
    if model.name == "vit":
        with torch.device("meta"):  # the architecture is checked before anything large is fetched
            vit = _create(name, timm_name, pretrained=False)
            settings = settings_of_timm(vit, name)
    loaded = _create(name, timm_name, pretrained=True)
    about, classes = loaded.pretrained_cfg, loaded.pretrained_cfg.get("label_names")
    classes = classes.values() if isinstance(classes, dict) else classes
    weights, input_size = loaded.state_dict(), about["input_size"]
    if model.name == "vit":
        weights = weights_of_timm(loaded)
        input_size = (loaded.patch_embed.proj.in_channels, *loaded.patch_embed.img_size)
    else:
        unused, arguments = (*FROM_DATA, *REFUSED), loaded.pretrained_model_args
        settings = {"timm_args": {k: v for k, v in arguments.items() if k not in unused}}
    with understood(name):
        mean, std = tuple(about["mean"]), tuple(about["std"])
    classes = None if classes is None else tuple(classes)
    return Pretrained(name, settings, weights, input_size, mean, std, classes)


def _create(name: str, timm_name: str, pretrained: bool) -> Any:
    """Build a timm model, with its weights from the hub or from a folder."""
    import timm

    try:
        return timm.create_model(timm_name, pretrained=pretrained)
    except Exception as error:  # the network, the hub, the file system: each raises its own kinds
        raise ValueError(
            f"model.pretrained: timm could not load {name} ({type(error).__name__}: "
            f"{shorten(error, 120)}); timm.list_pretrained() has all names; without a network, "
            "download config.json and model.safetensors from the Hugging Face Hub elsewhere and "
            "pass their folder"
        ) from None


def settings_of_timm(vit: Any, name: str) -> dict[str, Any]:
    """Read the architecture of a timm model; ValueError if our VisionTransformer lacks a part."""
    kinds = {type(part).__name__ for key, part in vit.named_modules() if "rel_pos" not in key}
    missing = sorted(kinds - KNOWN_MODULES)
    rope = getattr(vit, "rope", None)
    if rope and not missing:
        own = {key: getattr(rope, key) for key in ROPE}
        missing = [f"rope.{key}={own[key]}" for key in ROPE if own[key] != ROPE[key]]
    if not missing and vit.global_pool not in ("token", "avg"):
        missing.append(f"global_pool={vit.global_pool}")
    if not missing and getattr(vit, "pool_include_prefix", False):
        missing.append("pool_include_prefix=True")
    if missing:
        raise ValueError(
            f"model.pretrained: {name} has {shorten(', '.join(missing), 200)}, which the "
            "VisionTransformer of this project lacks; choose another, or train the model as timm "
            f"builds it: add --model.name timm:{vit.pretrained_cfg['architecture']}"
        )
    block = vit.blocks[0]
    settings = settings_of_weights(weights_of_timm(vit), block.attn.num_heads, name)
    return {
        **settings,
        "rel_pos": "rope" if rope else settings["rel_pos"],
        "global_pool": vit.global_pool,
        "no_embed_class": getattr(vit, "no_embed_class", False),
        "norm_eps": block.norm1.eps,
        "act_layer": ACTIVATIONS[type(block.mlp.act).__name__],
    }


def weights_of_timm(vit: Any) -> dict[str, Tensor]:
    """Return the weights of a timm model that our VisionTransformer can represent, by our names.

    Whatever computes position biases, for a block or for all, becomes the table of each block.
    """
    state = {key: value for key, value in vit.state_dict().items() if "rel_pos" not in key}
    weights = by_our_names(state)
    for layer, block in enumerate(vit.blocks):
        shared: Any = getattr(vit, "rel_pos_bias", None)  # of Beit
        computed: Any = getattr(vit, "shared_rel_pos", None) or getattr(block.attn, "rel_pos", None)
        if computed is not None or shared is not None:
            # (H, N, N); there may be dropout in it
            bias = computed.eval().get_bias()[0] if shared is None else shared()
            grid, prefix = vit.patch_embed.grid_size, vit.num_prefix_tokens
            positions = BiasPositions(len(bias), 0, grid, prefix).to(bias)
            weights[BIAS_TABLE.format(layer)] = positions.tabulate(bias)
    return weights


def _from_file(name: str, model: ModelConfig) -> Pretrained:
    """Read a state dict with timm's names; nothing in the file is ever executed."""
    from timm.models import load_state_dict  # unwraps {"state_dict": ...} and strips "module."

    try:
        state = load_state_dict(name, weights_only=True)
    except Exception:  # foreign and damaged files raise all kinds of errors
        raise ValueError(
            f"model.pretrained: {name} is damaged, or not a .safetensors or .pth file of tensors "
            "and plain values (nothing else is read, because it could execute code); save the "
            "state dict by itself with torch.save(model.state_dict(), FILE)"
        ) from None
    stored = state.get("model_state_dict") or state
    named = {key: value for key, value in stored.items() if isinstance(value, Tensor)}
    weights = {re.sub(WRAPPERS, "", key): value for key, value in named.items()}
    if len(weights) < len(named):
        raise ValueError(
            f"model.pretrained: {name} contains several models, whose names differ by a prefix; "
            "save the state dict of one by itself"
        )
    weights = {key: value for key, value in weights.items() if not key.endswith(COMPUTED)}
    weights.pop("mask_token", None)  # of pretraining, as in Meta's files of DINOv2
    if model.name != "vit":
        return Pretrained(name, {"timm_args": {}}, weights)
    with understood(name):
        return complete(name, weights, model)


def complete(name: str, weights: dict[str, Tensor], model: ModelConfig) -> Pretrained:
    """Complete the weights of a Vision Transformer with what a config says about it.

    The images must be square. The notes name the fields in `UNKNOWN` that are the config's.
    """
    weights = by_our_names(weights)
    if "dist_token" in weights:
        raise ValueError(
            f"model.pretrained: {name} has a distillation token; train its model as timm builds "
            "it: add --model.name timm:NAME, such as timm:deit_tiny_distilled_patch16_224"
        )
    settings = settings_of_weights(weights, model.num_heads, name)
    assumed = UNKNOWN[1:] if settings["qk_norm"] else UNKNOWN
    if model.rel_pos == "rope" and settings["rel_pos"] == "none":
        settings["rel_pos"], assumed = "rope", (*assumed, "rel_pos")
    if settings["class_token"] and not settings["fc_norm"]:
        settings["global_pool"], assumed = model.global_pool, (*assumed, "global_pool")
    grid, prefix = 1, settings["class_token"] + settings["reg_tokens"]
    counted = prefix  # prefix tokens with positions
    if "pos_embed" in weights:
        positions = weights["pos_embed"].shape[1]
        for counted in (prefix, 0):
            grid = math.isqrt(max(positions - counted, 0))
            if grid and grid**2 == positions - counted:
                break
        else:
            raise ValueError(
                f"model.pretrained: {name} has {positions} position embeddings for {prefix} prefix "
                "tokens and a grid that is not square, so its sides are not known; pass a folder "
                "as timm saves it, with config.json"
            )
    elif settings["rel_pos"] == "bias":
        offsets = len(weights[BIAS_TABLE.format(0)]) - 3 * (prefix > 0)  # (2 grid - 1)²
        grid = (math.isqrt(max(offsets, 1)) + 1) // 2
    elif model.pos_embed != "none" and settings["rel_pos"] == "none":
        raise ValueError(
            f"model.pretrained: {name} has no position embeddings; if its positions are rotary as "
            "in timm's vit_*_rope_224, set --model.rel_pos rope; if it has none, --model.pos_embed "
            "none; if it computes biases (vit_relpos_*), pass a folder as timm saves it"
        )
    settings["no_embed_class"] = counted != prefix
    settings |= {"norm_eps": model.norm_eps, "act_layer": model.act_layer}
    note = "not in the file, from the config: " + ", ".join(f"{k}={settings[k]}" for k in assumed)
    if "num_heads" in assumed:
        width = settings["embed_dim"] / settings["num_heads"]
        note += f"; heads are {width:g} wide, in most models 64"
    channels, side = weights["patch_embed.proj.weight"].shape[1], grid * settings["patch_size"]
    return Pretrained(name, settings, weights, (channels, side, side), notes=(note,))
