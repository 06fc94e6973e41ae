"""Processes that train together, started by tests."""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from small_runs import CPU, make_loop
from vit.commands.train import train
from vit.config import Config
from vit.distributed.world import MEETING, World, join_world
from vit.training.loop import Loop

# New processes are forked from one that has imported this, which takes seconds.
multiprocessing.set_forkserver_preload(["vit.commands.train", "timm.utils"])


def in_world(size: int, folder: Path, function: Callable[..., None], *values: Any) -> None:
    """Call function(world, *values) in `size` new processes that know each other.

    Args:
        size: Number of processes.
        folder: For the file through which they connect.
        function: Defined in a module; it raises what is wrong.
        *values: Its other arguments.
    """
    meeting = folder / f"meeting_{os.urandom(4).hex()}"
    given = (size, str(meeting), function, values)
    start_processes(_enter, given, size, start_method="forkserver")


def _enter(rank: int, size: int, meeting: str, function: Callable[..., None], values: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), MEETING: f"file://{meeting}",
        "LOCAL_WORLD_SIZE": os.environ.get("LOCAL_WORLD_SIZE", str(size)),
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    with join_world(CPU, timeout_minutes=2) as world:
        function(world, *values)
        if size > 1:
            dist.barrier()


def train_whole(world: World, config: Config) -> None:
    """Train to the end and write the report, as a command does, but in a world that exists."""
    with patch("vit.training.start.join_world", lambda *_: contextlib.nullcontext(world)):
        train(config)


def loop_of(config: Config, world: World, **how: Any) -> Loop:
    """Build the loop of a run without logs, resumed if it has a checkpoint, see `make_loop`."""
    Path(config.out).mkdir(exist_ok=True)
    return make_loop(config, world=world, **how)


def keep_losses(loop: Loop) -> dict[int, Tensor]:
    """Return a dictionary that gets the loss of every step, by the number of steps before it."""
    losses, save = dict[int, Tensor](), loop.write_checkpoint

    def keep() -> None:
        points = loop.step.state.points
        first = loop.step.state.step - len(points)
        losses.update({first + number: point[0] for number, point in enumerate(points)})
        save()

    loop.write_checkpoint = keep
    return losses
