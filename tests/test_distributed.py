"""The world of a run: what processes exchange; test_processes.py runs whole commands."""

import os
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from vit.distributed.world import MEETING, ConnectionLost, World, join_world

CPU = torch.device("cpu")


def test_one_process_is_alone() -> None:
    with join_world(CPU, timeout_minutes=1) as world:
        assert world == World(0, 1) and world.main
        values = torch.tensor([1.0, 2.0])
        averaged = values.clone()
        world.average([averaged])
        assert torch.equal(averaged, values)
        assert torch.equal(world.largest(values.clone()), values)
        assert world.agree("this") == "this"
        with world.main_first():
            pass


class Recorded(World):
    """A world of two whose main process says what a test makes it say."""

    said: ClassVar[list[Any]] = []

    def agree(self, value: Any) -> Any:
        if self.main:
            self.said.append(value)
        return self.said[-1]


def test_others_end_quietly_when_the_main_process_fails() -> None:
    Recorded.said.clear()
    with pytest.raises(OSError, match="disk"), Recorded(0, 2).main_first():
        raise OSError("disk")
    assert len(Recorded.said) == 1
    entered = []
    with pytest.raises(SystemExit) as ended, Recorded(1, 2).main_first():
        entered.append(1)
    assert ended.value.code == 2 and entered == []


def test_others_are_told_what_the_main_process_has_found() -> None:
    Recorded.said.clear()
    with Recorded(0, 2).main_first() as told:
        told["unreadable"] = [3, 7]
    with Recorded(1, 2).main_first() as told:
        assert told == {"unreadable": [3, 7]}
    assert len(Recorded.said) == 1  # said once the main process is done, and by nobody else


def test_parts_of_a_batch_are_equal_and_make_it_up() -> None:
    batch = torch.arange(12)
    parts = [World(rank, 3).part(batch) for rank in range(3)]
    assert {len(part) for part in parts} == {4}
    assert torch.equal(torch.cat(parts), batch)


def test_average_is_the_sum_over_processes_divided_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others = torch.tensor([2.0, 4.0, 6.0])
    monkeypatch.setattr("torch.distributed.all_reduce", lambda total: total.add_(others))
    values = [torch.tensor([1.0, 2.0]), torch.tensor([[3.0]])]
    World(0, 2).average(values)
    assert [value.tolist() for value in values] == [[1.5, 3.0], [[4.5]]]


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_process_gives_up_when_another_ends_or_does_not_answer_in_time(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"WORLD_SIZE": "2", MEETING: f"file://{tmp_path}/met", "GLOO_SOCKET_IFNAME": "lo"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torch.set_num_threads(1)  # a copy of this process has none of its threads
    child = os.fork()
    monkeypatch.setenv("RANK", "0" if child else "1")
    if not child:
        with join_world(CPU, timeout_minutes=1):
            time.sleep(0 if ends else 20)
            os._exit(0)
    words = "another process of the run has ended" if ends else "not answered for 0.05 minutes"
    lost = pytest.raises(ConnectionLost, match=f"{words}.*; rerun the command to resume")
    with lost, join_world(CPU, timeout_minutes=0.05) as world:
        world.largest(torch.ones(1))
    os.kill(child, 9)
    os.waitpid(child, 0)
