"""Train one run with 1, 2 and 4 processes: python shared_batches.py FOLDER EPOCHS OPTIMIZER."""

import os
import sys
from pathlib import Path

import torch
from torch.multiprocessing.spawn import start_processes

from small_runs import CPU, small
from vit.config import Config
from vit.training.build import build_step
from vit.training.distributed import MEETING, join_world
from vit.training.environment import Environment
from vit.training.stopping import StopRequest
from vit.training.trainer import build_loop, load_data, open_tracker

COUNTS = (1, 2, 4)


def everything_on(out: Path, epochs: int = 2, optimizer: str = "muon") -> Config:
    """A run with every kind of augmentation and dropout, but no batch norm; 5 steps per epoch."""
    return small(
        out,
        data={"val_size": 0},
        model={"stem": "linear"},
        augment={"rand_ops": 2, "mixup": 0.5, "cutmix": 0.5, "erasing": 0.5},
        optim={"name": optimizer},
        train={"epochs": epochs},
        track={"every": 1, "probes": 0},
    )


def work(rank: int, size: int, folder: Path, epochs: int, optimizer: str) -> None:
    """Train as one of several processes, which meet in a file."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), MEETING: f"file://{folder}/meeting_{size}"
    }  # fmt: skip
    config = everything_on(folder / str(size), epochs, optimizer)
    with join_world(CPU, timeout_minutes=5) as world:
        env = Environment(CPU, torch.float32, world, StopRequest())
        training, held_out = load_data(config, None, env)
        step = build_step(config, None, training, env)
        with open_tracker(config, step.state, False, env) as tracker:
            build_loop(config, step, training, held_out, tracker, env).run()


if __name__ == "__main__":
    for count in COUNTS:
        arguments = (count, Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
        start_processes(work, arguments, count, start_method="fork")  # without new imports
