"""Whether a run's model is compiled by torch.compile, which is faster but has to be compiled first.

The choice of `train.compile: auto` is a function of the config, the number of images, the device
and the number of threads and processes, not of a clock. It is stored in the checkpoints: a resumed
or extended run goes on as it began.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from vit.training.step import TrainingStep

# Measured on two cores of an AMD EPYC (Zen 4) in bfloat16, for the model of quick.
PASS_SECONDS = 0.25e-3  # of the forward pass of an image, beside its FLOPs
SECONDS_PER_FLOP = 1 / 300e9
TRAINING_PASSES = 3  # a forward and a backward pass, in forward passes
COMPILING_SECONDS = 40  # for each image size
GAIN = 0.12  # fraction of the training time that compiled steps save
FLOAT32_GAIN = 0.02  # the same in float32 on a CPU, where nearly all of it is matrix products
ACCELERATOR = 50  # CPU cores that an accelerator equals, roughly; the GPU recipes are compiled
FLOAT32 = 1.8  # time of a step in float32 divided by that of one in bfloat16
COMPILABLE = ("cpu", "cuda", "xpu")  # devices for which auto compiles
CXX = {"darwin": "clang++", "win32": "cl"}  # what torch calls where CXX does not name a compiler


@dataclass(frozen=True)
class Compilation:
    """Whether the model is compiled.

    Attributes:
        used: Whether it is.
        reason: Why not, if the user might expect it; "" without a reason.
    """

    used: bool
    reason: str = ""

    def describe(self) -> str:
        """Return how training prints it."""
        if self.used:
            return "compiled"
        return f"not compiled: {self.reason}" if self.reason else "not compiled"


def choose_compilation(
    choice: Literal["auto", True, False],
    began: bool | None,
    device: torch.device,
    saved: float,
    num_sizes: int,
) -> Compilation:
    """Decide whether to compile the model of a run.

    Args:
        choice: `train.compile`.
        began: Whether the earlier part of the run was compiled; None for a new run.
        device: The device that it runs on.
        saved: Estimated seconds that compiled steps save, see `seconds_on` and `gain`.
        num_sizes: Number of image sizes, each of which is compiled separately.

    Raises:
        ValueError: The run is to be compiled, but what torch needs for it is missing.
    """
    missing = missing_tool(device)
    wanted = choice if began is None or choice != "auto" else began
    if wanted is True and missing:
        raise ValueError(
            f"train.compile: compiling needs {missing}, which was not found; install it, or train "
            "without with --train.compile false"
            f"{' --resume.allow_changes' if began else ''}"
        )
    if wanted != "auto":
        return Compilation(wanted)
    pays = device.type in COMPILABLE and saved > COMPILING_SECONDS * num_sizes
    if pays and missing:
        return Compilation(False, f"{missing} was not found")
    return Compilation(pays)


def seconds_on(device: torch.device, precision: torch.dtype, cores: int, seconds: float) -> float:
    """Convert an estimate for two CPU cores and bfloat16 to a device.

    Args:
        device: The device.
        precision: Precision of matrix products.
        cores: CPU threads of all processes together.
        seconds: Estimate for two CPU cores.
    """
    if device.type != "cpu":
        return 2 * seconds / ACCELERATOR
    return 2 * seconds / cores * (FLOAT32 if precision == torch.float32 else 1.0)


def gain(device: torch.device, precision: torch.dtype) -> float:
    """Return the fraction of the training time that compiled steps save."""
    return FLOAT32_GAIN if device.type == "cpu" and precision == torch.float32 else GAIN


def training_seconds(step: "TrainingStep") -> float:
    """Estimate what training costs on two CPU cores, in seconds."""
    schedule = step.schedule
    passes = schedule.batch_size * schedule.work(schedule.total_steps)
    if step.features is not None:  # each image passes through the frozen model once
        passes = len(step.features)
    elif not step.state.frozen:
        passes *= TRAINING_PASSES
    return passes * (PASS_SECONDS + SECONDS_PER_FLOP * forward_flops(step))


def forward_flops(step: "TrainingStep") -> int:
    """Count the FLOPs of the forward pass of one image of full size."""
    model = step.state.structure()
    device = next(model.parameters()).device
    image = torch.zeros(1, step.preprocess.channels, *step.schedule.full_size, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return counter.get_total_flops()


def missing_tool(device: torch.device) -> str | None:
    """Name what torch.compile needs on a device and does not find, or return None."""
    if device.type != "cpu":
        return None if importlib.util.find_spec("triton") else "triton"
    if shutil.which(os.environ.get("CXX") or CXX.get(sys.platform, "g++")) is None:
        return "a C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (package python3-dev)"
    return None


def eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled blocks run as they are, not compiled for other batches.

    Evaluation has batches of other sizes, and torch gives up compiling after a few.
    """
    return torch.compiler.set_stance("force_eager")


def compiled(forward: nn.Module, by_block: bool = False) -> nn.Module:
    """Compile a model; it is compiled when it is first called with images of a size.

    Dropout and stochastic depth draw the same random numbers as without compilation.

    Args:
        forward: The model.
        by_block: Whether to compile each encoder block on its own, in place, so that processes can
            exchange weights and gradients between blocks.
    """
    # Each image size is compiled separately, so that the grid is a plain number.
    how: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
    if not by_block:
        return cast(nn.Module, torch.compile(forward, **how))
    for block in cast(Any, getattr(forward, "blocks", ())):
        block.compile(**how)
    return forward
