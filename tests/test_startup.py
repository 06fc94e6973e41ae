"""Commands start without libraries that they do not need."""

import subprocess
import sys

import pytest

# What takes seconds to import: torch's compiler, and what is only for figures and other data sets.
SLOW = {"torch._dynamo", "torchvision", "timm", "sklearn", "sympy", "triton"}
CHECK = f"""
import sys
import vit.training.config, vit.reporting.config, vit.cli
print("config", *({{"torch", "matplotlib", "tensorboard", *{SLOW}}} & sys.modules.keys()))
import vit.reporting.photos
print("photo", *({{"matplotlib.figure", "tensorboard", *{SLOW}}} & sys.modules.keys()))
import vit.reporting.report
print("report", *({SLOW} & sys.modules.keys()))
"""


PLUGIN = f"""
import sys
import vit.tensorboard_plugin.plugin
print("plugin", *({{"torch", "matplotlib", "PIL", *{SLOW}}} & sys.modules.keys()))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "printed"), [(CHECK, ["config", "photo", "report"]), (PLUGIN, ["plugin"])]
)
def test_nothing_imports_what_it_does_not_need(program: str, printed: list[str]) -> None:
    """So that a mistyped flag is answered at once, and TensorBoard starts as before."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (done.stdout.split(), done.stderr) == (printed, "")
