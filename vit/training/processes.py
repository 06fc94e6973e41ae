"""Starting the processes of a run on a CPU: one per core, which share every batch.

Threads that share an operation wait for each other hundreds of times per step. Next to another busy
program, each wait can last until the scheduler runs the slowest thread again, and training slows to
a fraction of its speed. Processes that share a batch wait for each other once per step.
"""

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from vit.config import Config
from vit.hardware import choose_device, cores_to_use
from vit.run_folder import stored_config
from vit.training.distributed import MEETING, is_connection_lost, under_torchrun
from vit.training.trainer import train

FEWEST_IMAGES = 32  # of a batch for each process; with fewer, a step is mostly overhead
PATIENCE = 10  # seconds in which the other processes end after the first one, or after a failure
LEFT_ALONE = 70  # exit code of a process that ends because another one has
LOOPBACK = ("lo", "lo0")  # on Linux and macOS


def train_on_all_cores(
    config: Config, options: dict[str, bool], guard: Callable[[], AbstractContextManager[None]]
) -> None:
    """Train as `vit.training.trainer.train` does, in as many processes as the config asks for.

    This process is the first of them, so that it writes, prints, and ends with the exit code of the
    run.

    Args:
        config: The run.
        options: The other arguments of `train`.
        guard: Reports the errors of another process.

    Raises:
        ValueError: As for `train`, or another process was killed.
        SystemExit: As for `train`, or another process failed, after it has reported why.
    """
    if under_torchrun():
        train(config, **options)
        return
    stored = None if options["overwrite"] else stored_config(Path(config.out))
    count = choose_processes(config, stored, cores_to_use())
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, processes=count))
    torch.set_num_threads(max(1, cores_to_use() // count))
    if count == 1:
        train(config, **options)
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            MEETING: f"file://{folder}/meeting",
        }
        loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
        if loopback:  # the processes need no network
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        with _others(config, options, guard, count - 1):
            train(config, **options)


def choose_processes(config: Config, stored: dict[str, Any] | None, cores: int) -> int:
    """Return how many processes train a run.

    Args:
        config: The run.
        stored: The config of the run in its folder, or None if there is none.
        cores: Number of cores to compute on.

    Returns:
        `train.processes`, or else that of the stored run, or else the largest number up to `cores`
        that divides the batch into equal parts of at least `FEWEST_IMAGES`. On an accelerator, and
        where only the head is trained, a single process.

    Raises:
        ValueError: An accelerator was to be shared by several processes.
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
    if stored is not None:
        return stored["train"].get("processes") or 1  # which older versions do not name
    if not on_cpu or settings.freeze == "backbone":
        return 1
    parts = settings.batch_size // settings.accumulate
    fitting = (n for n in range(1, cores + 1) if parts % n == 0 and parts >= FEWEST_IMAGES * n)
    return max(fitting, default=1)


@contextlib.contextmanager
def _others(
    config: Config,
    options: dict[str, bool],
    guard: Callable[[], AbstractContextManager[None]],
    count: int,
) -> Iterator[None]:
    """Run all processes but the first while the first does something."""
    # A copy of this process has imported everything. Elsewhere, copies are not safe.
    method = "fork" if sys.platform == "linux" else "spawn"
    context = start_processes(
        _work, (config, options, guard), count, join=False, start_method=method
    )
    try:
        yield
    except RuntimeError as error:
        if is_connection_lost(error):
            _report_end(context.processes)
        raise
    finally:
        for process in context.processes:
            process.join(PATIENCE)
            process.kill()


def _work(
    index: int,
    config: Config,
    options: dict[str, bool],
    guard: Callable[[], AbstractContextManager[None]],
) -> None:
    """Train as one of the other processes; the first has number 0."""
    os.environ |= {"RANK": str(index + 1), "LOCAL_RANK": str(index + 1)}
    torch.set_num_threads(max(1, cores_to_use() // (config.train.processes or 1)))
    try:
        with guard():
            train(config, **options)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_connection_lost(error):
            raise SystemExit(LEFT_ALONE) from None
        traceback.print_exc()
        raise SystemExit(1) from None


def _report_end(processes: list[BaseProcess]) -> None:
    """Raise an error that says how another process has ended; return if none has."""
    wait([process.sentinel for process in processes], PATIENCE)
    for process in processes:
        process.join(PATIENCE)
    for number, process in enumerate(processes, start=1):
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            raise ValueError(
                f"train.processes: process {number} was ended by {name}; rerun the command to "
                "resume, and if memory runs out, use fewer --train.processes"
            ) from None
    for process in processes:
        if process.exitcode not in (None, 0, LEFT_ALONE):
            raise SystemExit(process.exitcode) from None  # it has said why
