"""Reading pretrained weights from timm's hub, folders, files, and models of this project."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.console import shorten
from vit.hub import HUB, download
from vit.model.config import TIMM, ModelConfig
from vit.model.timm_model import FROM_DATA, REFUSED
from vit.model_file import bundled_models, is_own_file, load_saved
from vit.pretrained.adapt import Pretrained
from vit.pretrained.architecture import settings_of_config, settings_of_file, settings_of_timm
from vit.pretrained.transformers import read_transformers, transformers_folder
from vit.run.folder import MODEL_FILE
from vit.settings import suggest

LOCAL = "local-dir:"  # before a folder, in timm's names
WRAPPERS = r"^((model|net|module|_orig_mod)\.)+"  # prefixes that other training loops add


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
        return _from_own(name)
    raise ValueError(
        f"model.pretrained: {name} does not exist; it must be timm:NAME, hf-hub:OWNER/NAME, a "
        ".safetensors or .pth file, a folder as timm or transformers saves it, a run folder, or "
        f"one of {', '.join(bundled_models())}{suggest(name, bundled_models())}"
    )


def _from_own(name: str) -> Pretrained:
    """Read a run folder, a model file, a checkpoint or a bundled model."""
    try:
        saved = load_saved(name, "cpu", "float32")
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


def _from_timm(name: str, timm_name: str, config: ModelConfig) -> Pretrained:
    """Let timm fetch a model from the hub, or read it from a folder."""
    if config.name == "vit":
        with torch.device("meta"):  # the architecture is checked before anything large is fetched
            settings_of_timm(_create(name, timm_name, pretrained=False), name)
    model = _create(name, timm_name, pretrained=True)
    about, classes = model.pretrained_cfg, model.pretrained_cfg.get("label_names")
    if config.name == "vit":
        settings, sides = settings_of_timm(model, name), model.patch_embed.img_size
        input_size = (model.patch_embed.proj.in_channels, *sides)
    else:
        unused, input_size = (*FROM_DATA, *REFUSED), about["input_size"]
        arguments = model.pretrained_model_args.items()
        settings = {"timm_args": {k: v for k, v in arguments if k not in unused}}
    return Pretrained(
        name,
        settings,
        model.state_dict(),
        input_size,
        mean=tuple(about["mean"]),
        std=tuple(about["std"]),
        classes=None if classes is None else tuple(classes),
    )


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
    weights = {
        re.sub(WRAPPERS, "", key): value
        for key, value in state.get("model_state_dict", state).items()
        if isinstance(value, Tensor)
    }
    if model.name != "vit":
        return Pretrained(name, {"timm_args": {}}, weights)
    settings, input_size, assumed = settings_of_file(weights, model, name)
    note = "not in the file, from the config: " + ", ".join(f"{k}={settings[k]}" for k in assumed)
    if "num_heads" in assumed:
        width = settings["embed_dim"] / settings["num_heads"]
        note += f"; heads are {width:g} wide, in most models 64"
    return Pretrained(name, settings, weights, input_size, notes=(note,))
