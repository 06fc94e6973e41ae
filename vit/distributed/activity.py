"""What a process of a run is doing at the moment, and for how long it has waited."""

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar, get_args

T = TypeVar("T")

Doing = Literal["computing", "reading images", "waiting for others", "not training"]


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
        self.since = time.perf_counter()
        self.step = 0
        self.images = 0
        self._ended = _nothing()  # seconds of activities that have ended

    def start(self) -> None:
        """Count time and images from zero."""
        self.images = 0
        self._ended = _nothing()
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


def _nothing() -> dict[Doing, float]:
    return dict.fromkeys(get_args(Doing), 0.0)
