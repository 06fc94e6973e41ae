"""Signals: the first is a request, the second stops at once, and handlers are restored."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest
import torch

from vit.distributed.stop import Stopped, stop_on_signals
from vit.distributed.world import World


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_only_noted_while_steps_are_made(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with stop_on_signals() as stop, pytest.raises(Stopped), stop.deferred():
        assert not stop.agreed(World())
        os.kill(os.getpid(), number)
        assert stop.agreed(World())
        assert stop.signal == number
    said = capfd.readouterr().err
    assert "finishing this step" in said
    assert ("press Ctrl-C again" in said) == (number == signal.SIGINT)  # which was typed


def test_signal_that_comes_while_processes_agree_is_heard_at_the_next_step() -> None:
    class Reducing(World):
        def largest(self, values: torch.Tensor) -> torch.Tensor:
            if not request.signal:
                os.kill(os.getpid(), signal.SIGTERM)
            return values

    with stop_on_signals() as request, contextlib.suppress(Stopped), request.deferred():
        assert not request.agreed(Reducing(0, 2))  # the others have not heard of it
        assert request.agreed(Reducing(0, 2))
        assert request.signal == signal.SIGTERM


def test_torchruns_processes_do_not_hear_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with stop_on_signals() as stop, pytest.raises(Stopped), stop.deferred():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.signal == signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_what_is_no_step(number: signal.Signals) -> None:
    with stop_on_signals() as stop:
        with pytest.raises(Stopped):
            os.kill(os.getpid(), number)
        assert stop.signal == number


@pytest.mark.parametrize("deferred", [True, False])
def test_forked_workers_leave_signals_to_their_parent(deferred, capfd) -> None:
    with stop_on_signals() as stop, stop.deferred() if deferred else contextlib.nullcontext():
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                os._exit(stop.signal)
        assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().err == ""


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyError), stop_on_signals():
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] != before
        raise KeyError
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.slow
@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM"])
def test_second_signal_ends_the_process(second: str) -> None:
    program = (
        "import os, signal\n"
        "from vit.distributed.stop import stop_on_signals\n"
        "with stop_on_signals() as stop, stop.deferred():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('after the first', flush=True)\n"
        f"    os.kill(os.getpid(), signal.{second})\n"
        "    print('after the second', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "after the first\n"
    assert done.returncode == -signal.Signals[second]
