"""A run's course is a function of the step."""

import pytest

from vit.config import from_dict
from vit.training.plan import Plan, make_plan


def test_small_images_come_first_and_both_sizes_take_their_share() -> None:
    plan = Plan(1000, 100, 24, 0.75, 1, 0.05, "linear")
    sizes = [plan.image_size(step) for step in range(1000)]
    assert sizes == [24] * 750 + [32] * 250
    assert plan.stages() == [(24, 0.75), (32, 0.25)]
    assert plan.work(1000) == pytest.approx(750 * (24 / 32) ** 2 + 250)
    assert plan.work(750) == pytest.approx(750 * (24 / 32) ** 2)
    assert plan.work(0) == 0


@pytest.mark.parametrize(("share", "stages"), [(0, [(32, 1)]), (1, [(24, 1)])])
def test_stage_without_steps_is_none(share: float, stages: list[tuple[int, float]]) -> None:
    plan = Plan(10, 10, 24, share, 1, 0.05, "linear")
    assert plan.stages() == stages
    assert {plan.image_size(step) for step in range(10)} == {stages[0][0]}


@pytest.mark.parametrize(("share", "mixed"), [(0, 0), (0.75, 15), (1, 20)])
def test_images_are_mixed_at_first(share: float, mixed: int) -> None:
    plan = Plan(20, 10, 32, 0, share, 0.05, "linear")
    assert [plan.mixes(step) for step in range(20)] == [True] * mixed + [False] * (20 - mixed)


def test_rate_rises_over_the_warmup_and_falls_to_zero_after_the_last_step() -> None:
    plan = Plan(100, 10, 32, 0, 1, 0.1, "linear")
    shares = [plan.lr_share(step) for step in range(101)]
    assert shares[:11] == sorted(shares[:11]) and shares[10] == 1
    assert shares[10:] == sorted(shares[10:], reverse=True) and shares[100] == 0
    assert shares[0] > 0 and shares[99] == pytest.approx(1 / 90)


def test_last_epoch_may_be_cut_short() -> None:
    assert [Plan(n, 10, 32, 0, 1, 0, "linear").epochs for n in (1, 10, 11, 20)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("patch", "scale", "size"),
    [(4, 0.75, 24), (4, 0.5, 16), (4, 0.01, 4), (4, 1, 32), (8, 0.75, 24), (16, 0.75, 32)],
)
def test_small_size_is_in_whole_patches(patch: int, scale: float, size: int) -> None:
    config = from_dict({"model": {"patch_size": patch}, "train": {"small_scale": scale}})
    assert make_plan(config, 1, 1).small_size == size
