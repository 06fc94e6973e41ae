"""Being asked to stop: Ctrl-C, and the SIGTERM of a scheduler that wants its machine back."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import torch

from vit.training.distributed import World


class Stopped(BaseException):
    """The process was asked to stop, and can; like KeyboardInterrupt not an error."""


class StopRequest:
    """Whether a signal has asked this process to stop.

    Attributes:
        signal: Its number; 0 while there was none.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._deferred = False

    def agreed(self, world: World) -> bool:
        """Tell whether any process was asked to stop, the same in all; called after every step."""
        if world.size > 1:
            self.signal = int(world.largest(torch.tensor(self.signal)))
        return self.signal != 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note a first signal; what runs inside asks `agreed` and raises Stopped itself."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        if self.signal:  # the second one: at once
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.signal = number
        if not self._deferred:
            raise Stopped
        print("\nstopping after this step; once more stops at once", file=sys.stderr)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Take SIGINT and SIGTERM as requests to stop."""
    request = StopRequest()
    before = {n: signal.signal(n, request.handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
