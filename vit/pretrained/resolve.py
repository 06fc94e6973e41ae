"""Starting a run from pretrained weights: what the run takes over from them, and when.

`vit.pretrained.sources` reads the weights.
"""

import dataclasses
from pathlib import Path
from typing import Any

from vit.data.preprocess import Preprocess
from vit.model.config import ModelConfig
from vit.pretrained.adapt import ARCHITECTURE, Pretrained, Source, adopt
from vit.pretrained.sources import LOCAL, TIMM, find_source
from vit.pretrained.timm import TimmSource, adopt_arguments, fit
from vit.run.checkpoint import Checkpoint, checkpoint_paths
from vit.run.folder import stored_config
from vit.training.config import Config, from_dict


def resolve_pretrained(config: Config, overwrite: bool) -> tuple[Config, Pretrained | None]:
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
        ValueError: The weights cannot be found or read, do not fit the model, or contradict the
            config.
    """
    name = config.model.pretrained
    if name is None:
        return config, None
    run = Path(config.out)
    stored = stored_config(run) if checkpoint_paths(run) and not overwrite else None
    if stored is not None and stored["model"].get("pretrained") == name:
        return dataclasses.replace(config, model=_adopt_stored(config.model, stored)), None
    _check_place(name, run)
    source = find_source(name, config.model)
    if isinstance(source, Source):
        return dataclasses.replace(config, model=adopt(config.model, source.settings, name)), source
    assert isinstance(source, TimmSource)
    model, images = adopt_arguments(config.model, source.arguments), config.data.spec
    fitted = fit(source, model, images.image_size, images.channels)
    return dataclasses.replace(config, model=model), fitted


def _adopt_stored(model: ModelConfig, stored: dict[str, Any]) -> ModelConfig:
    """Take the architecture of pretrained weights from the config of the run that they started."""
    before = from_dict(stored).model
    if model.name != "vit":
        return adopt_arguments(model, before.timm_args or {})
    settings = {key: getattr(before, key) for key in ARCHITECTURE}
    return adopt(model, settings, str(model.pretrained))


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


def with_statistics(
    preprocess: Preprocess, source: Pretrained | None, checkpoint: Checkpoint | None
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
