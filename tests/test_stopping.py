"""Signals: the first is a request, the second stops at once, and handlers are restored."""

import os
import signal
from collections.abc import Callable

import pytest
import torch

from vit.distributed.stop import Stopped, stop_on_signals
from vit.distributed.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ended_child(work: Callable[[], object]) -> int:
    """Fork, call a function in the child, and return how the child ended."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_only_noted_while_steps_are_made(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with stop_on_signals() as stop, pytest.raises(Stopped), stop.deferred():
        assert not stop.agreed(World())
        os.kill(os.getpid(), number)
        assert stop.agreed(World()) and stop.signal == number
    said = capfd.readouterr().err
    assert "finishing this step" in said
    assert ("press Ctrl-C again" in said) == (number == signal.SIGINT)  # which was typed
    with stop_on_signals() as stop:
        with pytest.raises(Stopped):  # what is no step stops at once
            os.kill(os.getpid(), number)
        assert stop.signal == number
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_signal_that_comes_while_processes_agree_is_heard_at_the_next_step() -> None:
    class Reducing(World):
        def largest(self, values: torch.Tensor) -> torch.Tensor:
            if not request.signal:
                os.kill(os.getpid(), signal.SIGTERM)
            return values

    with stop_on_signals() as request, pytest.raises(Stopped), request.deferred():
        assert not request.agreed(Reducing(0, 2))  # the others have not heard of it
        assert request.agreed(Reducing(0, 2))
        assert request.signal == signal.SIGTERM


def test_torchruns_processes_do_not_hear_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with stop_on_signals() as stop, pytest.raises(Stopped), stop.deferred():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.signal == signal.SIGINT


def test_forked_workers_leave_signals_to_their_parent(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_on_signals() as stop, stop.deferred():
        assert ended_child(lambda: os.kill(os.getpid(), signal.SIGINT)) == 0
        assert stop.signal == 0
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_the_process(second: signal.Signals) -> None:
    def interrupted() -> None:
        with stop_on_signals() as stop, stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), second)

    assert ended_child(interrupted) == second
