"""Writing the checkpoints of a run: one file by the first process, or a part by each of them."""

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vit.distributed.world import World
from vit.run.checkpoint import Checkpoint, checkpoint_path, delete_others, save_checkpoint
from vit.run.sharded import finish_writing, start_writing, wait_for


class Saver:
    """Writes checkpoints; all processes call it.

    Where each process has the whole state, the first one writes a file. Of a sharded state, each
    process writes its part while training goes on.

    Args:
        run: The run folder, the same for all processes.
        state: The state of the run, see `vit.training.state.TrainState`.
        about: The other fields of `Checkpoint`.
        world: The processes that train together.
        sharded: Whether each process has a part of the state.

    Attributes:
        step: Steps of the run when the last checkpoint was to be written.
    """

    def __init__(
        self, run: Path, state: Any, about: dict[str, Any], world: World, sharded: bool = False
    ) -> None:
        self.run, self.state, self.about, self.world = run, state, about, world
        self.step = 0
        self._pending: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1)
        self._group: Any = dist.new_group(backend="gloo") if sharded else None

    def save(self) -> None:
        """Save the state; if it is sharded, copy it and start to write it, after `wait`.

        Raises:
            OSError: The checkpoint could not be written.
        """
        self.step = self.state.step
        if self._group is None:
            if self.world.main:
                save_checkpoint(self.run, Checkpoint(**self.state.state_dict(), **self.about))
            return
        assert self._pending is None
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
        """Wait until the last checkpoint is written; errors as for `save`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
