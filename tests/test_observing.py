"""What processes are doing, and who is named when others wait."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import HashStore

from small_runs import ROOT, Clock
from vit.distributed.watch import Activity, Doing, Watch
from vit.distributed.world import MEETING

LIMIT = 0.2


def slowly(clock: Clock, count: int, seconds: float) -> Iterator[int]:
    for number in range(count):
        clock.now += seconds
        yield number


def test_time_is_counted_for_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("vit.distributed.watch.time", clock)
    activity = Activity()
    with activity.doing("computing"):
        clock.now += 50  # before the start
        activity.start()
        for _ in activity.reading(slowly(clock, 2, 1)):
            assert activity.now == "computing"
            clock.now += 3
            with activity.doing("waiting for others"):
                clock.now += 5
            with activity.doing("not training"):
                clock.now += 7
        clock.now += 2
        assert activity.training_seconds() == 8 + 2 + 10
    clock.now += 4
    assert activity.now == "not training" and activity.training_seconds() == 20
    activity.start()
    assert activity.training_seconds() == 0


@contextlib.contextmanager
def watched(doing: dict[int, Doing], size: int, limit: float = LIMIT) -> Iterator[None]:
    """Watch processes that do the same for a long time; those not in `doing` do not answer."""
    store, watches = HashStore(), []
    for rank, what in doing.items():
        activity = Activity()
        activity.now, activity.step = what, 7
        watches.append(Watch(rank, size, store, activity, limit))
        watches[-1].start()
    yield
    for watch in watches:
        watch.stop()


def test_who_keeps_the_others_waiting_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    host, wait = socket.gethostname(), "waiting for others"
    for doing, size, named in (
        ({0: wait, 1: "reading images", 2: wait}, 3, f"process 1 reading images ({host});"),
        ({0: wait, 2: wait}, 3, "process 1 does not answer"),
        ({1: "computing", 2: wait, 3: wait}, 4, "process 0 does not answer"),
        # In operations of torch, those that wait seem to compute.
        ({0: "computing", 1: "computing", 2: "reading images"}, 3, "process 2 reading images"),
    ):
        lines: list[str] = []
        with watched(doing, size):  # type: ignore[arg-type]
            deadline = time.monotonic() + 60
            while not lines and time.monotonic() < deadline:
                time.sleep(LIMIT)
                lines = capsys.readouterr().err.splitlines()
            time.sleep(2 * LIMIT)
        (line,) = lines + capsys.readouterr().err.splitlines()
        assert line.startswith("warning: step 8: the other processes have waited")
        assert named in line and line.count("process ") == 1


@pytest.mark.parametrize(
    ("doing", "limit"),
    [
        ({0: "computing", 1: "computing"}, LIMIT),  # both compile the model
        ({0: "not training", 1: "waiting for others"}, LIMIT),  # the first one evaluates
        ({0: "waiting for others", 1: "reading images"}, 60),
    ],
)
def test_nobody_is_named(
    doing: dict[int, Doing], limit: float, capsys: pytest.CaptureFixture[str]
) -> None:
    with watched(doing, 2, limit):
        time.sleep(5 * LIMIT)
    assert capsys.readouterr().err == ""


def test_of_processes_that_fail_with_the_same_error_one_is_the_first() -> None:
    store = HashStore()
    first, second = (Watch(rank, 2, store, Activity()) for rank in range(2))
    assert first.failure() is None
    assert first.fail("no test/") and not second.fail("no test/")
    assert second.fail("my disk is gone")  # which the first does not say
    assert second.failure() == (0, socket.gethostname(), "no test/")


MEET = """
import sys, time
import torch
from vit.distributed.world import join_world
with join_world(torch.device("cpu"), timeout_minutes={minutes}) as world:
    if world.rank == 1:
        {second}
    {first}
"""


def start_pair(folder: Path, code: str) -> list[subprocess.Popen[str]]:
    """Start two processes that meet."""
    env = {**os.environ, "WORLD_SIZE": "2", MEETING: f"file://{folder}/meeting"}
    env |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**env, "RANK": rank}, stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip


@pytest.mark.slow
def test_a_process_that_hangs_ends_soon_after_another_failed(tmp_path: Path) -> None:
    second, first = "raise ValueError('my disk is gone')", "time.sleep(200)"
    hanging, failing = start_pair(tmp_path, MEET.format(minutes=5, first=first, second=second))
    assert "my disk is gone" in failing.communicate(timeout=100)[1]
    begin = time.monotonic()
    (line,) = hanging.communicate(timeout=60)[1].splitlines()
    assert hanging.returncode == 2 and time.monotonic() - begin < 30
    assert line.startswith("error: process 1 on ") and line.endswith(": my disk is gone")


@pytest.mark.slow
def test_a_process_gives_up_when_another_does_not_answer_in_time(tmp_path: Path) -> None:
    code = MEET.format(minutes=0.05, first="world.largest(torch.ones(1))", second="time.sleep(20)")
    waiting, sleeping = start_pair(tmp_path, code)
    errors = waiting.communicate(timeout=100)[1]
    assert waiting.returncode == 1 and sleeping.poll() is None
    assert "ConnectionLost: train.timeout_minutes: another process" in errors
    assert "not answered for 0.05 minutes; rerun the command to resume" in errors
    sleeping.kill()
    sleeping.communicate()
