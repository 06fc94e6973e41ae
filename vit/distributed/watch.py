"""What the processes of a run are doing: how fast each is, and which of them the others wait for.

Processes that train together wait for each other in every step. If one of them hangs, all do, and
none of their errors would say which one was the first. So a thread in each process watches it. The
threads meet in torch's key-value store, and only when something takes long.
"""

import contextlib
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, get_args

from torch.distributed.distributed_c10d import Store

from vit.console import printable, say, warn

T = TypeVar("T")

Doing = Literal["computing", "reading images", "waiting for others", "not training"]

SLOW = 0.8  # fraction of the others' speed below which a process is named
SHORTEST = 5.0  # seconds of work below which its speed says little
LIMIT = 60.0  # seconds that a process may wait for another before that one is named
PATIENCE = 10.0  # seconds in which a process has to end after another one has failed
FAILED = "failed"  # the key of what a process says that fails
SILENT = "does not answer"


class Activity:
    """What this process is doing, which another thread may ask.

    On an accelerator, this is what the Python thread does: it starts operations and goes on, so
    that time in which the device waits for other devices counts as computing.

    Attributes:
        now: The present activity; "not training" is everything outside of training steps.
        since: When it began, in seconds as `time.perf_counter` counts them.
        step: Optimizer steps done.
        images: Number of images that this process has trained on since `start`.
    """

    def __init__(self) -> None:
        self.now: Doing = "not training"
        self.step = 0
        self.start()

    def start(self) -> None:
        """Count time and images from zero."""
        self.images = 0
        self._ended: dict[Doing, float] = dict.fromkeys(get_args(Doing), 0.0)  # in seconds
        self.since = time.perf_counter()

    def seconds(self) -> dict[Doing, float]:
        """Return the time spent on each activity since `start`."""
        now = time.perf_counter() - self.since
        return {**self._ended, self.now: self._ended[self.now] + now}

    def training_seconds(self) -> float:
        """Return the time spent on training steps since `start`."""
        seconds = self.seconds()
        return sum(seconds.values()) - seconds["not training"]

    @contextlib.contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        """Name what the code inside does; afterwards the process does again what it did before."""
        before = self.now
        self._change(what)
        try:
            yield
        finally:
            self._change(before)

    def reading(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches; the time until each of them is there counts as reading."""
        iterator = iter(batches)
        while True:
            with self.doing("reading images"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def _change(self, what: Doing) -> None:
        now = time.perf_counter()
        self._ended[self.now] += now - self.since
        self.now, self.since = what, now


class Observed(NamedTuple):
    """What a process did in an epoch.

    Attributes:
        seconds: Time of its training steps in which it did not wait for other processes.
        images_per_second: Its own speed in that time.
        reading: Percentage of the time of its training steps in which it waited for images.
        waiting: Percentage of that time in which it waited for other processes.
        host: The name of its machine.
    """

    seconds: float
    images_per_second: float
    reading: float
    waiting: float
    host: str


def observe(activity: Activity) -> Observed:
    """Summarize what this process did since `activity.start`."""
    seconds, training = activity.seconds(), activity.training_seconds()
    waiting = seconds["waiting for others"]
    return Observed(
        training - waiting,
        activity.images / (training - waiting),
        100 * seconds["reading images"] / training,
        100 * waiting / training,
        socket.gethostname(),
    )


def processes_text(observed: Sequence[Observed]) -> str:
    """Describe the processes of a run in one line: lowest and highest values, and who is slow."""
    speeds = [each.images_per_second for each in observed]
    text = (
        f"{len(observed)} processes: each alone {_span(speeds, ',.0f')} images/s   "
        f"reading {_span([each.reading for each in observed], '.0f')} %   "
        f"waiting for others {_span([each.waiting for each in observed], '.0f')} %"
    )
    slow = [
        f"process {number} on {each.host}"
        for number, each in enumerate(observed)
        if each.seconds >= SHORTEST
        and speeds[number] < SLOW * statistics.median(speeds[:number] + speeds[number + 1 :])
    ]
    return f"{text}   slower than the others: {', '.join(slow)}" if slow else text


def _span(values: Sequence[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


class Watch(threading.Thread):
    """Watches one process; the first one that answers reports on all of them.

    Attributes:
        limit: Seconds that a process may wait for another before that one is named.
    """

    def __init__(
        self, rank: int, size: int, store: Store, activity: Activity, limit: float = LIMIT
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.limit = limit
        self._rank, self._size = rank, size
        self._store, self._activity = store, activity
        self._end = threading.Event()
        self._begin = 0.0  # of the activity that was reported as long

    def run(self) -> None:
        """Look a few times within the limit, until the process leaves the others."""
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
            self._store.set(f"host {self._rank}", socket.gethostname())
            while not self._end.wait(min(self.limit, PATIENCE) / 4):
                failure = self.failure()
                if failure is not None:
                    if not self._end.wait(PATIENCE):
                        self._give_up(*failure)
                    return
                self._look()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self.join(PATIENCE)

    def fail(self, text: str) -> bool:
        """Tell the others why this process has failed, unless another one has said the same.

        Returns:
            Whether this is the first process that says so.
        """
        words = json.dumps([self._rank, socket.gethostname(), text])
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(FAILED, "", words)
        failure = self.failure()
        return failure is None or failure[0] == self._rank or failure[2] != text

    def failure(self) -> tuple[int, str, str] | None:
        """Return rank, host and error of a process that has failed; None if none has said so."""
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
            if self._store.check([FAILED]):
                rank, host, text = json.loads(self._store.get(FAILED))
                return rank, host, text
        return None

    def _give_up(self, number: int, host: str, text: str) -> None:
        """End this process, which does not find out by itself that another one has failed."""
        if self._rank == 0:
            say(f"error: process {number} on {host}: {printable(text)}", sys.stderr)
        os._exit(2)

    def _look(self) -> None:
        """Tell the others if the process has been doing the same for too long."""
        activity = self._activity
        now, since, step = activity.now, activity.since, activity.step
        if time.perf_counter() - since < self.limit or since == self._begin:
            return
        self._begin = since
        self._store.set(f"step {step}, process {self._rank}", now)
        if self._end.wait(self.limit / 2):  # until all have answered
            return
        answers = [self._answer(number, step) for number in range(self._size)]
        if activity.since == since and all(a.startswith(SILENT) for a in answers[: self._rank]):
            self._report(step, answers)

    def _answer(self, number: int, step: int) -> str:
        answer, host = (
            self._store.get(key).decode() if self._store.check([key]) else default
            for key, default in (
                (f"step {step}, process {number}", SILENT),
                (f"host {number}", "unknown machine"),
            )
        )
        return f"{answer} ({host})"

    def _report(self, step: int, answers: list[str]) -> None:
        """Name the processes that do not answer, or else those that read, or else compute.

        Those that wait for others within an operation of torch seem to compute.
        """
        if any(text.startswith("not training") for text in answers):
            return
        for kind in (SILENT, "reading", "computing"):
            named = [f"process {n} {a}" for n, a in enumerate(answers) if a.startswith(kind)]
            if named:
                break
        if 0 < len(named) < self._size:
            warn(
                f"step {step + 1}: the other processes have waited {1.5 * self.limit:.0f} seconds: "
                f"{'; '.join(named)}; they go on waiting up to train.timeout_minutes"
            )
