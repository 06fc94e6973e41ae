"""Reading pretrained weights: from timm's hub, folders, files, and models of this project.

Each place can hold weights for our VisionTransformer or for a timm model; `ModelConfig.name` says
for which.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.hub import HUB, download
from vit.model.config import TIMM, ModelConfig
from vit.model.timm_model import FROM_DATA, REFUSED
from vit.model_file import bundled_models, is_own_file, load_model, transformers_folder
from vit.pretrained.adapt import Pretrained
from vit.pretrained.architecture import (
    check_vit,
    settings_of_config,
    settings_of_file,
    settings_of_timm,
)
from vit.pretrained.transformers import read_transformers
from vit.run.folder import MODEL_FILE
from vit.settings import shorten, suggest

LOCAL = "local-dir:"  # before a folder, in timm's names
TIMM_CONFIG = "config.json"  # in a folder that timm saved
LEFT_OUT = FROM_DATA + REFUSED  # arguments that images and classes determine, or about loading
USUAL_WIDTH = 64  # of an attention head


def find_source(name: str, model: ModelConfig) -> Pretrained:
    """Read pretrained weights.

    Args:
        name: As `ModelConfig.pretrained`.
        model: Says which model they are for, and gives what a bare state dict does not tell about
            the architecture of ours.

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
        return read_transformers(folder, model.name)[0]
    if (path / TIMM_CONFIG).is_file() and not is_own_file(path / MODEL_FILE):
        return _from_timm(name, f"{LOCAL}{name}", model)
    if path.is_file() and not is_own_file(path):
        return _from_file(name, model)
    if path.exists() or name in bundled_models():
        return _from_own(name, model)
    import timm

    is_path = len(path.parts) > 1
    names = [] if is_path else [f"{TIMM}{known}" for known in timm.list_models()]
    raise ValueError(
        f"model.pretrained: {name} does not exist; it must be timm:NAME, hf-hub:OWNER/NAME, a "
        ".safetensors or .pth file, a folder as timm or transformers saves it, a run folder, or "
        f"one of {', '.join(bundled_models())}{suggest(name, [*bundled_models(), *names])}"
    )


def _from_own(name: str, model: ModelConfig) -> Pretrained:
    """Read a run folder, a model file, a checkpoint or a bundled model."""
    try:
        saved = load_model(name, "cpu", "float32")
    except ValueError as error:
        raise ValueError(f"model.pretrained: {error}") from None
    kind, preprocess = saved.config.model.name, saved.classifier.preprocess
    if (kind == "vit") != (model.name == "vit"):
        raise ValueError(
            f"model.pretrained: {name} is a model with model.name={kind}, not {model.name}; add "
            f"--model.name {kind}, or choose other weights"
        )
    return Pretrained(
        name,
        settings_of_config(saved.config.model),
        saved.classifier.model.state_dict(),
        (preprocess.channels, *preprocess.image_size),
        mean=preprocess.mean,
        std=preprocess.std,
        classes=saved.classifier.classes,
        progress=saved.progress,
    )


def _from_timm(name: str, timm_name: str, config: ModelConfig) -> Pretrained:
    """Let timm fetch a model from the hub, or read it from a folder."""
    import timm

    if ":" not in timm_name and not timm.is_model_pretrained(timm_name):
        architecture = timm_name.partition(".")[0]
        known = ", ".join(timm.list_pretrained(f"{architecture}.*"))
        near = suggest(architecture, timm.list_models(pretrained=True))
        raise ValueError(
            f"model.pretrained: timm {timm.__version__} has no weights named {timm_name}"
            + (f"; it has {known}" if known else near)
        )
    if config.name == "vit":
        with torch.device("meta"):  # the architecture is checked before anything large is fetched
            empty = _create(name, timm_name, pretrained=False)
        settings, stem = settings_of_timm(empty, name), empty.patch_embed
        rows, columns = (count * settings["patch_size"] for count in stem.grid_size)
        input_size = (stem.proj.in_channels, rows, columns)
        check_vit(empty.state_dict(), settings, input_size, name)
    model = _create(name, timm_name, pretrained=True)
    about, classes = model.pretrained_cfg, model.pretrained_cfg.get("label_names")
    if config.name != "vit":
        size = model.pretrained_model_args.get("img_size", about["input_size"][1:])
        input_size = (about["input_size"][0], *((size, size) if isinstance(size, int) else size))
        is_same = about["architecture"] == config.name.removeprefix(TIMM).partition(".")[0]
        # Those of another model may not exist.
        arguments = model.pretrained_model_args if is_same else {}
        settings = {"timm_args": {k: v for k, v in arguments.items() if k not in LEFT_OUT}}
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
        advice = (
            "check the files in the folder"
            if Path(name).is_dir()
            else "without a network, download config.json and model.safetensors of the model from "
            "the Hugging Face Hub elsewhere and pass their folder as model.pretrained"
        )
        raise ValueError(
            f"model.pretrained: timm could not load {name} ({type(error).__name__}: "
            f"{shorten(error, 120)}); {advice}"
        ) from None


def _from_file(name: str, model: ModelConfig) -> Pretrained:
    """Read a state dict with timm's names; nothing in the file is ever executed."""
    from timm.models import load_state_dict  # unwraps {"state_dict": ...} and strips "module."

    try:
        content = load_state_dict(name, weights_only=True)
    except Exception:  # foreign and damaged files raise all kinds of errors
        raise ValueError(
            f"model.pretrained: {name} is damaged, or not a .safetensors or .pth file of tensors "
            "and plain values (nothing else is read, because it could execute code); save the "
            "state dict by itself with torch.save(model.state_dict(), FILE)"
        ) from None
    weights = {key: value for key, value in content.items() if isinstance(value, Tensor)}
    if not weights:
        raise ValueError(
            f"model.pretrained: {name} contains no tensors by name; its keys are "
            f"{shorten(', '.join(map(str, content)), 200)}; tensors are looked for under "
            "state_dict, model, state_dict_ema and model_ema: if they are under another key, save "
            "that state dict by itself"
        )
    if model.name != "vit":
        return Pretrained(name, {"timm_args": {}}, weights)
    settings, input_size, assumed = settings_of_file(weights, model, name)
    check_vit(weights, settings, input_size, name)
    notes = [
        "not in the file, from the config: " + ", ".join(f"{k}={settings[k]}" for k in assumed)
    ]
    heads, rest = divmod(settings["embed_dim"], USUAL_WIDTH)
    if "num_heads" in assumed and settings["num_heads"] != heads and not rest:
        notes.append(
            f"warning: in most models heads are {USUAL_WIDTH} wide, not "
            f"{settings['embed_dim'] // settings['num_heads']}, which is --model.num_heads {heads}"
        )
    return Pretrained(name, settings, weights, input_size, notes=tuple(notes))
