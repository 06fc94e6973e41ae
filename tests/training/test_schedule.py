"""The schedule as a function of the step."""

import math
from typing import Any

import pytest

from vit.run.length import Length
from vit.training.schedule import Schedule, scaled_size


def make(total_steps: int = 20, **changes: Any) -> Schedule:
    settings: dict[str, Any] = {
        "steps_per_epoch": 10, "batch_size": 64, "full_size": (32, 32), "small_size": (24, 24),
        "small_fraction": 0, "mix_fraction": 1, "warmup": 0.05, "decay": "linear",
    }  # fmt: skip
    return Schedule(Length(total_steps), **settings | changes)


def test_every_combination_of_size_and_mixing_is_a_phase():
    schedule = make(100, small_fraction=0.6, mix_fraction=0.8)
    phases = schedule.phases()
    assert [phase.start for phase in phases] == [0, 60, 80]
    assert [phase.fraction for phase in phases] == pytest.approx([0.6, 0.2, 0.2])
    for phase, end in zip(phases, [60, 80, 100], strict=True):
        steps = range(phase.start, end)
        assert {schedule.image_size(step) for step in steps} == {phase.image_size}
        assert len({schedule.mixes(step) for step in steps}) == 1
    assert [phase.image_size for phase in phases] == [(24, 24), (32, 32), (32, 32)]
    assert [schedule.mixes(phase.start) for phase in phases] == [True, True, False]


def test_learning_rates_by_hand():
    """They rise over the warmup and fall to zero after the last step."""
    linear = [1 / 4, 2 / 4, 3 / 4, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 0]
    half = math.sqrt(0.5)
    cosine = [1 / 3, 2 / 3, 1, (1 + half) / 2, 1 / 2, (1 - half) / 2, 0]
    for decay, warmup, rates in (("linear", 3 / 8, linear), ("cosine", 2 / 6, cosine)):
        schedule = make(len(rates) - 1, warmup=warmup, decay=decay)
        found = [schedule.lr_factor(step) for step in range(len(rates))]
        assert found == pytest.approx(rates, abs=1e-12)


def test_small_size_is_in_whole_patches():
    sizes = {(4, 0.75): 24, (4, 0.5): 16, (4, 0.01): 4, (4, 1): 32, (8, 0.75): 24, (16, 0.75): 32}
    for (patch, scale), size in sizes.items():
        assert scaled_size((32, 32), scale, patch) == (size, size)
        assert scaled_size((64, 32), scale, patch)[1] == size
