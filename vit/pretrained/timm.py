"""Pretrained weights for a model of timm, fitted to other images and classes by timm's own code.

`vit.pretrained.sources` reads them, and `vit.pretrained.resolve` starts a run with them.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vit.data.preprocess import Preprocess
from vit.model.config import ModelConfig
from vit.model.timm_model import (
    FROM_DATA,
    REFUSED,
    architecture_of,
    complete_arguments,
    create,
    head_names,
)
from vit.pretrained.adapt import Pretrained, account, check_finite, why_new_head
from vit.settings import shorten

CLASSES = 10  # any number does
COUNTER = "num_batches_tracked"  # of batch norm; old files lack it
SHOWN = 4  # tensors that the account names


@dataclass(frozen=True)
class TimmSource(Pretrained):
    """Pretrained weights of a model of timm, and what is known about them.

    Attributes:
        arguments: Arguments of their model, see `ModelConfig.timm_args`.
        weights: Parameters and buffers by timm's names, on the CPU.
        input_size: Channels, height and width of the images that they were trained on; None if
            unknown.
        head: Names of the tensors whose shape depends on the number of classes, set by `fit`.
        changes: What `fit` has changed, in words.
    """

    arguments: dict[str, Any]
    weights: dict[str, Tensor]
    input_size: tuple[int, int, int] | None = None
    head: tuple[str, ...] = ()
    changes: str = ""

    def adapted(
        self, model: ModelConfig, preprocess: Preprocess, classes: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], str]:
        """See `Pretrained.adapted`; `fit` has adapted them to the images before."""
        return keep_head(self, classes)


def own_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out arguments that images and classes determine, or that are about loading."""
    return {key: value for key, value in arguments.items() if key not in FROM_DATA + REFUSED}


def adopt_arguments(config: ModelConfig, arguments: Mapping[str, Any]) -> ModelConfig:
    """Take the arguments of a pretrained model of timm into a config; those of the user win."""
    complete = {**arguments, **(config.timm_args or {})}
    return dataclasses.replace(config, timm_args=complete or None)


def fit(
    source: TimmSource, config: ModelConfig, image_size: tuple[int, int], channels: int
) -> TimmSource:
    """Fit weights to a model of timm for other images, as `timm.create_model` does.

    timm adapts the first convolution to the channels, and resamples positions, relative positions
    and patch embeddings of the models that have them. The head stays as it is, see `keep_head`.

    Args:
        source: The weights.
        config: Name and arguments of the model.
        image_size: Height and width of the images, in pixels.
        channels: Channels of the images.

    Raises:
        ValueError: timm cannot build the model, the weights are not finite or are those of another
            architecture, or timm cannot fit them to these images.
    """
    complete = complete_arguments(config.name, config.timm_args or {}, image_size, channels)
    head = head_names(config.name, complete)
    with torch.device("meta"):
        model = create(config.name, {**complete, "num_classes": CLASSES})
    ours = model.state_dict()
    weights = {
        key: value.float() if value.is_floating_point() else value
        for key, value in source.weights.items()
    }
    _check_names(weights, ours, head, source.name, config.name)
    check_finite(weights, source.name)
    body = {key: value for key, value in weights.items() if key not in head}
    fitted = _load(body, source, model, config.name, complete, channels)
    adapted = [
        f"{key} {_by(body[key])} -> {_by(value)}"
        for key, value in fitted.items()
        if key in body and not torch.equal(body[key], value)
    ]
    more = f" and {len(adapted) - SHOWN} more" if len(adapted) > SHOWN else ""
    has_head = head and all(
        key in weights and weights[key].shape[1:] == ours[key].shape[1:] for key in head
    )
    return dataclasses.replace(
        source,
        weights={key: value for key, value in fitted.items() if key not in head}
        | ({key: weights[key] for key in head} if has_head else {}),
        head=head,
        changes="; ".join(adapted[:SHOWN]) + more,
    )


def keep_head(source: TimmSource, classes: tuple[str, ...]) -> tuple[dict[str, Tensor], str]:
    """Leave the head of fitted weights out if the classes differ.

    Args:
        source: What `fit` has returned.
        classes: Names of the classes.

    Returns:
        The weights in float32; and an account of what was loaded, adapted and left out, for people.
    """
    rows = {len(source.weights[key]) for key in source.head if key in source.weights}
    new = why_new_head(max(rows, default=None), source.classes, classes)
    weights = {
        key: value for key, value in source.weights.items() if not new or key not in source.head
    }
    changes = f"adapted: {source.changes}" if source.changes else ""
    return weights, account(source, weights, changes, new)


def _check_names(
    weights: Mapping[str, Tensor],
    ours: Mapping[str, Tensor],
    head: Sequence[str],
    source: str,
    name: str,
) -> None:
    """Check that weights are those of a model's architecture, but for the head.

    Raises:
        ValueError: They are not.
    """
    missing = [
        key for key in ours if key not in weights and key not in head and not key.endswith(COUNTER)
    ]
    unexpected = [key for key in weights if key not in ours]
    differences = [
        f"{words} {names[0]}" + (f" (and {len(names) - 1} more)" if names[1:] else "")
        for words, names in (("they lack", missing), ("it has no", unexpected))
        if names
    ]
    if differences:
        raise ValueError(
            f"model.pretrained: the weights in {source} are not those of {name}: "
            f"{', and '.join(differences)}; name the architecture of the weights with model.name, "
            "and its arguments with model.timm_args"
        )


def _load(
    body: dict[str, Tensor],
    source: TimmSource,
    model: nn.Module,
    name: str,
    arguments: Mapping[str, Any],
    channels: int,
) -> dict[str, Tensor]:
    """Let timm load weights without a head into a new model, and return its state dict.

    Raises:
        ValueError: The shapes differ and timm cannot adapt them.
    """
    import timm

    about: Any = model.pretrained_cfg
    base = _channels(body, model, channels) if source.input_size is None else source.input_size[0]
    size = about["input_size"][1:] if source.input_size is None else source.input_size[1:]
    try:
        if base != channels:
            for conv in _first_convs(model):  # where this fails, timm leaves random kernels
                timm.models.adapt_input_conv(channels, body[f"{conv}.weight"], base_chans=base)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about how timm resamples
            loaded = timm.create_model(
                architecture_of(name),
                pretrained=True,
                pretrained_cfg_overlay={
                    "state_dict": body,
                    "input_size": (base, *size),
                    # Other classes than the model's, so that timm does not look for a head.
                    "num_classes": CLASSES + 1,
                    "classifier": about["classifier"] or (),
                },
                num_classes=CLASSES,
                **arguments,
            )
    except Exception as error:  # timm checks shapes in many places and ways
        reason = str(error).partition("state_dict for")[2].partition("size mismatch for ")[2]
        raise ValueError(
            f"model.pretrained: timm cannot fit {source.name} to this {name} for images of "
            f"{channels} channels: {shorten(reason or error, 200)}; name the architecture of the "
            "weights with model.name, and its arguments with model.timm_args"
        ) from None
    return loaded.state_dict()


def _first_convs(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers that see the channels of the image."""
    about: Any = model.pretrained_cfg
    names = about.get("first_conv") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _channels(weights: Mapping[str, Tensor], model: nn.Module, channels: int) -> int:
    """Return for how many channels of the image weights are, where nothing else tells.

    Args:
        weights: By name.
        model: The model for images of `channels` channels. Some models divide the image into more
            channels before their first convolution.
        channels: Channels of the images.
    """
    for name in _first_convs(model):
        conv = model.get_submodule(name)
        if isinstance(conv, nn.Conv2d):
            return weights[f"{name}.weight"].shape[1] * conv.groups * channels // conv.in_channels
    about: Any = model.pretrained_cfg
    number: int = about["input_size"][0]
    return number


def _by(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape))
