"""A run is the same whatever the number of processes that share its batches."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from shared_batches import COUNTS, everything_on
from small_runs import ROOT, make_step, metrics
from vit.data.datasets import load
from vit.training.distributed import World
from vit.training.step import TrainingStep


def gradient(step: TrainingStep, images: Tensor, labels: Tensor) -> Tensor:
    """Return loss, accuracy and the gradient of all weights at step 3."""
    step.state.step = 3
    result = step.backward(*step.prepare(images, labels))
    gradients = [p.grad.flatten() for p in step.state.model.parameters() if p.grad is not None]
    step.state.model.zero_grad()
    return torch.cat([result, *gradients])


def test_gradients_of_processes_add_up_to_that_of_one(tmp_path: Path) -> None:
    step = make_step(everything_on(tmp_path))
    ((images, labels),) = load("shapes", "", train=True, count=64).batches(torch.arange(64)[None])
    whole = gradient(step, images, labels)
    assert_close(gradient(dataclasses.replace(step, accumulate=1), images, labels), whole)
    for size in (2, 4, 8):
        worlds = [World(rank, size) for rank in range(size)]
        parts = [
            gradient(dataclasses.replace(step, world=w), w.part(images), w.part(labels))
            for w in worlds
        ]
        assert_close(torch.stack(parts).mean(dim=0), whole, rtol=1e-4, atol=1e-6)
        misplaced = gradient(step, worlds[1].part(images), worlds[1].part(labels))
        assert (misplaced - parts[1]).abs().max() > 1e-3


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "epochs"), [("muon", 2), ("adamw", 20)])
def test_losses_are_those_of_one_process(tmp_path: Path, optimizer: str, epochs: int) -> None:
    """With everything random switched on; Muon's bfloat16 amplifies rounding in longer runs."""
    script = str(ROOT / "tests/shared_batches.py")
    words = [sys.executable, script, str(tmp_path), str(epochs), optimizer]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, timeout=400
    )
    assert done.returncode == 0, done.stderr
    rows = [[row for row in metrics(tmp_path / str(n)) if "train/loss" in row] for n in COUNTS]
    alone, *others = (torch.tensor([row["train/loss"] for row in run]) for run in rows)
    assert len(alone) == 5 * epochs
    for losses in others:
        assert_close(losses, alone, rtol=0, atol=1e-4)
