"""Opening a run for a look: its model, where to compute, what its data are, where results go."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit.checkpoint import CHECKPOINT_FOLDER, SHIPPED, SavedModel, load_model
from vit.config import EvalConfig
from vit.data.datasets import ImageSet, load, normalization
from vit.hardware import choose_device, choose_precision, describe
from vit.model.vit import VisionTransformer
from vit.run_folder import EVAL_FOLDER


@dataclass(frozen=True)
class OpenRun:
    """A run that can be looked at.

    Attributes:
        saved: The model, on the device, with what it was trained with.
        device: Where to compute.
        precision: Of matrix products.
        mean: Of the training images' channels, (3, 1, 1), on the device.
        std: Likewise.
        folder: Where results go.
    """

    saved: SavedModel
    device: torch.device
    precision: torch.dtype
    mean: Tensor
    std: Tensor
    folder: Path

    @property
    def model(self) -> VisionTransformer:
        """The model, in evaluation mode."""
        return self.saved.model

    def describe(self) -> str:
        """Say in a line what is looked at, and where."""
        return f"{self.saved.path}: {describe(self.device)}, {str(self.precision)[6:]}"


def open_run(run: str, options: EvalConfig) -> OpenRun:
    """Load the model of a run folder or file.

    Raises:
        ValueError: The model cannot be read, or the device is not there.
    """
    saved = load_model(Path(run))
    device = choose_device(options.device)
    saved.model.to(device)
    home = saved.path.resolve().parent
    if home.name == CHECKPOINT_FOLDER:
        home = home.parent
    elif home == SHIPPED:  # what comes along is not written to
        home = Path("runs") / saved.path.stem
    return OpenRun(
        saved,
        device,
        choose_precision(options.precision, device),
        *normalization(saved.config.data.name, device),
        Path(options.out) if options.out else home / EVAL_FOLDER,
    )


def load_test(opened: OpenRun, options: EvalConfig) -> ImageSet:
    """Load the test images of the data set that a model was trained on.

    Raises:
        ValueError: They are not there and cannot be fetched, or have other classes.
    """
    data, classes = opened.saved.config.data, opened.saved.classes
    root = options.data.root or data.root
    test = load(
        data.name, root, train=False, download=options.data.download, on_bad_image=data.on_bad_image
    )
    if test.classes != classes:
        apart = ", ".join(sorted({*test.classes} ^ {*classes}))
        raise ValueError(
            f"data.root: the test images in {root} do not have the classes of "
            f"{opened.saved.path}: only one of both has {apart}; point --data.root at test images "
            f"of the model's classes"
        )
    return test


def class_number(name: str | None, classes: tuple[str, ...]) -> int | None:
    """Find a class by its name.

    Raises:
        ValueError: There is no such class.
    """
    if name is None:
        return None
    if name not in classes:
        raise ValueError(f"target: {name!r} is not a class of the model: {', '.join(classes)}")
    return classes.index(name)
