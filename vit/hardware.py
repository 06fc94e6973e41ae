"""The device a run computes on, its precision, and what it cannot do; processes, cores, memory."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch

# What torch does not implement on a type of device. `device_for` names where to compute it instead.
MISSING = {"mps": frozenset({"float64", "eigh"})}


def choose_device(name: str) -> torch.device:
    """Return the device with a name.

    Args:
        name: "cpu", a type of accelerator ("cuda", "mps" or "xpu"), or "auto" for this machine's
            accelerator if it has one and the CPU otherwise.

    Raises:
        ValueError: This machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else [accelerator.type, "cpu"]
    if name == "auto":
        return torch.device(available[0])
    if name not in available:
        raise ValueError(
            f"device: {name} is not available on this machine; it must be auto or "
            f"{' or '.join(available)}"
        )
    return torch.device(name)


def device_for(feature: Literal["float64", "eigh"], device: torch.device) -> torch.device:
    """Return where to compute something: on the device, or on the CPU if the device cannot.

    Args:
        feature: float64 tensors or `torch.linalg.eigh`.
        device: Where the rest is computed.
    """
    return torch.device("cpu") if feature in MISSING.get(device.type, ()) else device


def has_native_bfloat16(device: torch.device) -> bool:
    """Tell whether the hardware multiplies bfloat16 matrices faster than float32 ones.

    MPS does not report it, so it counts as slower.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "xpu":
        return torch.xpu.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        # The oldest supported releases of torch do not report it; they take float32.
        capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))
    return False


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
        threads = torch.get_num_threads()
        return f"CPU with {threads} thread{'s' if threads != 1 else ''}"
    if device.type == "mps":
        return "Apple GPU (MPS)"
    return str(torch.get_device_module(device).get_device_name(device))


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of CPU cores that this process may use; limits of containers count.

    Args:
        root: Folder that contains proc/ and sys/ on Linux.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows
        return os.cpu_count() or 1
    limits = [len(os.sched_getaffinity(0))]
    for folder, version in _control_groups(root, "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if version == 1 else ("cpu.max",)
        with contextlib.suppress(OSError):  # there is no such group, or it has no limit
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if quota not in ("max", "-1"):
                limits.append(math.ceil(int(quota) / int(period)))
    return max(1, min(limits))


def local_processes() -> int:
    """Return the number of processes on this machine that train together."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_to_use() -> int:
    """Return the number of cores to compute on: OMP_NUM_THREADS, or else all usable ones."""
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list is one per level
    return min(usable_cores(), int(limit)) if limit.isdecimal() and int(limit) else usable_cores()


@contextlib.contextmanager
def cores_of_all_processes() -> Iterator[None]:
    """Compute on the cores of all processes of a run, while the others wait or have ended."""
    before = torch.get_num_threads()
    torch.set_num_threads(before * local_processes())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_memory(root: Path = Path("/")) -> int:
    """Return the memory that is free for this process, in bytes; limits of containers count.

    Where the system does not tell how much is free, this is the memory it has, and 8 GB where it
    does not tell that either (Windows).

    Args:
        root: Folder that contains proc/ and sys/ on Linux.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        names: dict[str, int] = getattr(os, "sysconf_names", {})
        pages = next((p for p in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES") if p in names), None)
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages else 8 * 10**9
    free = [1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))]
    for folder, version in _control_groups(root, "memory"):
        limit, used, cache = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            2: ("memory.max", "memory.current", "inactive_file"),
        }[version]
        with contextlib.suppress(OSError):  # there is no such group, or it has no limit
            most, now = (folder / limit).read_text().strip(), int((folder / used).read_text())
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            reclaimable = int(dict(pairs).get(cache, 0))
            if most != "max":
                free.append(max(0, int(most) - now + reclaimable))
    return min(free)


def _control_groups(root: Path, controller: str) -> list[tuple[Path, int]]:
    """List the folders of the control groups (Linux) of this process, with their version, 1 or 2.

    Args:
        root: Folder that contains proc/ and sys/.
        controller: "cpu" or "memory".
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        base = root / "sys/fs/cgroup" / (controller if version == 1 else "")
        group = base / path.strip("/")
        # In a container the path may be that of the host, of which only the root is visible.
        parts = (group, *group.parents)
        groups += [(folder, version) for folder in parts if folder.is_relative_to(base)]
    return groups
