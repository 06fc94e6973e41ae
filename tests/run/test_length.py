"""The length of a run: what is done stays done when it changes."""

from itertools import pairwise

import pytest

from vit.run.length import EpochEnds, Length, Milestones


def test_a_change_divides_the_rest_of_a_run_into_more_or_fewer_steps():
    length = Length(100)
    assert [length.done(step) for step in (0, 40, 100)] == [0, 0.4, 1]
    length.change(40, 70)  # 0.6 in 30 steps
    assert [length.done(step) for step in (40, 55, 70)] == pytest.approx([0.4, 0.7, 1])
    assert [length.step_at(fraction) for fraction in (0.4, 0.7, 1)] == [40, 55, 70]
    length.change(55, 155)  # 0.3 in 100
    assert [length.done(step) for step in (55, 105, 155)] == pytest.approx([0.7, 0.85, 1])
    assert length.step_fraction == pytest.approx(0.003)
    before = vars(length).copy()
    length.change(80, 155)
    assert vars(length) == before
    length.plan(50)
    assert length == Length(50, planned_steps=50)


def test_expected_seconds_are_means_over_parts():
    length = Length(costs=((0.5, 1.0), (0.75, 3.0), (1.0, 5.0)))
    assert length.seconds(0, 1) == pytest.approx(0.5 * 1 + 0.25 * 3 + 0.25 * 5)
    assert length.seconds(0.4, 0.6) == pytest.approx(2)
    assert length.seconds(0.9, 1) == 5 and length.seconds(0.1, 0.5) == 1


def test_milestones_run_from_start_to_end():
    assert [*Milestones(Length(3820), 10)] == [
        0, 48, 189, 425, 755, 1180, 1698, 2311, 3019, 3820
    ]  # fmt: skip
    assert [*Milestones(Length(3820), 2)] == [0, 3820] and [*Milestones(Length(3820), 1)] == [3820]
    for total in range(1, 1000):
        for count in (2, 5, 10):
            steps = [*Milestones(Length(total), count)]
            assert steps[0] == 0 and steps[-1] == total and len(steps) <= count
            assert all(type(step) is int for step in steps)
            assert all(one < two for one, two in pairwise(steps))
            assert len(steps) == count or total < count**2  # two milestones would coincide


def test_what_happens_at_certain_steps_follows_the_length():
    length = Length(25)
    ends, milestones = EpochEnds(length, 10), Milestones(length, 6)
    assert [step for step in range(26) if step in ends] == [10, 20, 25]
    assert [*milestones] == [0, 1, 4, 9, 16, 25]
    length.change(10, 40)
    assert [step for step in range(41) if step in ends] == [10, 20, 30, 40]
    assert [step for step in milestones if step > 10] == [22, 40] and 22 in milestones


def test_no_milestone_is_missed_or_repeated_when_the_length_changes():
    """Of a number of steps, at a step, to another number."""
    for total, changed, later in (
        (20, 3, 8), (20, 3, 60), (25, 3, 8), (25, 17, 18), (100, 7, 300), (100, 40, 70)
    ):  # fmt: skip
        length = Length(total)
        milestones, logged = Milestones(length, 6), 0
        for step in range(later + 1):
            logged += step in milestones
            if step == changed:
                length.change(step, later)
        assert logged == 6
