"""What training prints when it starts and ends."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import make_step, small
from vit.cli import parse_train
from vit.data.datasets import load
from vit.data.images import ImageSet
from vit.data.sampling import divide_epoch
from vit.evaluation import report
from vit.training.messages import end_text, start_text
from vit.training.step import TrainingStep

HELD_OUT = load("shapes", ".", train=False, count=60)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> TrainingStep:
    """The step of quick.yaml, on shapes."""
    folder = tmp_path_factory.mktemp("quick")
    config = parse_train(["--out", str(folder / "run")])[0]
    return make_step(dataclasses.replace(config, data=small(folder).data))


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
    text = start_of(quick, 100, 50, data={"balance": "loss"})
    assert "50 held out (" in text
    assert "classes are balanced by data.balance=loss" in text
    assert "12 with 56 images so that an epoch uses all 100, 12 of them twice, 6 epochs" in text
    text = start_of(quick, 128, 0, train={"budget_minutes": 0.1})
    assert ", to fit into 0.1 minutes; too few to train from scratch" in text
    text = start_of(quick, 128, 0, data={"balance": "sampler"}, train={"epochs": 500})
    assert "none held out, so there are no validation curves" in text
    assert "classes are balanced by data.balance=sampler" in text
    assert "1,000 with 64 images each, 500 epochs" in text
    assert "32 x 32 pixels, 64 tokens: " in text


def test_end_gives_balanced_accuracy_if_classes_differ_in_size() -> None:
    logits = torch.eye(2)[torch.tensor([0, 0, 0, 1])]
    for labels, expected in (([0, 0, 0, 1], True), ([0, 1, 0, 1], False)):
        result = report(logits, torch.tensor(labels), ("a", "b"))
        text = end_text(Path("runs/x"), result, 1.0, has_maps=True, variant="dot")
        assert ("balanced accuracy 100.00%, loss" in text) == expected
