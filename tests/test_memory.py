"""What a step needs of memory is known before it is made."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from small_runs import command, small
from vit.checkpoint import build_model
from vit.config import Config
from vit.training import memory
from vit.training.memory import StepMemory, bytes_per_image, free_bytes, measure_step

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say")
def test_estimate_is_what_a_step_takes() -> None:
    """The peak of the process's memory grows with the batch as foretold."""
    program = (
        "import re, sys, torch\n"
        "import torch.nn.functional as F\n"
        "from vit.config import Config\n"
        "from vit.checkpoint import build_model\n"
        "torch.manual_seed(0)\n"
        "model, n = build_model(Config(), 10).train(), int(sys.argv[1])\n"
        "F.cross_entropy(model(torch.randn(n, 3, 32, 32)), torch.zeros(n).long()).backward()\n"
        # The peak that getrusage knows is that of the parent too.
        "print(1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]))\n"
    )
    peaks = [
        int(subprocess.run([sys.executable, "-c", program, n], capture_output=True).stdout)
        for n in ("128", "640")
    ]
    measured = (peaks[1] - peaks[0]) / 512
    estimated = bytes_per_image(build_model(Config(), 10), CPU, torch.float32)
    assert 0.6 < estimated / measured < 1.05  # it is a lower bound


def test_measuring_changes_nothing() -> None:
    model = build_model(Config(), 10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    bytes_per_image(model, CPU, torch.bfloat16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_weights_count_too() -> None:
    model = build_model(Config(), 10)
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    needed = measure_step(model, 3, CPU, torch.float32).needed
    assert needed == 4 * weights + 3 * bytes_per_image(model, CPU, torch.float32)


def test_memory_of_a_container_is_that_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 1500\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(CPU) > 10_000
    (tmp_path / "memory.max").write_text("4000\n")
    assert free_bytes(CPU) == 4000 - 3000 + 1500


def test_free_memory_is_that_of_this_machine() -> None:
    free = free_bytes(CPU)
    if not Path("/proc/meminfo").exists():
        assert free is None
        return
    (total,) = re.findall(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    assert free is not None and 0 < free < 1024 * int(total)


def test_batch_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    StepMemory(100, 10**9, 2 * 10**9).require()
    StepMemory(100, 10**9, None).require()
    words = (
        r"train\.batch_size: 100 images at a time need at least 3\.0 GB of memory, "
        r"2\.0 GB were free.*--train\.batch_size.*--train\.accumulate"
    )
    with pytest.raises(ValueError, match=words):
        StepMemory(100, 3 * 10**9, 2 * 10**9).require()


def test_only_errors_of_memory_are_explained() -> None:
    step = StepMemory(1, 10**9, None)
    words = r"out of memory; train\.batch_size: 1 images"
    with pytest.raises(ValueError, match=words), step.explained():
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), step.explained():
        torch.zeros(2, 3) @ torch.zeros(2, 3)


def test_command_that_runs_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    config = small(
        tmp_path / "run", model={"embed_dim": 192, "depth": 6}, data={"train_size": 1000},
        track={"probes": 0}, train={"batch_size": 1000, "accumulate": 1},
    )  # fmt: skip
    limit = 8 * 2**30  # of addresses; a process with torch has 4 GiB of them before it has begun
    done = subprocess.run(
        command(config, tmp_path / "config"), capture_output=True, text=True, timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "error: out of memory; train.batch_size: 1000 images at a time need" in done.stderr
    assert "--train.accumulate" in done.stderr and "Traceback" not in done.stderr
