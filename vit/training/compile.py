"""Whether a run's model is compiled by torch.compile, which takes time that long runs win back.

The choice is stored in the checkpoints: a resumed run goes on as it began.
"""

import dataclasses
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from vit.console import say
from vit.distributed.shard import is_sharded, replicate
from vit.hardware import local_processes
from vit.model.variants import is_edited
from vit.parallel import on_cores
from vit.training.start import Run
from vit.training.step import TrainingStep

# Compiling takes half a minute to a minute for each image size and saves about an eighth of a step.
MANY_STEPS = 5_000  # from which auto compiles
COMPILABLE = ("cpu", "cuda", "xpu")  # devices for which auto compiles
CXX = {"darwin": "clang++", "win32": "cl"}  # what torch calls where CXX does not name a compiler


def compile_step(run: Run, step: TrainingStep, steps: int) -> TrainingStep:
    """Compile a step if the run is long enough to benefit; accelerators average gradients in it."""
    world, choice = run.world, run.config.train.compile
    began = None if run.checkpoint is None else run.checkpoint.environment.get("compiled")
    with world.main_first():
        wanted = choose_compilation(choice, began, run.device, run.precision, steps)
    wanted = world.agree(wanted)
    exchanges = world.size > 1 and run.device.type != "cpu"  # during the backward pass
    sharded, forward = is_sharded(step.forward), step.forward
    if wanted:
        if world.main:
            say("compiling the model in the first steps, which takes a minute or two once")
        # What torch fails to compile runs as it is, unless compilation was asked for.
        torch._dynamo.config.suppress_errors = choice == "auto"
        forward = compiled(forward, by_block=exchanges or sharded)
    if exchanges and not sharded:
        forward = replicate(forward, unused=is_edited(run.config.model.attention))
    return dataclasses.replace(step, forward=forward, compiled=wanted)


def choose_compilation(
    choice: bool | str, began: bool | None, device: torch.device, precision: torch.dtype, steps: int
) -> bool:
    """Decide whether to compile the model of a run; `began` says how a resumed run began.

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
    if isinstance(wanted, bool):  # else "auto"
        return wanted
    # In float32, nearly all of a CPU's time goes into matrix products, which stay what they are.
    gains = device.type in COMPILABLE and (device.type, precision) != ("cpu", torch.float32)
    return gains and steps >= MANY_STEPS and missing is None


def missing_tool(device: torch.device) -> str | None:
    """Name what torch.compile needs on a device and does not find, or return None."""
    if device.type != "cpu":
        return None if importlib.util.find_spec("triton") else "triton"
    if shutil.which(os.environ.get("CXX") or CXX.get(sys.platform, "g++")) is None:
        return "a C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (package python3-dev)"
    return None


@contextmanager
def evaluating() -> Iterator[None]:
    """Evaluate on the cores of all processes, while the others wait, and compile nothing."""
    cores = torch.get_num_threads() * local_processes()
    # Batches of evaluators have other sizes, and torch gives up compiling after a few.
    with on_cores(cores), torch.compiler.set_stance("force_eager"):
        yield


def compiled(forward: nn.Module, by_block: bool = False) -> nn.Module:
    """Compile a model; it draws the same random numbers as without compilation.

    By block, each encoder block is compiled on its own, in place, so that processes can exchange
    weights and gradients between blocks.
    """
    # Each image size is compiled separately, so that the grid is a plain number.
    options: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
    if not by_block:
        return cast(nn.Module, torch.compile(forward, **options))
    for block in cast(Any, getattr(forward, "blocks", ())):
        block.compile(**options)
    return forward
