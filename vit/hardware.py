"""The device a run computes on and its precision; cores, threads and memory."""

import contextlib
import ctypes
import getpass
import itertools
import math
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from vit.console import counted

T = TypeVar("T")
R = TypeVar("R")
# A forked process has imported everything already, but forking is safe on Linux only.
PROCESSES: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
CGROUP = Path("/sys/fs/cgroup")  # the limits of containers and jobs on Linux
OWN_GROUPS = Path("/proc/self/cgroup")
# Files with limits in version 2 of control groups, and in version 1.
CPU_LIMITS = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
MEMORY_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

# Before torch 2.13, its compiler, which even an optimizer imports, needs the name of the user.
try:
    getpass.getuser()
except (KeyError, OSError):  # in a container
    os.environ["USER"] = f"uid_{os.getuid()}"


def choose_device(name: str) -> torch.device:
    """Return the device with a name: "cpu", "cuda", "mps", "xpu"; "auto" prefers an accelerator.

    For "cpu", torch gets no more threads than this process may use: it does not know the limits of
    containers.

    Raises:
        ValueError: This machine does not have the device.
    """
    name, accelerator = str(name), torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    name = available[0] if name == "auto" else name
    if name not in available:
        names = " or ".join(["auto", *available])
        raise ValueError(f"device: {name} is not available on this machine; it must be {names}")
    if name == "cpu":
        most = usable_cores()
        if most < torch.get_num_threads():
            torch.set_num_threads(most)
    return torch.device(name)


def has_native_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware multiplies bfloat16 matrices faster than float32 ones."""
    if device.type == "cpu":
        # The oldest supported releases of torch do not report it; they take float32.
        capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        # Intel's AVX-512 multiplies bfloat16 at half the speed of float32.
        other_vendor = "Intel" not in capabilities.get("cpu_name", "")
        avx512 = capabilities.get("avx512_bf16", False) and other_vendor
        return avx512 or capabilities.get("amx_bf16", False)
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        return bool(module.is_bf16_supported(including_emulation=False))
    return False  # MPS does not report it


def choose_precision(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of matrix products; "auto" is bfloat16 where the hardware is fast at it.

    Raises:
        ValueError: The name is unknown.
    """
    if name == "auto":
        name = "bfloat16" if has_native_bfloat16(device) else "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ValueError(f"precision: {name} is not allowed; it must be auto, {', '.join(dtypes)}")
    return dtypes[name]


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """Return the context in which matrix products run in a precision."""
    return torch.autocast(device.type, precision, enabled=precision != torch.float32)


def describe(device: torch.device) -> str:
    """Return a readable name of the device, such as "CPU with 2 threads"."""
    if device.type == "cpu":
        return f"CPU with {counted(torch.get_num_threads(), 'thread')}"
    if device.type == "mps":
        return "Apple GPU (MPS)"
    return str(torch.get_device_module(device).get_device_name(device))


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; limits of its groups count."""
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows
        return os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0))
    for group, files in itertools.product(_control_groups("cpu"), CPU_LIMITS):
        with contextlib.suppress(OSError, ValueError):  # there is no limit
            quota, period = _numbers(group, *files)
            cores = min(cores, math.ceil(quota / period) if quota > 0 else cores)
    return cores


def _control_groups(controller: str) -> list[Path]:
    """Return the folders of the control groups of this process, and of the groups around them."""
    groups = [CGROUP]
    with contextlib.suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CGROUP / controller if controllers else CGROUP  # of version 1, or 2
            inside = root / path.lstrip("/")  # not there if a container sees its own group only
            groups += [at for at in (inside, *inside.parents) if at.is_relative_to(root)]
    return groups


def _numbers(folder: Path, *files: str) -> list[int]:
    return [int(word) for file in files for word in (folder / file).read_text().split()]


def local_processes() -> int:
    """Return the number of processes on this machine that train together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_to_use() -> int:
    """Return the number of cores to compute on: OMP_NUM_THREADS, or else all usable ones."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is one per level
    return min(usable_cores(), int(limit)) if limit.isdecimal() and int(limit) else usable_cores()


def free_memory() -> int:
    """Return the memory that is free for this process, in bytes; limits of its groups count."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # macOS and Windows
        return 8 * 10**9
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    for group, (*files, cache) in itertools.product(_control_groups("memory"), MEMORY_LIMITS):
        with contextlib.suppress(OSError, ValueError, KeyError):  # there is no limit
            limit, used = _numbers(group, *files)
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            free = min(free, max(0, limit - used + int(stat[cache])))  # files that can be dropped
    return free


def keep_freed_memory() -> None:
    """Let the C library keep up to 2 GB of freed memory, instead of returning it to the system.

    Otherwise a process may return the activations of each step and ask for them again in the next,
    where each page costs a fault: up to a fifth of the time of training on a CPU.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc has this, others do not
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that it takes
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextlib.contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Limit torch to `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def map_on_cores(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Apply a function to items, each thread to one at a time; return the results in order.

    torch divides every operation among the cores and waits for all of them, which costs small
    models more than it saves. Here each thread computes on one core, and all are waited for once.
    A single thread is the calling one, with all of its cores. At most two items per thread are in
    memory, and the calling thread takes them from their iterator.
    Modes of torch (`no_grad`, autocast) belong to a thread: `work` sets those that it needs.
    """
    if threads == 1:
        return [work(item) for item in items]
    results: list[R] = []
    pending: deque[Future[R]] = deque()
    with (
        on_cores(1),
        ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        for item in items:
            if len(pending) == 2 * threads:
                results.append(pending.popleft().result())
            pending.append(pool.submit(work, item))
        return results + [future.result() for future in pending]
