"""Starting the processes of a run on a CPU: one per core, which share every batch.

Threads that share an operation wait for each other hundreds of times per step, each time until the
scheduler runs the slowest one, so next to another busy program training slows to a fraction of its
speed. Processes that share a batch wait for each other once per step.
"""

import contextlib
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from typing import TypeAlias

import torch
from torch.multiprocessing.spawn import start_processes

from vit.console import rank
from vit.distributed.world import MEETING, STARTED, ConnectionLost, under_torchrun
from vit.hardware import PROCESSES, cores_to_use

PATIENCE = 10  # seconds in which the other processes end after the first one, or after a failure
LOOPBACK = ("lo", "lo0")  # on Linux and macOS
Errors: TypeAlias = "SimpleQueue[Exception]"


def launch(count: int, work: Callable[[], object]) -> None:
    """Call a function in `count` processes, of which this one is the first.

    Each process gets an equal part of the cores. This one writes, prints, and ends with the exit
    code of the run. torchrun starts processes itself: then this starts none.

    Raises:
        ValueError: Another process was killed, or has failed with this error.
    """
    if under_torchrun():
        try:
            work()
        except ConnectionLost:
            if rank() != 0:  # the first process alone reports it
                raise SystemExit(1) from None
            raise
        return
    threads = max(1, cores_to_use() // count)
    if count == 1:
        torch.set_num_threads(threads)
        work()
        return
    torch.set_num_threads(1)  # a copy of this process has none of its threads
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
        os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0")  # Kubernetes may have set others
        os.environ[MEETING] = f"file://{folder}/meeting"
        loopback = [name for _, name in socket.if_nameindex() if name in LOOPBACK]
        if loopback:  # the processes need no network
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        with _others(count - 1, threads, work):
            torch.set_num_threads(threads)
            work()


@contextlib.contextmanager
def _others(count: int, threads: int, work: Callable[[], object]) -> Iterator[None]:
    """Call `_run` in `count` other processes while this one, the first, runs the code inside."""
    try:
        errors: Errors = PROCESSES.SimpleQueue()
    except OSError as error:
        problem = f"several processes need a writable /dev/shm ({error})"
        raise ValueError(f"train.processes: {problem}; use --train.processes 1") from None
    method = PROCESSES.get_start_method()
    context = start_processes(_run, (errors, threads, work), count, join=False, start_method=method)
    STARTED.extend(context.processes)
    try:
        yield
    except ConnectionLost:
        _report_end(context.processes, errors)
        raise
    finally:
        STARTED.clear()
        try:
            for process in context.processes:
                process.join(PATIENCE)
        finally:  # also after a second signal
            for process in context.processes:
                process.kill()


def _run(index: int, errors: Errors, threads: int, work: Callable[[], object]) -> None:
    """Call a function in one of the other processes, and pass an error on to the first one."""
    os.environ |= {"RANK": str(index + 1), "LOCAL_RANK": str(index + 1)}
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # torch sends it when the first process has died
    torch.set_num_threads(threads)
    try:
        work()
    except Exception as error:
        if not isinstance(error, ConnectionLost):
            error.add_note(f"in process {index + 1}:\n{traceback.format_exc()}")
            errors.put(error)
        raise SystemExit(1) from None


def _report_end(processes: list[BaseProcess], errors: Errors) -> None:
    """Raise the error that ended another process, or one that says that it was killed."""
    wait([process.sentinel for process in processes], PATIENCE)
    if not errors.empty():
        raise errors.get() from None
    for number, process in enumerate(processes, start=1):
        process.join(PATIENCE)
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            raise ValueError(
                f"train.processes: process {number} was ended by {name}; rerun the command to "
                "resume, without --overwrite, and if memory runs out, use fewer --train.processes"
            ) from None
