"""Shared by all tests: threads, property tests, the demo run, the browser, and slow tests."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from playwright.sync_api import Browser, Page, sync_playwright

from command_line import Ended
from vit.cli import eval_main

# The models are so small that more threads would only wait for each other. Subprocesses inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# As in an environment that is activated.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

# The same examples in every run, however slow the machine.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

ROOT = Path(__file__).resolve().parent.parent
MAY_SKIP = "there is no accelerator|cifar-100-python is missing"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest applies -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests that need the demo's run as slow."""
    for item in items:
        if "demo" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if tests were skipped, with NO_SKIPS in the environment, that a CPU can run."""
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or "NO_SKIPS" not in os.environ:
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", ())}
    if others := [reason for reason in reasons if not re.search(MAY_SKIP, reason)]:
        reporter.write_line(f"NO_SKIPS: tests were skipped: {'; '.join(sorted(others))}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Draw the same numbers in each test, whichever ran before in this process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def event_files_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count TensorBoard's event files from 0 in each test, as in a process of its own.

    Their names end in the time in seconds, the process and this count, and are read in the order of
    their names, in which 10 comes before 9.
    """
    writer = sys.modules.get("tensorboard.summary.writer.event_file_writer")
    if writer is not None:
        monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Run eval.py with some words in this process, which has imported torch already."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, words)])
        code = 0
        try:
            eval_main()
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def few_test_images() -> Iterator[None]:
    """Test models with 200 drawn shapes instead of 2,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vit.data.shapes.TEST", 200)
        yield


@pytest.fixture(params=["written", "fused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let attention run as it is written, or on torch's fused kernel, whatever is faster."""
    fused = request.param == "fused"
    monkeypatch.setattr("vit.model.attention.uses_fused_kernel", lambda *kind: fused)
    return request.param


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the demo, with a quarter of its epochs, created by its command.

    What the command printed is beside it, in printed.txt.
    """
    base, environment = tmp_path_factory.getbasetemp(), dict(os.environ)
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # which the processes of this test run share
    else:
        del environment["OMP_NUM_THREADS"]  # nothing else runs meanwhile
    run = base / "demo" / "shapes"
    run.parent.mkdir(exist_ok=True)
    with FileLock(base / "demo.lock"):  # the first process creates it, the others wait
        if not (run / "model.safetensors").exists():
            words = ["--config", ROOT / "configs/shapes.yaml", "--out", run, "--train.epochs", "2"]
            ended = subprocess.run(
                [sys.executable, ROOT / "train.py", *words],
                check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                env=environment, timeout=900,
            )  # fmt: skip
            (run.parent / "printed.txt").write_text(ended.stdout)
    return run


@pytest.fixture(scope="module")
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Chromium, with further flags if a test names them."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        flags = FLAGS + getattr(request, "param", [])
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page; a test fails if anything in it complains."""
    page, complaints = browser.new_page(viewport={"width": 1280, "height": 800}), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda one: one.type == "error" and complaints.append(one.text))
    page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
    yield page
    page.close()
    assert not complaints
