"""One thread for all tests: the models are tiny, and threads that wait for each other slow them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands that tests start inherit it

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run folder, made by its command in a minute or two."""
    run = tmp_path_factory.mktemp("demo") / "shapes"
    everything = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run(
        [
            sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs/shapes.yaml"),
            "--out", str(run),
        ],
        check=True, capture_output=True, env=everything, timeout=900,
    )  # fmt: skip
    return run
