"""Models shared by several tests, and random weights for them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit.calibration import Calibration
from vit.classifier import Classifier, build_model
from vit.config import Config
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.explain.interventions import set_gates
from vit.model.copying import copy_module
from vit.model.vit import VisionTransformer
from vit.model_file import save_model

PLAIN: dict[str, Any] = {"in_chans": 3}  # the other defaults are timm's
# Settings of a tiny model.
ONE_BLOCK: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 8}


def randomize(model: nn.Module, std: float, seed: int = 0) -> Any:
    """Draw all weights and statistics, so that every part matters; return it in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=std, generator=generator)
            if parameter.ndim == 1 and name.endswith(("weight", "gamma")):
                parameter.add_(1)  # as norms and layer scale begin
        for name, statistic in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                statistic.uniform_(0.5, 1.5, generator=generator)
    return model.eval()


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw normal numbers, which depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"class {number}" for number in range(count))


def grey_classifier() -> Classifier:
    """Build an untrained classifier of grey images that are not square."""
    torch.manual_seed(0)
    sizes = {"img_size": (16, 24), "num_classes": 3, "embed_dim": 12, "depth": 2}
    model = VisionTransformer(**PLAIN | sizes | {"in_chans": 1}).eval()
    preprocess = Preprocess((16, 24), (0.5,), (0.25,))
    return Classifier(model, preprocess, ("a", "b", "c"), torch.device("cpu"), torch.float32)


def save_untrained(
    folder: Path,
    model: dict[str, Any],
    preprocess: Preprocess | None = None,
    classes: tuple[str, ...] = KINDS,
    data: dict[str, Any] | None = None,
    seed: int = 0,
    calibration: Calibration | None = None,
    **groups: dict[str, Any],
) -> Path:
    """Save a model with random weights, of drawn shapes unless `data` says otherwise."""
    config = Config(**{"out": str(folder), "data": {"name": "shapes", **(data or {})},
                        "model": {"zero_init": False, **model}, **groups})  # fmt: skip
    preprocess = preprocess or Preprocess.from_config(config.data)
    torch.manual_seed(seed)
    network = build_model(config.model, preprocess, len(classes)).eval()
    torch.nn.init.normal_(network.get_classifier().weight)
    about = (torch.device("cpu"), torch.float32)
    classifier = Classifier(network, preprocess, classes, *about, calibration=calibration)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model.safetensors", classifier, config, step=1)
    return folder


def with_gates(model: nn.Module, gates: Tensor) -> nn.Module:
    """Return a copy of a model whose heads are scaled by gates (L, H)."""
    copied = copy_module(model)
    set_gates(copied, model, gates)
    return copied
