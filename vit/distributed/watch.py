"""What the processes of a run are doing, and which of them the others wait for.

Processes that train together wait for each other in every step. If one of them hangs, all do, and
none of their errors would say which one was the first. So a thread in each process watches it. The
threads meet in torch's key-value store, and only when something takes long.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

from torch.distributed.distributed_c10d import Store

from vit.console import printable, say, warn

T = TypeVar("T")

Doing = Literal["computing", "reading images", "waiting for others", "not training"]

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
    """

    def __init__(self) -> None:
        self.now: Doing = "not training"
        self.step = 0
        self.start()

    def start(self) -> None:
        """Count training time from zero."""
        self._trained = 0.0  # seconds, without the present activity
        self.since = time.perf_counter()

    def training_seconds(self) -> float:
        """Return the time spent on training steps since `start`."""
        present = time.perf_counter() - self.since
        return self._trained + (0.0 if self.now == "not training" else present)

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
        """Yield batches; until each of them is there, the process is reading."""
        iterator = iter(batches)
        while True:
            with self.doing("reading images"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def _change(self, what: Doing) -> None:
        self._trained, self.since = self.training_seconds(), time.perf_counter()
        self.now = what


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
