"""Choosing devices and precision; cores and memory, in containers as well."""

import getpass
import os
import platform
import runpy
import subprocess
import sys

import pytest
import torch

from vit import hardware
from vit.hardware import choose_device, choose_precision, free_memory, usable_cores

CPU = torch.device("cpu")


def test_auto_takes_the_accelerator(monkeypatch):
    device = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    assert choose_device("auto") == choose_device("mps") == device
    assert choose_device("cpu") == CPU


def test_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    for found, allowed in ((None, "auto or cpu$"), (torch.device("mps"), "auto or mps or cpu$")):
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda found=found, **_: found
        )
        with pytest.raises(ValueError, match=rf"^device: cuda is not .*must be {allowed}"):
            choose_device("cuda")


AMD, INTEL = "AMD EPYC", "Intel Xeon"


@pytest.mark.parametrize(
    ("cpu", "fast"),
    [
        ({}, False),
        ({"cpu_name": AMD, "avx512_bf16": True}, True),
        ({"cpu_name": AMD, "avx512_bf16": False}, False),
        ({"cpu_name": INTEL, "avx512_bf16": True, "amx_bf16": False}, False),
        ({"cpu_name": INTEL, "avx512_bf16": True, "amx_bf16": True}, True),
    ],
)
def test_auto_is_bfloat16_where_the_hardware_is_fast_at_it(cpu, fast, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: cpu, raising=False)
    for module in (torch.cuda, torch.xpu):
        monkeypatch.setattr(module, "is_bf16_supported", lambda including_emulation: fast)
    for name in ("cpu", "cuda", "xpu"):
        expected = torch.bfloat16 if fast else torch.float32
        assert choose_precision("auto", torch.device(name)) == expected
    assert choose_precision("auto", torch.device("mps")) == torch.float32
    assert choose_precision("bfloat16", CPU) == torch.bfloat16


FAULTS = """
import ctypes, resource, sys
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE, as huge pages have few faults
import torch
from vit.hardware import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    return len([torch.ones(5_000_000) for _ in range(4)])
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries differ")
def test_freed_memory_is_used_again_without_faults():
    """Each of five steps frees 80 MB, about 20,000 pages, which the library is told to return."""
    small = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), "100000")
    kept, returned = (
        int(subprocess.run(
            [sys.executable, "-c", FAULTS, how], check=True, stdout=subprocess.PIPE,
            env=os.environ | small,
        ).stdout)
        for how in ("keep", "return")
    )  # fmt: skip
    assert kept < 1000 < 10_000 < returned


def test_torch_keeps_to_the_limits_of_a_container(monkeypatch):
    with hardware.on_cores(2):
        for limit, threads in ((8, 2), (1, 1), (8, 1)):  # a user may want fewer
            monkeypatch.setattr(hardware, "usable_cores", lambda limit=limit: limit)
            choose_device("cpu")
            assert torch.get_num_threads() == threads


def test_a_user_of_a_container_who_has_no_name_gets_one(monkeypatch):
    def unknown(number: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "")
    runpy.run_path(hardware.__file__)
    assert getpass.getuser() == f"uid_{os.getuid()}"


@pytest.mark.parametrize(("version", "group"), [(2, ""), (2, "job"), (1, "job")])
def test_limits_of_containers_and_jobs_count(version, group, tmp_path, monkeypatch):
    """They stand in the group of a process or in one around it, in version 1 by controller."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "OWN_GROUPS", tmp_path / "own")
    every, free = len(os.sched_getaffinity(0)), free_memory()
    assert usable_cores() == every and 1e8 < free < 1e15
    own = f"/{group}/step" if group else "/"
    lines = [f"3:memory:{own}", f"2:cpu,cpuacct:{own}", "1:name=systemd:/"]
    (tmp_path / "own").write_text("\n".join(lines if version == 1 else [f"0::{own}"]))
    files = {"cpu.max": ("max 100000", "50000 100000"), "memory.max": ("max", "5000000")}
    used, cache = "memory.current", "inactive_file"
    if version == 1:
        files = {"cpu.cfs_quota_us": ("-1", "50000"), "cpu.cfs_period_us": ("100000", "100000")}
        files |= {"memory.limit_in_bytes": (str(2**63 - 4096), "5000000")}
        used, cache = "memory.usage_in_bytes", "total_inactive_file"
    files |= {used: ("0", "3000000"), "memory.stat": ("", f"anon 5\n{cache} 400000")}
    for limited in (False, True):
        for name, texts in files.items():
            controller = name.partition(".")[0] if version == 1 else ""
            path = tmp_path / controller / group / name
            path.parent.joinpath("step").mkdir(parents=True, exist_ok=True)
            path.write_text(f"{texts[limited]}\n")
        if not limited:
            assert usable_cores() == every and free_memory() > free / 2
    assert (usable_cores(), free_memory()) == (1, 2_400_000)
