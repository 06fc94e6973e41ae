"""The processes that share the batches of a run: their communication, and how they end early.

`vit.distributed.launch` or torchrun starts them, and describes them in the environment variables
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
"""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from vit.console import rank

MEETING = "VIT_INIT_METHOD"  # where processes that torchrun did not start find each other
STOPPING = (signal.SIGINT, signal.SIGTERM)
RUNS = itertools.count()  # of this process: torchrun's store outlives a run
STARTED: list[BaseProcess] = []  # processes that this one has started for the run
LONGEST_WAIT = timedelta(days=10)  # of other processes while the main one reads images
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class World:
    """The processes that train one model together."""

    rank: int = 0  # of this process, 0 to size - 1
    size: int = 1  # number of processes
    patient: Any = None  # a group of all processes, in which they wait for each other longer

    @property
    def main(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def part(self, batch: Tensor) -> Tensor:
        """Return this process's part of a batch, whose length is a multiple of `size`."""
        return batch.chunk(self.size)[self.rank]

    def average(self, tensors: list[Tensor]) -> None:
        """Average tensors of one dtype over the processes, in place and in one exchange.

        They are added in the same order at every step, so that a resumed run repeats an
        uninterrupted one. DistributedDataParallel reorders gradients after its first step.
        """
        if self.size > 1:
            mean = torch.cat([tensor.flatten() for tensor in tensors])
            dist.all_reduce(mean)
            parts = mean.div_(self.size).split([tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def largest(self, values: Tensor) -> Tensor:
        """Take the maximum of values over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def agree(self, value: Any, group: Any = None) -> Any:
        """Return the main process's value in all processes."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    def share(self, tensor: Tensor) -> Tensor:
        """Fill a tensor on the CPU with that of the main process, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    @contextlib.contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process do something before the others, however long it takes.

        Raises:
            SystemExit: In the other processes, with 2 if the main process fails with a ValueError
                or OSError, or is stopped; it alone reports the problem.
        """
        if not self.main and not self.agree(None, self.patient):
            raise SystemExit(2)
        try:
            yield
        except (ValueError, OSError, Stopped):
            if self.main:
                with contextlib.suppress(RuntimeError):  # the others may have ended, too
                    self.agree(False, self.patient)
            raise
        if self.main:
            self.agree(True, self.patient)


def under_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class ConnectionLost(ValueError):
    """Another process of the run has ended, or has not answered in time."""


@contextlib.contextmanager
def join_world(device: torch.device, timeout_minutes: float) -> Iterator[World]:
    """Connect to the other processes of the run, and wait at most `timeout_minutes` for each.

    Raises:
        ConnectionLost: Another process did not join, or the code inside failed because it ended.
        ValueError: The network interface through which the processes communicate is down.
    """
    size, backend = int(os.environ.get("WORLD_SIZE", "1")), "gloo"
    if size == 1:
        yield World()
        return
    if device.type != "cpu":
        local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if local >= count:
            raise ValueError(
                f"torchrun --nproc_per_node: more than the {count} accelerators of this machine; "
                "start one process for each"
            )
        torch.accelerator.set_device_index(local)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    timeout = timedelta(minutes=timeout_minutes)
    # torchrun's store still has the addresses of the processes before a restart (pytorch/pytorch
    # issue 135712). The number of restarts differs between hosts, so it only helps on a single one.
    one_host = os.environ.get("GROUP_WORLD_SIZE") == "1"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
    try:
        meeting = os.environ.get(MEETING, "env://")
        store = next(rendezvous(meeting, rank(), size, timeout=timeout))[0]
        store.set_timeout(timeout)
        store = PrefixStore(f"start {restarts}, run {next(RUNS)}", store)
        _meet(store, size, timeout)
        dist.init_process_group(backend, None, timeout, size, rank(), store)
        patient = dist.new_group(timeout=LONGEST_WAIT, backend="gloo")
        yield World(rank(), size, patient)
    except Exception as error:
        message = str(error).lower()
        is_gloo = isinstance(error, RuntimeError) and "gloo" in message
        if not isinstance(error, dist.DistError) and not is_gloo:
            raise
        if "unable to find address" in message:
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "of this host")
            raise ValueError(
                f"train.processes: the network interface {interface}, through which the processes "
                "communicate, is down or missing; bring it up, or use --train.processes 1"
            ) from error
        problem = "another process of the run has ended, or its machine"
        if "timed out" in message:
            setting = "train.timeout_minutes"
            problem = f"{setting}: another process has not answered for {timeout_minutes:g} minutes"
        hint = "rerun the command to resume, without --overwrite"
        raise ConnectionLost(f"{problem}; {hint}") from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(store: PrefixStore, size: int, timeout: timedelta) -> None:
    """Announce this process in the store, and wait for those that it has started.

    Unlike the connecting that follows, this can be interrupted, and notices if a process ends.
    """
    store.set(f"process {rank()}", "is there")
    keys = [f"process {number}" for number in range(size)]
    end = time.monotonic() + timeout.total_seconds()
    while STARTED and not store.check(keys):
        if any(process.exitcode is not None for process in STARTED):
            raise dist.DistError("a process has ended")
        if time.monotonic() > end:
            raise dist.DistError("timed out")
        time.sleep(0.05)


class Stopped(BaseException):
    """A signal asked the process to stop; like KeyboardInterrupt, this is not an error."""


class Diverged(Exception):
    """Loss, gradient or weights are not finite, and the run gives up."""


class StopRequest:
    """Whether a signal has asked this process to stop: its number, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        self.handlers: dict[int, Any] = {}  # before this one
        self._deferred = False
        self._process = os.getpid()

    def agreed(self, world: World) -> bool:
        """Return whether any process was asked to stop; all processes call this between steps."""
        # A signal that arrives during the exchange counts at the next step, in all processes.
        heard = int(world.largest(torch.tensor(self.signal)))
        self.signal = heard or self.signal
        return heard != 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record a signal, for `agreed`; one after its last call raises Stopped on exit."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.signal:
            raise Stopped

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Raise Stopped at a signal, or at once if one was recorded, even inside `deferred`."""
        before, self._deferred = self._deferred, False
        try:
            if self.signal:
                raise Stopped
            yield
        finally:
            self._deferred = before

    def until(self, batches: Iterator[Batch], world: World) -> Iterator[Batch]:
        """Yield batches until a signal arrives; a single process does not await another batch."""
        with contextlib.suppress(Stopped):
            while True:
                self._deferred = world.size > 1  # several save their state together, after a step
                batch = None if self.agreed(world) else next(batches, None)
                self._deferred = True
                if batch is None:
                    return
                yield batch

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the first signal; a second one ends the run immediately.

        A single process may be that of a notebook, so a second Ctrl-C does there what it did before
        the run: KeyboardInterrupt. Processes that wait for each other would not raise it. torchrun
        forwards signals that its processes have already received, so under torchrun a second signal
        is ignored; torchrun itself ends processes that take too long.
        """
        if os.getpid() != self._process:
            return  # a worker that has just been forked leaves signals to its parent
        second: Any = signal.SIG_IGN if under_torchrun() else signal.SIG_DFL
        alone = not under_torchrun() and os.environ.get("WORLD_SIZE", "1") == "1"
        for stopping in STOPPING:
            before = self.handlers[stopping]
            signal.signal(stopping, before if alone and callable(before) else second)
        self.signal = number
        if not self._deferred:
            raise Stopped
        typed = not under_torchrun() and number == signal.SIGINT
        hint = "; press Ctrl-C again to stop immediately" if typed else ""
        if rank() == 0:
            with contextlib.suppress(OSError):  # not print, which the signal may have interrupted
                os.write(2, f"\nfinishing this step{hint}\n".encode())


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Treat SIGINT and SIGTERM as requests to stop, in the main thread, which alone gets them."""
    request = StopRequest()
    try:
        if threading.current_thread() is threading.main_thread():
            request.handlers = {number: signal.getsignal(number) for number in STOPPING}
            for stopping in STOPPING:
                signal.signal(stopping, request.handle)
        yield request
    finally:
        for number, handler in request.handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
