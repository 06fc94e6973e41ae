"""A thread in each process of a run, which names the processes that the others wait for.

Processes that train together wait for each other in every step. If one of them hangs, all do, and
none of their errors would say which one was the first. The threads meet in torch's key-value store,
which the processes have in common, and only when something takes long.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time

from torch.distributed.distributed_c10d import Store

from vit.console import printable, say, warn
from vit.distributed.activity import Activity

LIMIT = 60.0  # seconds that a process may wait for another before that one is named
PATIENCE = 10.0  # seconds in which a process has to end after another one has failed
FAILED = "failed"  # the key of what a process says that fails
SILENT = "does not answer"


class Watch(threading.Thread):
    """Watches one process and, if it is the first that answers, speaks for all.

    Attributes:
        limit: Seconds that a process may wait for another before that one is named.
        patience: Seconds in which this process has to end after another one has failed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        activity: Activity,
        limit: float = LIMIT,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.limit, self.patience = limit, patience
        self._rank, self._size = rank, size
        self._store, self._activity = store, activity
        self._end = threading.Event()
        self._begin = 0.0  # of the activity that was reported as long

    def run(self) -> None:
        """Look a few times within the limit, until the process leaves the others."""
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
            self._store.set(f"host {self._rank}", socket.gethostname())
            while not self._end.wait(min(self.limit, self.patience) / 4):
                failure = self.failure()
                if failure is not None:
                    if not self._end.wait(self.patience):
                        self._give_up(*failure)
                    return
                self._look()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self.join(self.patience)

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
        try:
            if self._store.check([FAILED]):
                rank, host, text = json.loads(self._store.get(FAILED))
                return rank, host, text
        except RuntimeError:  # the process that keeps the store has ended
            pass
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
        self._store.set(self._key(self._rank, step), now)
        if self._end.wait(self.limit / 2):  # until all have answered
            return
        if activity.since != since or any(self._answered(n, step) for n in range(self._rank)):
            return
        answers = {n: self._answer(n, step) for n in range(self._size)}
        if not any(answer.startswith("not training") for answer in answers.values()):
            self._speak(step, answers)

    def _speak(self, step: int, answers: dict[int, str]) -> None:
        """Name the processes that do not answer, or else those that read, or else compute.

        Those that wait for others within an operation of torch seem to compute.
        """
        for kind in (SILENT, "reading", "computing"):
            named = {n: text for n, text in answers.items() if text.startswith(kind)}
            if named:
                break
        if 0 < len(named) < self._size:
            words = "; ".join(f"process {n} {text}" for n, text in named.items())
            warn(
                f"step {step + 1}: the other processes have waited {1.5 * self.limit:.0f} seconds: "
                f"{words}; they go on waiting up to train.timeout_minutes"
            )

    def _answer(self, number: int, step: int) -> str:
        answered = self._answered(number, step)
        doing = self._store.get(self._key(number, step)).decode() if answered else SILENT
        host = f"host {number}"
        known = self._store.check([host])
        return f"{doing} ({self._store.get(host).decode()})" if known else doing

    def _answered(self, number: int, step: int) -> bool:
        return bool(self._store.check([self._key(number, step)]))

    def _key(self, number: int, step: int) -> str:
        return f"step {step}, process {number}"
