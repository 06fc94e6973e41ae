"""Building timm models by name; functions import timm, which takes seconds, when they need it."""

import contextlib
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from vit.console import shorten
from vit.model.config import TIMM
from vit.settings import suggest

NORM_EPS = "norm_eps"  # our own argument: the epsilon of all layer norms
# Arguments of timm.create_model that come from the data set, or that this project does not offer.
FROM_DATA = ("in_chans", "img_size", "num_classes")
REFUSED = (
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir",
    "features_only", "scriptable", "exportable", "no_jit", "device", "dtype",
)  # fmt: skip


def complete_arguments(
    name: str, arguments: Mapping[str, Any], img_size: tuple[int, int], in_chans: int
) -> dict[str, Any]:
    """Add what depends on the images to the arguments of a timm model, such as {"depth": 4}.

    A model that takes an image size gets `img_size`, height and width in pixels. If it can resample
    its positions, it does, so that training may start on smaller images. An unknown model, or one
    that cannot be built with these arguments, is a ValueError.
    """
    import timm

    names = [TIMM + name for name in timm.list_models()]
    if name not in names:
        raise ValueError(
            f"model.name: {shorten(name)} is not a model of timm {timm.__version__}"
            f"{suggest(name.partition('.')[0], names)}; all names: "
            'python -c "import timm; print(*timm.list_models())"'
        )
    if refused := [key for key in arguments if key in (*FROM_DATA, *REFUSED)]:
        raise ValueError(
            f"model.timm_args: {refused[0]} is not allowed; the data set determines "
            f"{', '.join(FROM_DATA)}, model.pretrained names weights, and other settings of "
            "timm.create_model are not offered"
        )
    complete = {**arguments, "in_chans": in_chans}
    with torch.device("meta"):  # without memory, to see which arguments it takes
        create(name, complete)
        for optional in ({"img_size": img_size}, {"dynamic_img_size": True}):
            with contextlib.suppress(ValueError):
                create(name, {**optional, **complete})
                complete = {**optional, **complete}
    return complete


def create(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Call timm.create_model with arguments that may include `NORM_EPS`; ValueError if it fails."""
    import timm

    arguments = dict(arguments)
    eps = arguments.pop(NORM_EPS, None)
    try:
        model: nn.Module = timm.create_model(name.removeprefix(TIMM), **arguments)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm) and eps is not None:
                module.eps = float(eps)
        return model
    except Exception as error:  # timm checks arguments in many places and ways
        raise ValueError(
            f"model.timm_args: timm cannot build {name} with {shorten(arguments, 200)}: "
            f"{shorten(str(error) or repr(error), 200)}"
        ) from None


def timm_name(model: nn.Module) -> str:
    """Return the name by which timm knows a model, or else the name of its class."""
    pretrained_cfg = getattr(model, "pretrained_cfg", None) or {}
    return str(pretrained_cfg.get("architecture") or type(model).__name__)


def classifier_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the layers that turn features into logits; two with a distillation token."""
    head = cast(Any, model).get_classifier()
    return head if isinstance(head, tuple) else (head,)
