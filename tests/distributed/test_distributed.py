"""What processes of a run exchange, and signals; test_processes.py runs whole commands."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from vit.console import rank
from vit.distributed.launch import launch
from vit.distributed.world import (
    MEETING,
    Batch,
    ConnectionLost,
    Stopped,
    World,
    join_world,
    stop_on_signals,
)

CPU = torch.device("cpu")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Recorded(World):
    """A world of two whose main process says what a test makes it say."""

    said: ClassVar[list[Any]] = []

    def agree(self, value: Any, group: Any = None) -> Any:
        if self.main:
            self.said.append(value)
        return self.said[-1]


def test_other_processes_learn_whether_the_main_process_succeeded():
    Recorded.said.clear()
    entered = []
    for number in (0, 1):
        with Recorded(number, 2).main_first():
            entered.append(number)
    assert entered == [0, 1]
    assert len(Recorded.said) == 1  # once the main process is done, and by nobody else
    for error in (OSError(), Stopped(15)):
        with pytest.raises(type(error)), Recorded(0, 2).main_first():
            raise error
        with pytest.raises(SystemExit) as ended, Recorded(1, 2).main_first():
            entered.append(1)
        assert ended.value.code == 2 and entered == [0, 1]
    assert len(Recorded.said) == 3


def test_average_is_the_sum_over_processes_divided_by_their_number(monkeypatch):
    others = torch.tensor([2.0, 4.0, 6.0])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total: total.add_(others))
    values = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    World(0, 2).average(values)
    assert [value.tolist() for value in values] == [[1.5, 3.0], [[4.5]]]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_process_gives_up_when_another_ends_or_does_not_answer_in_time(
    ends, tmp_path, monkeypatch
):
    variables = {"WORLD_SIZE": "2", MEETING: f"file://{tmp_path}/met", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)  # a copy of this process has none of its threads
    child = os.fork()
    monkeypatch.setenv("RANK", "1" if child else "0")
    if not child:
        with join_world(CPU, timeout_minutes=1) as world:
            with world.main_first():
                time.sleep(14)  # as it reads images, which takes longer than any step
            time.sleep(0 if ends else 40)
            os._exit(0)
    words = "another process of the run has ended" if ends else "not answered for 0.2 minutes"
    lost = pytest.raises(ConnectionLost, match=f"{words}.*; rerun the command to resume")
    waited = False
    with lost, join_world(CPU, timeout_minutes=0.2) as world:
        with world.main_first():
            waited = True
        world.largest(torch.ones(1))
    assert waited
    os.kill(child, 9)
    os.waitpid(child, 0)


@pytest.mark.parametrize("typed", [False, True])
def test_a_process_that_ends_before_it_joins_is_not_waited_for(typed, monkeypatch):
    """Killed because memory ran out, or by Ctrl-C, which ends all."""

    def work() -> None:
        if rank():
            time.sleep(0.5)  # until the first process waits
            if typed:
                os.kill(os.getppid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGKILL)
        with join_world(CPU, timeout_minutes=1):
            pass

    sizes, ranks = ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), ("RANK", "LOCAL_RANK")  # as of a pod
    for name in (*sizes, *ranks, MEETING, "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # so that what `launch` sets is restored
    # A shell that starts the tests in the background has it ignored.
    before, began = signal.signal(signal.SIGINT, signal.default_int_handler), time.monotonic()
    error, text = (KeyboardInterrupt, None) if typed else (ValueError, "process 1 .* by SIGKILL")
    with pytest.raises(error, match=text):
        launch(2, work)
    signal.signal(signal.SIGINT, before)
    assert not typed or time.monotonic() - began < 30


def test_an_error_about_a_folder_is_not_one_of_the_network(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    met = iter([(torch.distributed.HashStore(), 0, 2)])
    monkeypatch.setattr("vit.distributed.world.rendezvous", lambda *_, **__: met)
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: None)
    with (
        pytest.raises(ValueError, match=r"^data\.root: igloo/1\.jpg"),  # which contains "gloo"
        join_world(CPU, timeout_minutes=1),
    ):
        raise ValueError("data.root: igloo/1.jpg cannot be read")


def test_an_interface_that_is_down_is_named(tmp_path, monkeypatch):
    variables = {"WORLD_SIZE": "2", MEETING: f"file://{tmp_path}/met", "GLOO_SOCKET_IFNAME": "no0"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    down = pytest.raises(ValueError, match=r"interface no0, .* is down.*--train.processes 1")
    with down, join_world(CPU, timeout_minutes=1):
        pass


def ended_child(work: Callable[[], object]) -> int:
    """Fork, call a function in the child, and return how the child ended."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:  # not os._exit, in which coverage waits for a lock that the parent held
            os.execlp("true", "true")
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_a_step_is_deferred(number, capfd):
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


def test_a_signal_that_comes_while_processes_agree_is_heard_at_the_next_step():
    class Reducing(World):
        def largest(self, values: torch.Tensor) -> torch.Tensor:
            if not request.signal:
                os.kill(os.getpid(), signal.SIGTERM)
            return values

    with stop_on_signals() as request, pytest.raises(Stopped), request.deferred():
        assert not request.agreed(Reducing(0, 2))  # the others have not heard of it
        assert request.agreed(Reducing(0, 2))
        assert request.signal == signal.SIGTERM


def test_processes_that_share_a_batch_wait_for_it_after_a_signal():
    class Two(World):
        def largest(self, values: torch.Tensor) -> torch.Tensor:
            return values

    def slow() -> Iterator[Batch]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield batch
        raise AssertionError("not asked for")

    batch = torch.zeros(1), torch.zeros(1)
    with stop_on_signals() as stop, pytest.raises(Stopped), stop.deferred():
        assert list(stop.until(slow(), Two(0, 2))) == [batch]


def test_a_second_signal_is_ignored_under_torchrun(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with stop_on_signals() as stop, pytest.raises(Stopped), stop.deferred():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        assert stop.signal == signal.SIGINT


def test_forked_workers_leave_signals_to_their_parent(capfd):
    with stop_on_signals() as stop, stop.deferred():
        assert ended_child(lambda: os.kill(os.getpid(), signal.SIGINT)) == 0
        assert stop.signal == 0
    assert capfd.readouterr().err == ""


def test_a_second_ctrl_c_raises_keyboard_interrupt():
    """In a notebook, whose variables would be lost otherwise."""
    # A shell that starts the tests in the background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt), stop_on_signals() as stop, stop.deferred():
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    signal.signal(signal.SIGINT, before)


def test_a_second_run_in_a_process_does_not_meet_the_first(tmp_path, monkeypatch):
    """In torchrun's store, which outlives both."""
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), (MEETING, f"file://{tmp_path}/at")):
        monkeypatch.setenv(name, value)
    stores, met = list[Any](), list[bool]()

    def connect(*arguments: Any) -> None:
        stores.append(arguments[-1])
        met.append(stores[-1].check(["address"]))
        stores[-1].set("address", "of this run")

    monkeypatch.setattr(dist, "init_process_group", connect)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    for _ in range(2):
        with join_world(CPU, timeout_minutes=1):
            pass
    assert met == [False, False]


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_processes_that_wait_for_each_other(second, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    def interrupted() -> None:
        with stop_on_signals() as stop, stop.deferred():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), second)

    assert ended_child(interrupted) == second
