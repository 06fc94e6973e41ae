"""Commands start without libraries that they do not need, and leave nothing on the terminal."""

import gc
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from vit.startup import eval_main, import_quickly, train_main

ROOT = Path(__file__).resolve().parent.parent
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


def test_ctrl_c_ends_the_imports_of_a_command_in_one_line(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("vit.startup.importlib.import_module", interrupted)
    for command in (train_main, eval_main):
        with pytest.raises(SystemExit) as ended:
            command()
        assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_little_is_imported_before_ctrl_c_is_handled():
    code = "import sys, train; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {*done.stdout.split()}
    assert "vit.startup" in names and not {"typing", "argparse", "yaml", "vit.cli"} & names


@pytest.mark.slow
def test_a_photo_needs_no_slow_library():
    done = imported(["vit.reporting.predictions"], {*SLOW, "matplotlib.figure", "tensorboard"})
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
