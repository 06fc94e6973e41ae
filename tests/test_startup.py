"""Commands start without libraries that they do not need, and leave nothing on the terminal."""

import gc
import subprocess
import sys
from importlib.util import find_spec

import pytest

from vit.startup import import_quickly

# What takes seconds to import: torch's compiler, and what is only for figures and other data sets.
SLOW = {"torch._dynamo", "torchvision", "timm", "sklearn", "sympy", "triton"}
CHECK = """
import sys
from vit.startup import import_quickly
import_quickly(*{modules!r})
print(*sorted({slow!r} & sys.modules.keys()))
"""


def imported(modules: list[str], slow: set[str]) -> subprocess.CompletedProcess[str]:
    code = CHECK.format(modules=modules, slow=slow)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_garbage_is_collected_after_quick_imports():
    import_quickly("string")
    try:
        assert gc.isenabled() and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_a_photo_needs_no_slow_library():
    done = imported(["vit.reporting.photos"], {*SLOW, "matplotlib.figure", "tensorboard"})
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.slow
def test_a_report_needs_no_slow_library():
    done = imported(["vit.reporting.report"], SLOW)
    assert (done.stdout.strip(), done.stderr) == ("", "")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_what_was_imported_quickly_is_not_reported_as_a_leak():
    done = imported(["torch", "triton"], {"triton"})
    assert (done.stdout.strip(), done.stderr) == ("triton", "")
