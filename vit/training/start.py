"""Starting a run: device, processes and signals, the lock on its folder, and what it resumes."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vit.config import Config
from vit.console import is_out_of_memory, note
from vit.data.preprocess import Preprocess
from vit.distributed.stop import Diverged, Stopped, StopRequest, stop_on_signals
from vit.distributed.world import World, join_world, under_torchrun
from vit.hardware import choose_device, choose_precision, cores_to_use
from vit.model.variants import attention_code
from vit.pretrained.adapt import Pretrained, with_statistics
from vit.run.checkpoint import Checkpoint, checkpoint_steps
from vit.run.folder import check_run, lock_run, stored_config
from vit.training.checks import check_config, check_processes

FEWEST_IMAGES = 32  # of a batch for each process; with fewer, a step is mostly overhead


@dataclass(frozen=True)
class Run:
    """What training needs to know: the config, the hardware, and where to resume from."""

    config: Config
    preprocess: Preprocess
    device: torch.device
    precision: torch.dtype = torch.float32  # of matrix products; or torch.bfloat16
    world: World = World()  # noqa: RUF009
    stop: StopRequest = field(default_factory=StopRequest)
    checkpoint: Checkpoint | None = None  # the state to resume from
    seconds: float = 0.0  # that have passed of a time budget

    def starting_from(self, checkpoint: Checkpoint | None, source: Pretrained | None) -> "Run":
        """Begin with a checkpoint or pretrained weights, whose images were normalized alike."""
        before = source if checkpoint is None else checkpoint.preprocess
        preprocess = with_statistics(self.preprocess, before)
        return dataclasses.replace(self, preprocess=preprocess, checkpoint=checkpoint)

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    def environment(self) -> dict[str, Any]:
        """Return what must not change when the run is resumed, besides its config."""
        environment = {
            "attention_code": attention_code(self.config.model),
            "processes": self.world.size,
            "device": self.device.type,
            "precision": str(self.precision),
        }
        if self.device.type == "cpu":  # where sums depend on their number
            environment["threads"] = torch.get_num_threads()
        return environment


@contextlib.contextmanager
def start_run(
    config: Config, source: Pretrained | None, overwrite: bool, allow_changes: bool
) -> Iterator[Run]:
    """Check the config, connect the processes, lock the folder, and decide whether to resume.

    Nothing is deleted yet. Signals, divergence and a lack of memory end the run with a message.
    """
    check_config(config)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not
    if config.deterministic or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.deterministic)  # imports torch's compiler
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    preprocess, checkpoint = Preprocess.from_config(config.data), None
    with (
        join_world(device, config.train.timeout_minutes) as world,
        # Not earlier: while the process waits for others, Python cannot run a signal handler.
        stop_on_signals() as stop,
        contextlib.ExitStack() as stack,
    ):
        run = Run(config, preprocess, device, precision, world, stop)
        stack.enter_context(explained(run, overwrite))
        with run.world.main_first():
            check_processes(run.config, world.size)
            if world.main:
                stack.enter_context(lock_run(run.folder))
                checkpoint = check_run(run.config, overwrite, run.environment(), allow_changes)
        yield run.starting_from(world.agree(checkpoint), source)


@contextlib.contextmanager
def explained(run: Run, overwrite: bool) -> Iterator[None]:
    """Turn signals and divergence into exit codes, and a lack of memory into one line."""
    try:
        yield
    except Stopped:
        advice = "to start over; nothing was saved"
        if steps := checkpoint_steps(run.folder):
            flags = "without --overwrite " if overwrite else ""
            advice = f"{flags}to resume after step {steps[-1]:,}"
        stop = signal.Signals(run.stop.signal)
        note(f"stopped by {stop.name}: rerun the command {advice}")
        raise SystemExit(128 + stop) from None
    except Diverged as error:  # in all processes, with the same numbers
        note(f"error: {error}")
        raise SystemExit(3) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        train = run.config.train
        raise ValueError(
            f"train.batch_size: out of memory with {train.batch_size} images per step "
            f"and train.accumulate={train.accumulate}; lower --train.batch_size, or "
            "raise --train.accumulate to compute each batch in smaller parts; --data.memory_gb 0 "
            "leaves images in their files"
        ) from None


def on_all_cores(config: Config, overwrite: bool) -> Config:
    """Fill in `train.processes`, see `choose_processes`, and check that they can share a batch."""
    if under_torchrun():
        return config
    stored = None if overwrite else stored_config(Path(config.out))
    count = choose_processes(config, stored, cores_to_use())
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, processes=count))
    check_processes(config, count)
    return config


def choose_processes(config: Config, stored: Config | None, cores: int) -> int:
    """Choose the number of processes of a run.

    The configured number; else the number in the config `stored` by an unfinished run; else the
    largest one up to `cores` that divides the batch into equal parts of at least `FEWEST_IMAGES`,
    of even size if images are mixed in pairs. A run on an accelerator, and one that trains the head
    alone, have a single process.
    """
    settings = config.train
    on_cpu = choose_device(settings.device).type == "cpu"
    if settings.processes is not None:
        if settings.processes > 1 and not on_cpu:
            raise ValueError(
                f"train.processes: {settings.processes} is only for a CPU; start a process for "
                f"each GPU with `torchrun --nproc_per_node {settings.processes} train.py ...`"
            )
        return settings.processes
    if stored is not None and on_cpu:
        return stored.train.processes or 1  # which older versions do not name
    if settings.freeze == "backbone" or not on_cpu:
        return 1
    parts = settings.batch_size // settings.accumulate
    group = 2 if config.augment.mixes else 1  # images that one process needs together
    most, size = min(cores, parts // FEWEST_IMAGES), settings.batch_size
    counts = (n for n in range(1, most + 1) if parts % n == 0 and size // n % group == 0)
    return max(counts, default=1)
