"""Reading pretrained weights: from timm's hub, folders, files, and models of this project.

Each place can hold weights for our VisionTransformer or for a model of timm; `ModelConfig.name`
says for which.
"""

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.model.config import ModelConfig
from vit.model.timm_model import architecture_of
from vit.model.vit import VisionTransformer
from vit.model_file import SavedModel, bundled_models, is_own_file, load_model
from vit.pretrained.adapt import ARCHITECTURE, Pretrained, Source, check_weights
from vit.pretrained.architecture import settings_of_timm, settings_of_weights
from vit.pretrained.timm import TimmSource, own_arguments
from vit.settings import shorten

TIMM = "timm:"
LOCAL = "local-dir:"  # before a folder, in timm's names
TIMM_CONFIG = "config.json"  # in a folder that timm saved


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
    path, ours = Path(name), model.name == "vit"
    source: Pretrained
    if name.startswith(TIMM) or (path / TIMM_CONFIG).is_file():
        timm_name = name.removeprefix(TIMM) if name.startswith(TIMM) else f"{LOCAL}{name}"
        source = (
            _ours_from_timm(name, timm_name)
            if ours
            else _theirs_from_timm(name, timm_name, architecture_of(model.name).partition(".")[0])
        )
    elif path.is_file() and not is_own_file(path):
        weights = _read_file(name, path)
        source = _ours_from_file(name, weights, model) if ours else TimmSource(name, {}, weights)
    elif path.exists() or name in bundled_models():
        saved = _read_own(name)
        source = _ours_from_own(name, saved) if ours else _theirs_from_own(name, saved, model)
    else:
        raise ValueError(
            f"model.pretrained: {name} does not exist; it must be timm:NAME, a .safetensors or "
            f".pth file, a folder as timm saves it, a run folder, or one of "
            f"{', '.join(bundled_models())}{_did_you_mean(name)}"
        )
    if isinstance(source, Source):
        check_weights(source)  # those for timm are checked by `fit`
    return source


def _did_you_mean(name: str) -> str:
    import timm

    is_name = not set(name) & set(r"/\:") and timm.is_model(name)
    return f"; did you mean {TIMM}{name}?" if is_name else ""


# Models of this project.


def _read_own(name: str) -> SavedModel:
    """Read a run folder, a model file, a checkpoint or a bundled model."""
    try:
        return load_model(name, "cpu", "float32")
    except ValueError as error:
        raise ValueError(f"model.pretrained: {error}") from None


def _ours_from_own(name: str, saved: SavedModel) -> Source:
    model, preprocess = saved.classifier.model, saved.classifier.preprocess
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"model.pretrained: {name} is a model of timm; add --model.name "
            f"{saved.config.model.name}"
        )
    return Source(
        name,
        {key: getattr(saved.config.model, key) for key in ARCHITECTURE},
        model.state_dict(),
        model.patch_embed.grid_size,
        mean=preprocess.mean,
        std=preprocess.std,
        classes=saved.classifier.classes,
        progress=saved.progress,
    )


def _theirs_from_own(name: str, saved: SavedModel, model: ModelConfig) -> TimmSource:
    preprocess = saved.classifier.preprocess
    if saved.config.model.name == "vit":
        raise ValueError(
            f"model.pretrained: {name} is a VisionTransformer of this project, not {model.name}; "
            "leave out model.name, or choose other weights"
        )
    return TimmSource(
        name,
        own_arguments(saved.config.model.timm_args or {}),
        saved.classifier.model.state_dict(),
        (preprocess.channels, *preprocess.image_size),
        mean=preprocess.mean,
        std=preprocess.std,
        classes=saved.classifier.classes,
        progress=saved.progress,
    )


# Models that timm finds or has saved.


def _ours_from_timm(name: str, timm_name: str) -> Source:
    _require_weights(timm_name)
    with torch.device("meta"):  # the architecture is checked before anything large is fetched
        empty = _create(name, timm_name, pretrained=False)
    settings = settings_of_timm(empty, name)
    model = _create(name, timm_name, pretrained=True)
    return Source(name, settings, model.state_dict(), model.patch_embed.grid_size, **_about(model))


def _theirs_from_timm(name: str, timm_name: str, architecture: str) -> TimmSource:
    _require_weights(timm_name)
    model = _create(name, timm_name, pretrained=True)
    arguments, about = model.pretrained_model_args, model.pretrained_cfg
    same = about["architecture"] == architecture
    size = arguments.get("img_size", about["input_size"][1:])
    rows, columns = (size, size) if isinstance(size, int) else size
    return TimmSource(
        name,
        own_arguments(arguments) if same else {},  # those of another model may not exist
        model.state_dict(),
        (arguments.get("in_chans", about["input_size"][0]), rows, columns),
        **_about(model),
    )


def _about(model: Any) -> dict[str, Any]:
    """Return what timm knows about the images and classes of a pretrained model."""
    about = model.pretrained_cfg
    classes = about.get("label_names")
    return {
        "mean": tuple(about["mean"]),
        "std": tuple(about["std"]),
        "classes": None if classes is None else tuple(classes),
    }


def _require_weights(timm_name: str) -> None:
    """Check that timm has weights of this name, unless it is a place to look for them."""
    import timm

    if ":" in timm_name or timm.is_model_pretrained(timm_name):
        return
    architecture = timm_name.partition(".")[0]
    known = timm.list_pretrained(f"{architecture}.*")
    near = difflib.get_close_matches(architecture, timm.list_models(pretrained=True), n=3)
    choice = f"it has {', '.join(known)}" if known else f"near it: {', '.join(near) or 'none'}"
    raise ValueError(
        f"model.pretrained: timm {timm.__version__} has no weights named {timm_name}; {choice}"
    )


def _create(name: str, timm_name: str, pretrained: bool) -> Any:
    """Build one of timm's models, with its weights from the hub or from a folder."""
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


# State dicts.


def _read_file(name: str, path: Path) -> dict[str, Tensor]:
    """Read a state dict with timm's names; nothing in the file is ever executed."""
    from timm.models import load_state_dict  # unwraps {"state_dict": ...} and strips "module."

    try:
        content = load_state_dict(str(path), weights_only=True)
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
    return weights


def _ours_from_file(name: str, weights: dict[str, Tensor], model: ModelConfig) -> Source:
    settings, grid, assumed = settings_of_weights(weights, model, name)
    return Source(name, settings, weights, grid, assumed=assumed)
