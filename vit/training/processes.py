"""Starting the processes of a run on a CPU: one per core, which share every batch.

Threads that share an operation wait for each other hundreds of times per step. Next to another busy
program, each wait can last until the scheduler runs the slowest thread again, and training slows to
a fraction of its speed. Processes that share a batch wait for each other once per step.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from vit.console import note, rank
from vit.hardware import choose_device, cores_to_use
from vit.model.pretrained import Source
from vit.model.timm_weights import TimmSource
from vit.run_folder import stored_config
from vit.training.config import Config
from vit.training.distributed import MEETING, ConnectionLost, under_torchrun
from vit.training.rules import check_processes
from vit.training.trainer import prepare, train, train_prepared

FEWEST_IMAGES = 32  # of a batch for each process; with fewer, a step is mostly overhead
PATIENCE = 10  # seconds in which the other processes end after the first one, or after a failure
LOOPBACK = ("lo", "lo0")  # on Linux and macOS


def train_on_all_cores(config: Config, **options: bool) -> None:
    """Train as `vit.training.trainer.train` does, in as many processes as the config asks for.

    This process is the first of them, so that it writes, prints, and ends with the exit code of the
    run.

    Args:
        config: The run.
        **options: The other arguments of `train`.

    Raises:
        ValueError: As for `train`, or another process was killed.
        SystemExit: As for `train`.
    """
    if under_torchrun():
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            options["overwrite"] = False  # what is there now is this run, from before the restart
        with _only_the_first_tells():
            train(config, **options)
        return
    stored = None if options["overwrite"] else stored_config(Path(config.out))
    count, fresh = (choose_processes(config, run, cores_to_use()) for run in (stored, None))
    if count != fresh:
        kept = "which it keeps when it is resumed"
        note(f"number of processes of the run: {count}, {kept}; a new run would have {fresh}")
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, processes=count))
    threads = max(1, cores_to_use() // count)
    if count == 1:
        torch.set_num_threads(threads)
        train(config, **options)
        return
    check_processes(config, count)
    torch.set_num_threads(1)  # a copy of this process has none of its threads
    config, source = prepare(config, options["overwrite"])
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            MEETING: f"file://{folder}/meeting",
        }
        loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
        if loopback:  # the processes need no network
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        with _others(count - 1, threads, config, source, options):
            torch.set_num_threads(threads)
            train_prepared(config, source, **options)


def choose_processes(config: Config, stored: dict[str, Any] | None, cores: int) -> int:
    """Return how many processes train a run.

    Args:
        config: The run.
        stored: The config of the run in its folder, or None if there is none.
        cores: Number of cores to compute on.

    Returns:
        `train.processes`, or else that of the stored run, or else the largest number up to `cores`
        that divides the batch into equal parts of at least `FEWEST_IMAGES`, an even number if they
        are mixed in pairs. On an accelerator, and where only the head is trained, a single process.

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
    if not on_cpu:
        return 1
    if stored is not None:
        return stored["train"].get("processes") or 1  # which older versions do not name
    if settings.freeze == "backbone":
        return 1
    parts = settings.batch_size // settings.accumulate
    group = 2 if config.augment.mixes else 1  # images that one process needs together
    fitting = (
        n
        for n in range(1, cores + 1)
        if parts % n == 0 and parts >= FEWEST_IMAGES * n and settings.batch_size // n % group == 0
    )
    return max(fitting, default=1)


@contextlib.contextmanager
def _others(count: int, *work: Any) -> Iterator[None]:
    """Run all processes but the first while the first does something.

    Args:
        count: Number of other processes.
        *work: The arguments of `_work`.
    """
    # A copy of this process has imported everything. Elsewhere, copies are not safe.
    method = "fork" if sys.platform == "linux" else "spawn"
    errors: SimpleQueue[Exception] = multiprocessing.get_context(method).SimpleQueue()
    context = start_processes(_work, (errors, *work), count, join=False, start_method=method)
    try:
        yield
    except ConnectionLost as error:
        _report_end(context.processes, errors)
        raise ValueError(str(error)) from None
    finally:
        for process in context.processes:
            process.join(PATIENCE)
            process.kill()


def _work(
    index: int,
    errors: "SimpleQueue[Exception]",
    threads: int,
    config: Config,
    source: Source | TimmSource | None,
    options: dict[str, bool],
) -> None:
    """Train as one of the other processes; the first has number 0.

    An error that the first process has as well is reported by that one, so it is only passed on.
    """
    os.environ |= {"RANK": str(index + 1), "LOCAL_RANK": str(index + 1)}
    torch.set_num_threads(threads)
    try:
        train_prepared(config, source, **options)
    except ConnectionLost:
        raise SystemExit(1) from None
    except Exception as error:
        error.add_note(f"in process {index + 1}:\n{traceback.format_exc()}")
        errors.put(error)
        raise SystemExit(1) from None


@contextlib.contextmanager
def _only_the_first_tells() -> Iterator[None]:
    """Let the first process alone tell what another one has not told; the others just end."""
    try:
        yield
    except ConnectionLost as error:
        if rank() != 0 or error.told:
            raise SystemExit(1) from None
        raise ValueError(str(error)) from None


def _report_end(processes: list[BaseProcess], errors: "SimpleQueue[Exception]") -> None:
    """Raise the error with which another process has ended, or that it was killed."""
    wait([process.sentinel for process in processes], PATIENCE)
    if not errors.empty():
        raise errors.get() from None
    for number, process in enumerate(processes, start=1):
        process.join(PATIENCE)
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            raise ValueError(
                f"train.processes: process {number} was ended by {name}; rerun the command to "
                "resume, and if memory runs out, use fewer --train.processes"
            ) from None
