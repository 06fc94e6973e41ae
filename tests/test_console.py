"""Messages reach the terminal, and a full disk does not end a run."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vit.console import counted, is_out_of_memory


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_full_disk_ends_nothing() -> None:
    program = (
        "import sys\n"
        "from vit.console import say, warn\n"
        "say('a')\n"
        "warn('b')\n"
        "import os; os._exit(7)\n"  # without the flush of a normal end
    )
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=full)
    assert done.returncode == 7


def test_errors_of_memory_are_known() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_nouns_are_plural_unless_there_is_one() -> None:
    assert [counted(n, "image", ",") for n in (1, 2000)] == ["1 image", "2,000 images"]
    assert [counted(n, "epoch", ".4g") for n in (0.5, 1.0)] == ["0.5 epochs", "1 epoch"]
    assert counted(1000, "worker") == "1000 workers"
