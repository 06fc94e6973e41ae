"""Writing the checkpoints of a run: one file by the first process, or a part by each of them."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from vit.distributed.world import World
from vit.run.checkpoint import Checkpoint, checkpoint_path, delete_others, save_checkpoint
from vit.run.sharded import finish_writing, start_writing, wait_for


class State(Protocol):
    """What a checkpoint contains; see `vit.training.state.TrainState`."""

    step: int

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as fields of `Checkpoint`."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights and the state of the optimizers by name, perhaps sharded."""

    def counts(self) -> dict[str, Any]:
        """Return everything else, as fields of `Checkpoint` and as JSON."""


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
    state: State
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
    state: State
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
        values = {**self.about, **self.state.counts()}
        if self.world.main:  # before torch's exchange, after which all processes write
            shutil.rmtree(folder, ignore_errors=True)
        writing = start_writing(folder, self.state.tensors(), self._group)

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
