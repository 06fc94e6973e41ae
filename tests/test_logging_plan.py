"""How often attention is logged in runs of different lengths, and what the start says about it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import make_loop, make_step, small
from vit.data.batches import divide_epoch
from vit.data.datasets import ImageSet, load
from vit.evaluation import report
from vit.model.config import ModelConfig
from vit.reporting.attention_logging import AttentionLogging, MapFaithfulness
from vit.reporting.weight_budget import images_with_weights
from vit.run.tracker import milestones
from vit.training import logging_plan
from vit.training.config import Config, TrackConfig
from vit.training.logging_plan import (
    EXPLAINING_PASSES,
    FIRST_DRAWING_SECONDS,
    READING_PASSES,
    RECORD_SECONDS,
    SECONDS_PER_WEIGHT,
    LoggingPlan,
    logging_seconds,
    plan_logging,
    thin_out,
    training_seconds,
)
from vit.training.messages import end_text, start_text, tokens_text
from vit.training.step import TrainingStep

HELD_OUT = load("shapes", ".", train=False, count=60)
QUICK_PASS = 0.25e-3 + 0.082e9 / 300e9  # seconds, of 0.082 GFLOPs
QUICK_WEIGHTS = 4 * 3 * 64**2  # of four layers, three heads and 8 x 8 patches
QUICK_RECORD = (
    RECORD_SECONDS
    + QUICK_WEIGHTS * SECONDS_PER_WEIGHT
    + (READING_PASSES + 10 * EXPLAINING_PASSES) * QUICK_PASS
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> TrainingStep:
    """The step of quick.yaml, on shapes."""
    folder = tmp_path_factory.mktemp("quick")
    return make_step(Config(out=str(folder / "run"), data=small(folder).data))


def plan(step: TrainingStep, num_images: int, epochs: int, **track: Any) -> LoggingPlan:
    """Plan a run of quick.yaml on so many images; smaller sets are trained in smaller batches."""
    config = Config()
    size = 32 if num_images < 1000 else config.train.batch_size
    config = replace(
        config,
        train=replace(config.train, batch_size=size),
        track=replace(config.track, **track),
    )
    per_epoch = num_images // size
    schedule = replace(
        step.schedule, total_steps=epochs * per_epoch, steps_per_epoch=per_epoch, batch_size=size
    )
    return plan_logging(config, replace(step, schedule=schedule), len(HELD_OUT))


def test_quick_logs_at_all_ten_milestones(quick: TrainingStep) -> None:
    found = plan(quick, 49_000, 10)
    assert found.drawn == found.judged == milestones(3820)
    assert found.describe() is None


@pytest.mark.parametrize("num_images", [300, 2000, 10_000])
@pytest.mark.parametrize("epochs", [1, 3, 10, 30, 100, 300])
def test_logging_costs_a_tenth_or_is_the_record_of_an_image(
    quick: TrainingStep, num_images: int, epochs: int
) -> None:
    found = plan(quick, num_images, epochs)
    size = 32 if num_images < 1000 else 128
    steps = epochs * (num_images // size)
    seconds = 3 * size * quick.schedule.work(1000) / 1000 * steps * QUICK_PASS
    cost = found.probes * QUICK_RECORD * len(found.drawn)
    if found.pictures:
        cost += FIRST_DRAWING_SECONDS + (0.06 + 0.016 * 8) * len(found.drawn)
    # 32 images, five levels, from both ends, five maps; and their cost. 8 images, three maps.
    cost += (32 * (5 * 2 * 5 + 6) + 8 * 5 * 2 * 3) * QUICK_PASS * len(found.judged)
    assert found.drawn[-1] == steps
    assert cost <= 0.101 * seconds or (len(found.drawn), found.probes, found.judged) == (1, 1, [])
    if len(found.drawn) > 1:
        assert found.drawn[0] == 0
    assert {*found.judged} <= {*found.drawn} <= {*milestones(steps)}
    assert found.pictures or found.judged == []
    assert (found.describe() is None) == (found.judged == found.drawn == milestones(steps))
    assert found == plan(quick, num_images, epochs)  # the same each time


def test_longer_runs_are_logged_as_often_or_more(quick: TrainingStep) -> None:
    plans = [plan(quick, 2000, epochs) for epochs in (1, 2, 5, 10, 20, 50, 100, 200, 500)]
    for counts in ([len(p.drawn) for p in plans], [len(p.judged) for p in plans]):
        assert counts == sorted(counts)
        assert counts[0] <= 1 and counts[-1] == 10


def test_limit_can_be_changed_or_lifted(quick: TrainingStep) -> None:
    usual, half = plan(quick, 2000, 10), plan(quick, 2000, 10, max_cost=0.5)
    assert len(usual.drawn) < len(half.drawn) and len(usual.judged) < len(half.judged)
    lifted = plan(quick, 2000, 10, max_cost=None)
    assert lifted.drawn == lifted.judged == milestones(150) and lifted.describe() is None
    least = plan(quick, 2000, 10, max_cost=0.0)
    assert (least.drawn, least.probes, least.pictures) == ([150], 1, False)


def test_time_of_logging_is_known_before_the_length_of_a_run(quick: TrainingStep) -> None:
    def seconds(run: float, **track: Any) -> float:
        config = Config(track=TrackConfig(**track))
        return logging_seconds(config, quick, len(HELD_OUT), run)

    milestone = 0.06 + 8 * (0.016 + QUICK_RECORD)
    milestone += (32 * (5 * 2 * 5 + 6) + 8 * 5 * 2 * 3) * QUICK_PASS
    assert seconds(600) == pytest.approx(10 * milestone + FIRST_DRAWING_SECONDS, rel=0.02)
    assert seconds(60) == pytest.approx(6)  # a tenth
    assert seconds(60, max_cost=None) == seconds(600)
    assert seconds(600, probes=0) == 0


def test_features_of_a_frozen_model_cost_one_pass_of_each_image(quick: TrainingStep) -> None:
    images_trained = quick.schedule.batch_size * quick.schedule.work(quick.schedule.total_steps)
    assert training_seconds(Config(), quick) == pytest.approx(
        3 * images_trained * QUICK_PASS, rel=0.02
    )
    probe = replace(quick, features=torch.zeros(500, 96))
    assert training_seconds(Config(), probe) == pytest.approx(500 * QUICK_PASS, rel=0.02)


def test_start_says_what_is_left_out(quick: TrainingStep) -> None:
    assert plan(quick, 2000, 10).describe() == (
        "attention is drawn at 2 of 10 milestones, the faithfulness of its maps is measured at 0; "
        "more would take over 10% of the training time (--track.max_cost null sets no limit)"
    )
    assert plan(quick, 300, 3).describe() == (
        "attention is logged without pictures for 3 of 8 images at 1 of 9 milestones, the "
        "faithfulness of its maps is measured at 0; more would take over 10% of the training time "
        "(--track.max_cost null sets no limit)"
    )


def test_weights_of_a_run_have_a_budget(
    quick: TrainingStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan(quick, 49_000, 10).weighted == 8
    monkeypatch.setattr("vit.reporting.weight_budget.WEIGHT_BYTES", 10 * 3 * QUICK_WEIGHTS + 1)
    found = plan(quick, 49_000, 10)
    assert found.weighted == 3 and found.probes == 8 and len(found.drawn) == 10
    assert found.describe() == (
        "the Attention tab has the attention weights of 3 of 8 images (at most 1 MB in all and "
        "16.8 MB for each, before compression), and the maps of all"
    )
    assert plan(quick, 49_000, 10, max_cost=None).weighted == 3


def test_weights_of_vit_b_16_at_224_pixels_fit_for_half_of_the_probes() -> None:
    assert images_with_weights(12 * 12 * 197**2, count=8, steps=10) == 4
    assert images_with_weights(12 * 12 * 577**2, count=8) == 0  # more than the tab takes


def test_thinned_steps_are_spread_out() -> None:
    steps = milestones(100)
    assert thin_out(steps, 0) == []
    assert thin_out(steps, 1) == [100]
    assert thin_out(steps, 2) == [0, 100]
    assert thin_out(steps, 4) == [0, steps[3], steps[6], 100]
    assert thin_out(steps, 10) == thin_out(steps, 11) == steps
    for count in range(2, 11):
        thinned = thin_out(steps, count)
        assert len(thinned) == count and thinned == sorted(set(thinned))


def test_loop_follows_the_plan(tmp_path: Path) -> None:
    loop = make_loop(small(tmp_path, track={"max_cost": 0.15}))
    plans = {type(evaluator): evaluator.steps for evaluator in loop.evaluators}
    assert plans[AttentionLogging] == [0, 30] and plans[MapFaithfulness] == []
    logging = next(found for found in loop.evaluators if isinstance(found, AttentionLogging))
    assert not logging.pictures and len(logging.probes) == logging.weighted == 3


def test_flops_are_those_of_one_image(quick: TrainingStep) -> None:
    assert logging_plan.forward_flops(quick) == pytest.approx(0.082e9, rel=0.01)


# What the start says of few images.


def start_of(quick: TrainingStep, count: int, held: int, **changes: dict[str, Any]) -> str:
    config = small(Path("unused"), **changes)
    images = HELD_OUT.select(torch.arange(count) % 60)
    per_epoch, size = divide_epoch(count, config.train.batch_size)
    steps = config.train.epochs * per_epoch
    schedule = replace(
        quick.schedule, steps_per_epoch=per_epoch, total_steps=steps, batch_size=size
    )
    held_out: ImageSet = HELD_OUT.select(torch.arange(held))
    return start_text(config, replace(quick, schedule=schedule), images, held_out)


def test_start_of_a_run_on_few_images_says_what_limits_it(quick: TrainingStep) -> None:
    text = start_of(quick, 100, 50, data={"balance": "loss"}, track={"max_cost": 0.05})
    assert "50 held out (" in text and "; each is 2% of validation accuracy)" in text
    assert "the loss weights classes by their inverse frequency" in text
    assert "12 with 56 images so that an epoch uses all 100, 12 of them twice, 6 epochs" in text
    assert "few for training from scratch: --train.epochs 500 makes 1,000" in text
    assert "\nlogging  attention is logged without pictures for 1 of 3 images at 1 of " in text
    text = start_of(quick, 128, 0, data={"balance": "sampler"}, train={"epochs": 500})
    assert "none held out, so there are no validation curves" in text
    assert "every class is drawn equally often" in text
    assert "1,000 with 64 images each, 500 epochs" in text
    assert "32 x 32 pixels, 64 tokens: " in text
    assert "few" not in text and "logging" not in text


def test_a_budget_that_is_over_before_training_is_pointed_out(
    quick: TrainingStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick.state, "seconds", 9.0)
    for minutes, late in ((0.1, " (timing a few steps took longer)"), (0.2, "")):
        text = start_of(quick, 128, 0, train={"budget_minutes": minutes})
        assert f", to fit into {minutes} minutes{late}\n" in text


def test_many_tokens_on_a_cpu_are_pointed_out(quick: TrainingStep) -> None:
    def text(stem: str = "conv", size: int = 224, device: str = "cpu") -> str:
        step = replace(quick, schedule=replace(quick.schedule, full_size=(size, size)))
        return tokens_text(ModelConfig(stem=stem), step, torch.device(device))  # type: ignore[arg-type]

    assert text() == ", 3,136 tokens (slow on a CPU: --model.patch_size 16 makes 196)"
    assert text("linear") == ", 3,136 tokens (slow on a CPU: --model.patch_size 14 makes 256)"
    assert text(size=4 * 37) == ", 1,369 tokens"  # patches of 4 or 37 pixels
    assert text(device="cuda") == ", 3,136 tokens"
    assert text(size=128) == ", 1,024 tokens"


def test_end_gives_balanced_accuracy_if_classes_differ_in_size() -> None:
    logits = torch.eye(2)[torch.tensor([0, 0, 0, 1])]
    for labels, expected in (([0, 0, 0, 1], True), ([0, 1, 0, 1], False)):
        result = report(logits, torch.tensor(labels), ("a", "b"))
        text = end_text(Path("runs/x"), result, 1.0, has_maps=True, variant="dot")
        assert ("balanced accuracy 100.00%, loss" in text) == expected
