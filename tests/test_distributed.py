"""A world of one process; test_reliability.py tests several."""

from typing import Any, ClassVar

import pytest
import torch

from vit.distributed.world import World, join_world


def test_one_process_is_alone() -> None:
    with join_world(torch.device("cpu"), timeout_minutes=1) as world:
        assert world == World(0, 1)
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
    assert [World(rank, 3).main for rank in range(3)] == [True, False, False]
