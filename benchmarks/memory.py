"""Memory of processes; Linux only."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def memory(key: str, process: int | str = "self") -> float:
    """Return a value of /proc/PROCESS/status in MB: VmRSS is what it occupies, VmHWM the peak."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 1000


def in_new_process(work: Callable[..., Result], *arguments: object) -> Result:
    """Call a function in a process of its own, which inherits no memory from others."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()
