"""One thread for each test: the models are tiny, and threads that wait for each other slow them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # commands that tests start inherit it

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's run folder, made by its command in a minute or two."""
    base, environment = tmp_path_factory.getbasetemp(), dict(os.environ)
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # which the processes of this test run share
    else:
        del environment["OMP_NUM_THREADS"]  # nothing else runs meanwhile
    run = base / "demo" / "shapes"
    run.parent.mkdir(exist_ok=True)
    with FileLock(base / "demo.lock"):  # the first process makes it, the others wait
        if not (run / "model.safetensors").exists():
            subprocess.run(
                [
                    sys.executable, str(ROOT / "train.py"), "--config",
                    str(ROOT / "configs/shapes.yaml"), "--out", str(run),
                ],
                check=True, capture_output=True, env=environment, timeout=900,
            )  # fmt: skip
    return run
