"""Starting a run from pretrained weights: finding them, and what the run takes over from them."""

import dataclasses
import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vit.checkpoint import Checkpoint, checkpoint_paths
from vit.config import Config, ModelConfig, from_dict
from vit.data.preprocess import Preprocess
from vit.model.architecture import settings_of_timm, settings_of_weights
from vit.model.pretrained import ARCHITECTURE, Source, adopt, check_weights
from vit.model.vit import VisionTransformer
from vit.model_file import bundled_models, is_own_file, load_model
from vit.run_folder import stored_config
from vit.settings import shorten

TIMM = "timm:"
LOCAL = "local-dir:"  # before a folder, in timm's names
TIMM_CONFIG = "config.json"  # in a folder that timm saved


def resolve_pretrained(config: Config, overwrite: bool) -> tuple[Config, Source | None]:
    """Find the pretrained weights of a run and take their architecture into its config.

    A run that is resumed takes the architecture from its own config, so that the weights it once
    started from are not needed any more.

    Args:
        config: The run.
        overwrite: Whether an earlier run in the folder is going to be deleted.

    Returns:
        The config with the architecture of the weights; and the weights, None if the run starts
        from random weights or is resumed.

    Raises:
        ValueError: The weights cannot be found or read, do not fit our VisionTransformer, or
            contradict the config.
    """
    name = config.model.pretrained
    if name is None:
        return config, None
    run = Path(config.out)
    stored = stored_config(run) if checkpoint_paths(run) and not overwrite else None
    source = None
    if stored is not None and stored["model"].get("pretrained") == name:
        model = from_dict(stored).model
        settings = {key: getattr(model, key) for key in ARCHITECTURE}
    else:
        _check_place(name, run)
        source = find_source(name, config.model)
        settings = source.settings
    return dataclasses.replace(config, model=adopt(config.model, settings, name)), source


def _check_place(name: str, run: Path) -> None:
    """Check that pretrained weights are not in the folder of the run, which may be emptied.

    Raises:
        ValueError: They are.
    """
    path = Path(name.removeprefix(TIMM).removeprefix(LOCAL))
    if path.exists() and path.resolve().is_relative_to(run.resolve()):
        raise ValueError(
            f"model.pretrained: the new run in {run} would replace {name}, from which it starts; "
            "train in another folder with --out"
        )


def find_source(name: str, model: ModelConfig) -> Source:
    """Read pretrained weights.

    Args:
        name: As `ModelConfig.pretrained`.
        model: Gives what a bare state dict does not tell about its architecture.

    Raises:
        ValueError: There are no such weights, they cannot be read or fetched, or our
            VisionTransformer lacks a part of their model.
    """
    path = Path(name)
    if name.startswith(TIMM):
        source = _from_timm(name, name.removeprefix(TIMM))
    elif (path / TIMM_CONFIG).is_file():
        source = _from_timm(name, f"{LOCAL}{name}")
    elif path.is_file() and not is_own_file(path):
        source = _from_file(name, path, model)
    elif path.exists() or name in bundled_models():
        source = _from_own(name)
    else:
        raise ValueError(
            f"model.pretrained: {name} does not exist; it must be timm:NAME, a .safetensors or "
            f".pth file, a folder as timm saves it, a run folder, or one of "
            f"{', '.join(bundled_models())}{_did_you_mean(name)}"
        )
    check_weights(source)
    return source


def _did_you_mean(name: str) -> str:
    import timm

    is_name = not set(name) & set(r"/\:") and timm.is_model(name)
    return f"; did you mean {TIMM}{name}?" if is_name else ""


def _from_own(name: str) -> Source:
    """Read a model of this project: a run folder, a model file, a checkpoint or a bundled model."""
    try:
        saved = load_model(name, "cpu", "float32")
    except ValueError as error:
        raise ValueError(f"model.pretrained: {error}") from None
    model, preprocess = saved.classifier.model, saved.classifier.preprocess
    if not isinstance(model, VisionTransformer):
        raise ValueError(
            f"model.pretrained: {name} is a {type(model).__name__}; only a VisionTransformer of "
            "this project can be loaded into one"
        )
    return Source(
        name,
        {key: getattr(saved.config.model, key) for key in ARCHITECTURE},
        model.state_dict(),
        model.patch_embed.grid_size,
        preprocess.mean,
        preprocess.std,
        saved.classifier.classes,
        progress=saved.progress,
    )


def _from_timm(name: str, timm_name: str) -> Source:
    """Build one of timm's models with its weights, from the hub or from a folder."""
    import timm

    if ":" not in timm_name and not timm.is_model_pretrained(timm_name):
        architecture = timm_name.partition(".")[0]
        known = timm.list_pretrained(f"{architecture}.*")
        near = difflib.get_close_matches(architecture, timm.list_models(pretrained=True), n=3)
        choice = f"it has {', '.join(known)}" if known else f"near it: {', '.join(near) or 'none'}"
        raise ValueError(
            f"model.pretrained: timm {timm.__version__} has no weights named {timm_name}; {choice}"
        )
    with torch.device("meta"):  # the architecture is checked before anything large is fetched
        empty = _create(name, timm_name, pretrained=False)
    settings = settings_of_timm(empty, name)
    model = _create(name, timm_name, pretrained=True)
    about = model.pretrained_cfg
    classes = about.get("label_names")
    return Source(
        name,
        settings,
        model.state_dict(),
        model.patch_embed.grid_size,
        tuple(about["mean"]),
        tuple(about["std"]),
        None if classes is None else tuple(classes),
    )


def _create(name: str, timm_name: str, pretrained: bool) -> Any:
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


def _from_file(name: str, path: Path, model: ModelConfig) -> Source:
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
    settings, grid, assumed = settings_of_weights(weights, model, name)
    return Source(name, settings, weights, grid, assumed=assumed)


def with_statistics(
    preprocess: Preprocess, source: Source | None, checkpoint: Checkpoint | None
) -> Preprocess:
    """Normalize images as those that pretrained weights were trained on.

    Args:
        preprocess: Preprocessing of the data set.
        source: The pretrained weights. For other channels than theirs, their statistics are
            averaged (one channel) or repeated.
        checkpoint: Gives the statistics of a run that is resumed.
    """
    if checkpoint is not None and checkpoint.preprocess is not None:
        stored = Preprocess.from_dict(checkpoint.preprocess)
        return dataclasses.replace(preprocess, mean=stored.mean, std=stored.std)
    if source is None or source.mean is None or source.std is None:
        return preprocess
    mean, std = (_for_channels(v, preprocess.channels) for v in (source.mean, source.std))
    return dataclasses.replace(preprocess, mean=mean, std=std)


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[channel % len(values)] for channel in range(channels))
