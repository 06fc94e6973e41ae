"""Starting a run from pretrained weights: what the run takes over from them, and when."""

import dataclasses
from pathlib import Path

from vit.config import Config
from vit.data.preprocess import Preprocess
from vit.model.config import TIMM
from vit.pretrained.adapt import Pretrained, fit
from vit.pretrained.architecture import adopt, settings_of_config
from vit.pretrained.sources import LOCAL, find_source
from vit.run.checkpoint import Checkpoint, checkpoint_paths
from vit.run.folder import stored_config


def resolve_pretrained(config: Config, overwrite: bool) -> tuple[Config, Pretrained | None]:
    """Find the pretrained weights of a run and take their architecture into its config.

    A run that is resumed, not overwritten, takes the architecture from its own config, so that it
    does not need the weights any more.

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
    if stored is not None and stored.model.pretrained == name:
        before, model = stored.model, config.model
        if model.name in ("vit", before.name):  # else `check_run` refuses the config
            model = adopt(model, settings_of_config(before), name)
        return dataclasses.replace(config, model=model), None
    place = Path(name.removeprefix(TIMM).removeprefix(LOCAL))
    if place.exists() and place.resolve().is_relative_to(run.resolve()):  # --overwrite empties it
        raise ValueError(
            f"model.pretrained: the new run in {run} would replace {name}, from which it starts; "
            "train in another folder with --out"
        )
    source = find_source(name, config.model)
    config = dataclasses.replace(config, model=adopt(config.model, source.settings, name))
    images = config.data.spec
    return config, fit(source, config.model, images.image_size, images.channels)


def with_statistics(
    preprocess: Preprocess, source: Pretrained | None, checkpoint: Checkpoint | None
) -> Preprocess:
    """Take mean and std from the checkpoint of a run, or else from its pretrained weights.

    For another number of channels, they are averaged (one channel) or repeated.
    """
    if checkpoint is not None and checkpoint.preprocess is not None:
        stored = checkpoint.preprocess
        return dataclasses.replace(preprocess, mean=stored.mean, std=stored.std)
    if source is None or source.mean is None or source.std is None:
        return preprocess
    mean, std = (_for_channels(v, preprocess.channels) for v in (source.mean, source.std))
    return dataclasses.replace(preprocess, mean=mean, std=std)


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[channel % len(values)] for channel in range(channels))
