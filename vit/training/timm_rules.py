"""Rules about a run with a model of timm: they are asked of the model, built without memory.

On torch's "meta" device tensors have shapes but no values, so that building a model and passing
images through it takes no time, and a mistake is found before any data is read.
"""

from typing import Any, NoReturn

import torch
from torch import nn

from vit.model.attention_model import attention_model, size_unit
from vit.model.config import ModelConfig
from vit.model.embed import image_conv
from vit.model.timm_model import build_timm_model, complete_arguments, head_names, heads, timm_name
from vit.registry import OPTIMIZERS
from vit.settings import require, shorten
from vit.training.config import Config
from vit.training.schedule import scaled_size

CLASSES = 10  # any number does


def check_timm(config: Config, image_size: tuple[int, int], channels: int) -> None:
    """Check that a model of timm can be built and trained as the config says.

    Args:
        config: The run.
        image_size: Height and width of the images, in pixels.
        channels: Channels of the images.

    Raises:
        ValueError: timm does not have the model or cannot build it, or it does not accept the
            images, the smaller images at the beginning, Muon, whitening, a frozen backbone, or
            checkpointing.
    """
    model = _outline(config.model, image_size, channels)
    problem = _problem_with(model, image_size, channels)
    if problem is not None:
        _refuse_size(config.model, model, image_size, problem)
    name, train = config.model.name, config.train
    small = scaled_size(image_size, train.small_scale, size_unit(model))
    require(
        train.small_share == 0 or _problem_with(model, small, channels) is None,
        "train.small_share",
        train.small_share,
        f"0 with model.name={name}, which takes images of {_by(image_size)} pixels but not of "
        f"{_by(small)}",
    )
    require(
        not train.whiten or image_conv(model, channels) is not None,
        "train.whiten",
        train.whiten,
        f"false with model.name={name}, which does not begin with a convolution of the image",
    )
    require(
        not OPTIMIZERS[config.optim.name].muon or attention_model(model) is not None,
        "optim.name",
        config.optim.name,
        f"adamw with model.name={name}; muon is for the encoder blocks of Vision Transformers",
    )
    require(
        train.freeze == "none" or _is_head_whole(config.model, model, image_size, channels),
        "train.freeze",
        train.freeze,
        f"none with model.name={name}, which classifies with more layers than timm's classifier",
    )
    require(
        not train.checkpoint_blocks or _can_checkpoint(model),
        "train.checkpoint_blocks",
        train.checkpoint_blocks,
        f"false with model.name={name}, for which timm does not offer it",
    )


def has_batch_norm(config: ModelConfig) -> bool:
    """Tell whether a model of timm contains batch norm."""
    model = _outline(config, (224, 224), 3)
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def _outline(config: ModelConfig, image_size: tuple[int, int], channels: int) -> nn.Module:
    """Build a model of timm without memory, in evaluation mode."""
    with torch.device("meta"):
        return build_timm_model(
            config.name, config.timm_args or {}, image_size, channels, CLASSES
        ).eval()


def _is_head_whole(
    config: ModelConfig, model: nn.Module, image_size: tuple[int, int], channels: int
) -> bool:
    """Tell whether timm's classifier has all layers that depend on the number of classes."""
    arguments = complete_arguments(config.name, config.timm_args or {}, image_size, channels)
    parameters = dict(model.named_parameters())
    trained = {parameter for head in heads(model) for parameter in head.parameters()}
    names = head_names(config.name, arguments)
    return {parameters[key] for key in names if key in parameters} <= trained


def _can_checkpoint(model: Any) -> bool:
    try:
        model.set_grad_checkpointing()
    except (AssertionError, AttributeError, NotImplementedError):  # what timm's models raise
        return False
    return True


def _problem_with(model: nn.Module, image_size: tuple[int, int], channels: int) -> str | None:
    """Say why a model does not classify images of a size; None if it does."""
    try:
        with torch.no_grad():
            logits = model(torch.empty(2, channels, *image_size, device="meta"))
    except Exception as error:  # timm checks sizes in many places and ways
        return str(error) or repr(error)
    shape = getattr(logits, "shape", None)
    return None if shape == (2, CLASSES) else f"it returns {shape or type(logits).__name__}"


def _refuse_size(
    config: ModelConfig, model: nn.Module, image_size: tuple[int, int], problem: str
) -> NoReturn:
    about = getattr(model, "pretrained_cfg", {})
    made_for = about.get("input_size", (3, 224, 224))[1:]
    raise ValueError(
        f"model.name: {config.name} does not take the images of this data set, {_by(image_size)} "
        f"pixels ({shorten(problem, 150)}); {timm_name(model)} is made for {_by(made_for)} pixels, "
        "and some models can be fitted to others with --model.timm_args, e.g. '{patch_size: 4}'"
    )


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
