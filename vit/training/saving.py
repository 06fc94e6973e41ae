"""Writing the checkpoints of a run: one file by the first process, or a part by each of them."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from vit.distributed.world import World
from vit.run.checkpoint import Checkpoint, checkpoint_path, delete_others, save_checkpoint
from vit.run.sharded import finish_writing, read_tensors, start_writing, wait_for
from vit.training.optim import set_lr
from vit.training.state import COUNTS, TrainState


class Saver(Protocol):
    """Writes checkpoints; all processes call it.

    Attributes:
        step: Steps of the run when the last checkpoint was to be written.
    """

    step: int

    def save(self) -> None:
        """Save the state, or start to.

        Raises:
            OSError: The checkpoint could not be written.
        """

    def wait(self) -> None:
        """Wait until the last checkpoint is written; errors as for `save`."""


@dataclass
class FileSaver:
    """Writes the checkpoints of a run whose processes all have the whole state.

    Attributes:
        run: The run folder.
        state: The state of the run.
        about: The other fields of `Checkpoint`.
        world: The processes that train together; the first one writes.
    """

    run: Path
    state: TrainState
    about: dict[str, Any]
    world: World
    step: int = 0

    def save(self) -> None:
        """Write a checkpoint."""
        self.step = self.state.step
        if self.world.main:
            save_checkpoint(self.run, Checkpoint(**self.state.state_dict(), **self.about))

    def wait(self) -> None:
        """Do nothing: `save` has written it."""


@dataclass
class ShardedSaver:
    """Writes the checkpoints of a sharded run while training goes on.

    Attributes:
        run: The run folder, the same for all processes.
        state: The state of the run.
        about: The other fields of `Checkpoint`.
        world: The processes that train together; each writes its part, and the first one the rest.
    """

    run: Path
    state: TrainState
    about: dict[str, Any]
    world: World
    step: int = 0
    _pending: "Future[None] | None" = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _group: Any = field(default_factory=lambda: dist.new_group(backend="gloo"))

    def save(self) -> None:
        """Copy the state and start to write it; `wait` has been called for the one before."""
        assert self._pending is None
        self.step = self.state.step
        target = checkpoint_path(self.run, self.step)
        folder = target.with_name(f".{target.name}.tmp")
        points = torch.stack(self.state.points).tolist() if self.state.points else []
        counts = {name: getattr(self.state, name) for name in COUNTS}
        values = {**self.about, **counts, "points": points}
        if self.world.main:  # before torch's exchange, after which all processes write
            shutil.rmtree(folder, ignore_errors=True)
        writing = start_writing(folder, tensors_of(self.state), self._group)

        def finish() -> None:
            wait_for(writing)
            if self.world.main:
                finish_writing(folder, values, target)
                delete_others(self.run, target)

        self._pending = self._thread.submit(finish)

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def tensors_of(state: TrainState) -> dict[str, Tensor]:
    """Return all tensors of a state by name, the optimizers' by those of their parameters."""
    named: dict[Tensor, str] = {p: name for name, p in state.model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    parts = {"model": state.model, "ema": None if state.ema is None else state.ema.module}
    for part, module in parts.items():
        if module is not None:
            tensors |= {f"{part}.{name}": value for name, value in module.state_dict().items()}
    for number, optimizer in enumerate(state.optimizers):
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                tensors[f"optimizers.{number}.{key}.{named[parameter]}"] = value
    # Safetensors are read in slices, which a number has none of.
    return {name: value if value.ndim else value.view(1) for name, value in tensors.items()}


def load_folder(state: TrainState, checkpoint: Checkpoint) -> None:
    """Restore a state from a checkpoint that is a folder; called by all processes.

    The state may be sharded among any number of processes, or whole.

    Args:
        state: A new state; its settings stay.
        checkpoint: Without tensors.

    Raises:
        ValueError: It has other tensors than the state.
    """
    assert checkpoint.folder is not None
    set_lr(state.optimizers, 0.0)
    stepped = checkpoint.step > checkpoint.skipped
    for optimizer in state.optimizers if stepped else ():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # moves nothing, but makes the tensors of its state
        optimizer.zero_grad(set_to_none=True)
    read_tensors(checkpoint.folder, tensors_of(state))
    state.points = list(checkpoint.points.to(next(state.model.parameters()).device))
    for name in COUNTS:
        setattr(state, name, getattr(checkpoint, name))
