"""The processes that share the batches of a run, and the communication between them.

`vit.distributed.launch` or torchrun starts them, and describes them in the environment variables
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from vit.console import rank

MEETING = "VIT_INIT_METHOD"  # where processes that torchrun did not start find each other


@dataclass(frozen=True)
class World:
    """The processes that train one model together."""

    rank: int = 0  # of this process, 0 to size - 1
    size: int = 1  # number of processes

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

    def agree(self, value: Any) -> Any:
        """Return the main process's value in all processes."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    @contextlib.contextmanager
    def main_first(self) -> Iterator[dict[str, Any]]:
        """Let the main process do something before the others, such as downloading files.

        The main process fills the dictionary, and the others get it filled.

        Raises:
            SystemExit: In the other processes, with 2 if the main process fails with a ValueError
                or OSError; it alone reports the problem.
        """
        shared: dict[str, Any] | None = {} if self.main else self.agree(None)
        if shared is None:
            raise SystemExit(2)
        try:
            yield shared
        except (ValueError, OSError):
            if self.main:
                self.agree(None)
            raise
        if self.main:
            self.agree(shared)


def under_torchrun() -> bool:
    """Tell whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class ConnectionLost(Exception):
    """Another process of the run has ended, or has not answered in time."""


@contextlib.contextmanager
def join_world(device: torch.device, timeout_minutes: float) -> Iterator[World]:
    """Connect to the other processes of the run, and wait at most `timeout_minutes` for each.

    Raises:
        ConnectionLost: On leaving, if the code inside failed because another process did.
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
    store = next(rendezvous(os.environ.get(MEETING, "env://"), rank(), size, timeout=timeout))[0]
    store.set_timeout(timeout)
    store = PrefixStore(f"start {restarts}", store)
    try:
        dist.init_process_group(backend, None, timeout, size, rank(), store)
        yield World(rank(), size)
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
