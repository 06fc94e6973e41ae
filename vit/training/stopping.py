"""Being asked to stop: Ctrl-C, and the SIGTERM of a scheduler that wants its machine back."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

import torch

from vit.console import rank
from vit.training.distributed import World, world_size

STOPPING = (signal.SIGINT, signal.SIGTERM)


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
        # A signal that comes meanwhile is heard at the next step, by all.
        heard = int(world.largest(torch.tensor(self.signal))) if world.size > 1 else self.signal
        self.signal = heard or self.signal
        return heard != 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note a first signal; what runs inside asks `agreed` and raises Stopped itself.

        Raises:
            Stopped: On leaving, where a signal came too late to be asked for.
        """
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.signal:
            raise Stopped

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take the first signal; the second stops the process at once.

        torchrun passes on what its processes were sent already, so there the second is not heard;
        torchrun ends processes that take too long by itself.
        """
        alone = world_size() == 1
        for each in STOPPING:
            signal.signal(each, signal.SIG_DFL if alone else signal.SIG_IGN)
        self.signal = number
        if not self._deferred:
            raise Stopped
        again = "; once more stops at once" if alone else ""
        if rank() == 0:
            with contextlib.suppress(OSError):
                # Not by print: it may be what was interrupted.
                os.write(2, f"\nstopping after this step{again}\n".encode())


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Take SIGINT and SIGTERM as requests to stop."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
