"""A run is the same whatever the number of processes that share its batches."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from small_runs import make_step, small
from vit.data.datasets import load
from vit.distributed.world import World
from vit.training.config import Config
from vit.training.step import TrainingStep
from worlds import in_world, keep_losses, loop_of


def everything_on(out: Path) -> Config:
    """A run with every kind of augmentation and dropout, but no batch norm; 40 steps."""
    return small(
        out,
        data={"val_size": 0},
        model={"stem": "linear"},
        augment={"rand_ops": 2, "mixup": 0.5, "cutmix": 0.5, "erasing": 0.5},
        train={"epochs": 8},
        track={"probes": 0},
    )


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


def train(world: World, config: Config, file: Path) -> None:
    """Train a run, and write its losses to a file."""
    loop = loop_of(config, world)
    losses = keep_losses(loop)
    loop.run()
    if world.main:
        torch.save(torch.stack([*losses.values()]), file)


@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """With everything random switched on, in the first 40 steps."""
    train(World(), everything_on(tmp_path / "alone"), tmp_path / "alone.pt")
    in_world(4, tmp_path, train, everything_on(tmp_path / "four"), tmp_path / "four.pt")
    alone, shared = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "four"))
    assert len(alone) == 40
    assert_close(shared, alone, rtol=0, atol=1e-4)
