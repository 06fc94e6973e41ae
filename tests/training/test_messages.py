"""What training prints when it starts and ends."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import torch

from small_runs import begin, small
from vit.commands.train import load_data
from vit.config import Config, to_dict
from vit.evaluation import report
from vit.training.build import build_step
from vit.training.messages import end_text, start_text


def start_of(count: int, held: int, budget: float | None = None, **changes: dict[str, Any]) -> str:
    data = {"train_size": count, "val_size": held, **changes.pop("data", {})}
    config = small(Path("unused"), data=data, **changes)
    run = begin(config)
    training, held_out = load_data(run)
    values = to_dict(config)
    values["train"]["budget_minutes"] = budget
    return start_text(Config(**values), build_step(run, training)[1], training, held_out)


def test_start_of_a_run_on_few_images_says_what_limits_it():
    text = start_of(100, 50, data={"balance": "loss"})
    assert "50 held out (" in text
    assert "classes are balanced by data.balance=loss" in text
    assert "12 with 56 images so that an epoch uses all 100, 12 of them twice, 6 epochs" in text
    text = start_of(128, 0, budget=0.1)
    assert ", to fit into 0.1 minutes; few for training from scratch" in text
    text = start_of(128, 0, data={"balance": "sampler"}, train={"epochs": 500})
    assert "none held out, so there are no validation curves" in text
    assert "classes are balanced by data.balance=sampler" in text
    assert "1,000 with 64 images each, 500 epochs" in text
    assert "32 x 32 pixels, 66 tokens: " in text
    text = start_of(128, 0, train={"epochs": 20, "small_scale": 0.5})
    assert "20 epochs, the first 15 at 16 x 16 pixels" in text
    for share, full in ((None, True), (0.5, False)):
        text = start_of(128, 0, train={"freeze": "backbone", "small_share": share})
        assert ("6 epochs, all at full size (train.small_share)" in text) == full


SPENT = {"training": {"seconds": 62.0, "pflop": 0.0123, "of_products": 0.25}}


def test_the_last_lines_have_balanced_accuracy_if_classes_differ_in_size():
    logits = torch.eye(2)[torch.tensor([0, 0, 0, 1])]
    for labels, expected in (([0, 0, 0, 1], True), ([0, 1, 0, 1], False)):
        result = report(logits, torch.tensor(labels), ("a", "b"))
        text = end_text(Path("runs/x"), result | SPENT, has_maps=True, variant="dot")
        assert ("balanced accuracy 100.00%, loss" in text) == expected
        speed = "25% of the speed of large matrix products"
        assert f"\ntime     1:02 of training, 0.0123 PFLOP at {speed}\n" in text
    few = {"training": {**SPENT["training"], "pflop": 0.0000123}}
    assert ", 0.0123 TFLOP at " in end_text(Path("runs/x"), result | few, True, "dot")
    unknown = {"training": {**SPENT["training"], "pflop": None}}
    text = end_text(Path("runs/x"), result | unknown, True, "dot")
    assert "\ntime     1:02 of training\n" in text


def test_suggested_commands_can_be_copied_into_a_shell(tmp_path):
    result = report(torch.eye(2), torch.tensor([0, 1]), ("a", "b"))
    run, variant = tmp_path / "two words; $HOME & 'more'", "my file.py:Mine"
    text = end_text(run, result | SPENT, has_maps=True, variant=variant)
    page, tensorboard = (line[9:] for line in text[text.index("next ") :].splitlines())
    script = ["sh", "-c", f"printf '%s\\n' {page}"]
    words = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == ["vit-eval", str(run), "export", "html", "--model.attention", variant]
    assert shlex.split(tensorboard, comments=True)[2] == str(tmp_path)
