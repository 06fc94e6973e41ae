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
import torch
from torch.distributed import HashStore

from small_runs import ROOT, Clock
from vit.distributed import world as distributed
from vit.distributed.activity import Activity, Doing
from vit.distributed.observe import (
    Observed,
    observe,
    processes_scalars,
    processes_text,
    slow_processes,
)
from vit.distributed.watch import Watch
from vit.distributed.world import MEETING

CPU = torch.device("cpu")
LIMIT = 0.2


def slowly(clock: Clock, count: int, seconds: float) -> Iterator[int]:
    for number in range(count):
        clock.now += seconds
        yield number


def test_time_is_counted_for_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("vit.distributed.activity.time", clock)
    activity = Activity()
    with activity.doing("computing"):
        clock.now += 50  # before the start
        activity.start()
        for _ in activity.reading(slowly(clock, 2, 1)):
            assert activity.now == "computing"
            activity.images += 8
            clock.now += 3
            with activity.doing("waiting for others"):
                clock.now += 5
            with activity.doing("not training"):
                clock.now += 7
        clock.now += 2
        assert activity.seconds() == {
            "computing": 8, "reading images": 2, "waiting for others": 10, "not training": 14
        }  # fmt: skip
        assert activity.training_seconds() == 20
        own = observe(activity, CPU)
    assert activity.now == "not training"
    assert own == Observed(10, 16 / 10, 2 / 20, 10 / 20, own.memory, socket.gethostname())
    activity.start()
    assert activity.images == 0 and not any(activity.seconds().values())


def test_an_activity_ends_with_an_error() -> None:
    activity = Activity()
    with pytest.raises(ValueError, match="boom"), activity.doing("waiting for others"):
        raise ValueError("boom")
    assert activity.now == "not training"


MEMORY = """
import torch
from vit.hardware import peak_memory
before = peak_memory(torch.device("cpu"))
block = torch.ones(2**28, dtype=torch.uint8)
print(before, len(block), peak_memory(torch.device("cpu")))
"""


def test_peak_memory_grows_with_what_is_used() -> None:
    """In a new process, because this one may have used more memory before than it does now."""
    words = [sys.executable, "-c", MEMORY]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    before, block, after = map(int, done.stdout.split())
    assert before > 10**7
    assert block / 2 < after - before < 2 * block


def seen(speed: float, host: str = "a", seconds: float = 60) -> Observed:
    return Observed(seconds, speed, 0.01, 0.2, 10**9, host)


def test_a_process_much_slower_than_the_others_is_named() -> None:
    assert slow_processes([seen(100), seen(90)]) == []
    assert slow_processes([seen(100), seen(70)]) == [1]
    assert slow_processes([seen(100), seen(50), seen(99), seen(101), seen(60)]) == [1, 4]
    assert slow_processes([seen(100), seen(70, seconds=4)]) == []
    text = processes_text([seen(1200), seen(700, "b"), seen(1150)])
    assert text == (
        "3 processes: each alone 700 to 1,200 images/s   reading 1 %   waiting for others 20 %   "
        "memory up to 1.0 GB   slower than the others: process 1 on b"
    )
    assert "slower" not in processes_text([seen(100), seen(99)])
    assert processes_scalars([seen(5), seen(7)])["processes/images_per_second/1"] == 7


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
        ({0: wait, 2: wait}, 3, "process 1 does not answer;"),
        ({1: "computing", 2: wait, 3: wait}, 4, "process 0 does not answer;"),
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


@pytest.mark.parametrize(("hosts", "restarts"), [("1", "3"), ("2", "0"), (None, "0")])
def test_restarted_processes_of_a_host_do_not_see_the_keys_of_earlier_ones(
    hosts: str | None, restarts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    if hosts is not None:
        monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
    assert distributed._number_of_restarts() == restarts


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
    code = MEET.format(minutes=0.05, first="world.collect(1)", second="time.sleep(20)")
    waiting, sleeping = start_pair(tmp_path, code)
    errors = waiting.communicate(timeout=100)[1]
    assert waiting.returncode == 1 and sleeping.poll() is None
    assert "ConnectionLost: train.timeout_minutes: another process" in errors
    assert "not answered for 0.05 minutes; rerun the command to resume" in errors
    sleeping.kill()
    sleeping.communicate()
