"""How fast each process of a run is, and what it waits for."""

import socket
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vit.distributed.activity import Activity
from vit.hardware import peak_memory

SLOW = 0.8  # fraction of the others' speed below which a process is named
SHORTEST = 5.0  # seconds of work below which its speed says little


class Observed(NamedTuple):
    """What a process did in an epoch.

    Attributes:
        seconds: Time of its training steps in which it did not wait for other processes.
        images_per_second: Its own speed in that time.
        reading: Fraction of the time of its training steps in which it waited for images, 0 to 1.
        waiting: Fraction of that time in which it waited for other processes.
        memory: The most memory it has used so far, in bytes: of its accelerator, or on a CPU of the
            process; 0 where the system does not tell.
        host: The name of its machine.
    """

    seconds: float
    images_per_second: float
    reading: float
    waiting: float
    memory: int
    host: str


def observe(activity: Activity, device: torch.device) -> Observed:
    """Summarize what this process did since `activity.start`.

    Args:
        activity: What the process did.
        device: Where it computed.
    """
    seconds, training = activity.seconds(), activity.training_seconds()
    own = training - seconds["waiting for others"]
    return Observed(
        own,
        activity.images / own,
        seconds["reading images"] / training,
        seconds["waiting for others"] / training,
        peak_memory(device),
        socket.gethostname(),
    )


def slow_processes(observed: Sequence[Observed]) -> list[int]:
    """Return the numbers of the processes that are much slower than the others' median."""
    speeds = [each.images_per_second for each in observed]
    return [
        number
        for number, speed in enumerate(speeds)
        if observed[number].seconds >= SHORTEST
        and speed < SLOW * statistics.median(speeds[:number] + speeds[number + 1 :])
    ]


def processes_text(observed: Sequence[Observed]) -> str:
    """Describe the processes of a run in one line: lowest and highest values, and who is slow."""
    speeds = [each.images_per_second for each in observed]
    text = (
        f"{len(observed)} processes: each alone {_span(speeds, ',.0f')} images/s   "
        f"reading {_span([100 * each.reading for each in observed], '.0f')} %   "
        f"waiting for others {_span([100 * each.waiting for each in observed], '.0f')} %   "
        f"memory up to {max(each.memory for each in observed) / 1e9:.1f} GB"
    )
    names = [f"process {n} on {observed[n].host}" for n in slow_processes(observed)]
    return f"{text}   slower than the others: {', '.join(names)}" if names else text


def processes_scalars(observed: Sequence[Observed]) -> dict[str, float]:
    """Return the curves of all processes, by tag."""
    return {
        tag: value
        for number, each in enumerate(observed)
        for tag, value in {
            f"processes/images_per_second/{number}": each.images_per_second,
            f"processes/reading_percent/{number}": 100 * each.reading,
            f"processes/waiting_percent/{number}": 100 * each.waiting,
            f"processes/memory_gb/{number}": each.memory / 1e9,
        }.items()
    }


def _span(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"
