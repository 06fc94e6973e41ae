"""How a run ends early: it diverges, or a signal stops it (Ctrl-C, or a scheduler's SIGTERM)."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

import torch

from vit.console import rank
from vit.distributed.world import World, under_torchrun

STOPPING = (signal.SIGINT, signal.SIGTERM)
Batch = tuple[torch.Tensor, torch.Tensor]


class Stopped(BaseException):
    """A signal asked the process to stop; like KeyboardInterrupt, this is not an error."""


class Diverged(Exception):
    """Loss, gradient or weights are not finite, and the run gives up."""


class StopRequest:
    """Whether a signal has asked this process to stop: its number, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        self._deferred = False
        self._process = os.getpid()

    def agreed(self, world: World) -> bool:
        """Tell whether any process was asked to stop; all processes call this between steps."""
        # A signal that arrives during the exchange counts at the next step, in all processes.
        heard = int(world.largest(torch.tensor(self.signal)))
        self.signal = heard or self.signal
        return heard != 0

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record a signal, for `agreed`; one after its last call raises Stopped on exit."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.signal:
            raise Stopped

    def until(self, batches: Iterator[Batch], world: World) -> Iterator[Batch]:
        """Yield batches until a signal arrives; a single process does not await another batch."""
        with contextlib.suppress(Stopped):
            while True:
                self._deferred = world.size > 1  # several save their state together, after a step
                batch = None if self.agreed(world) else next(batches, None)
                self._deferred = True
                if batch is None:
                    return
                yield batch

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the first signal; a second one stops the process immediately.

        torchrun forwards signals that its processes have already received, so under torchrun a
        second signal is ignored; torchrun itself ends processes that take too long.
        """
        if os.getpid() != self._process:
            return  # a worker that has just been forked leaves signals to its parent
        alone = not under_torchrun()
        for stopping in STOPPING:
            signal.signal(stopping, signal.SIG_DFL if alone else signal.SIG_IGN)
        self.signal = number
        if not self._deferred:
            raise Stopped
        typed = alone and number == signal.SIGINT
        hint = "; press Ctrl-C again to stop immediately" if typed else ""
        if rank() == 0:
            with contextlib.suppress(OSError):  # not print, which the signal may have interrupted
                os.write(2, f"\nfinishing this step{hint}\n".encode())


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Treat SIGINT and SIGTERM as requests to stop."""
    request = StopRequest()
    before = {number: signal.signal(number, request.handle) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
