"""How long training pauses for a checkpoint of a sharded run, which is written while it goes on.

    python -m benchmarks.scale.saving [--processes 2] [--embed_dim 384] [--depth 12] [--rounds 7]

Processes on the CPU, one thread each, share a Vision Transformer and train it on drawn shapes with
AdamW and a moving average. Each round times a step, `save`, which copies the state and starts
to write it, the steps taken until the checkpoint is complete and, for comparison, a checkpoint that
training waits for. Numbers are medians over the rounds, of the first process. Expect
a pause of a fraction of a step.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.multiprocessing.spawn import start_processes

from benchmarks.tables import spread
from benchmarks.timing import timed
from vit.distributed.stop import StopRequest
from vit.distributed.world import MEETING, join_world
from vit.run.saver import Saver
from vit.training.build import build_step
from vit.training.config import Config, from_dict
from vit.training.start import Environment, Run
from vit.training.train import load_data

CPU = torch.device("cpu")
BATCH = 8  # images of a process


def config(out: Path, processes: int, embed_dim: int, depth: int) -> Config:
    """Return the run."""
    return from_dict(
        {
            "out": str(out),
            "data": {"name": "shapes", "train_size": 320, "val_size": 0},
            "model": {
                "embed_dim": embed_dim, "depth": depth, "num_heads": embed_dim // 64,
                "stem": "linear",
            },
            "optim": {"name": "adamw", "ema_decay": 0.99},
            "train": {"parallel": "shard", "batch_size": BATCH * processes, "epochs": 1},
        }
    )  # fmt: skip


def measure(
    rank: int, processes: int, folder: str, embed_dim: int, depth: int, rounds: int
) -> None:
    """Time steps and checkpoints in one of the processes; the first one prints."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        MEETING: f"file://{folder}/meeting", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    torch.set_num_threads(1)
    run = Path(folder, "run")
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    settings = config(run, processes, embed_dim, depth)
    with join_world(CPU, timeout_minutes=5) as world:
        env = Environment(CPU, torch.float32, world, StopRequest())
        training, _ = load_data(Run.begin(settings, env))
        step = build_step(Run.begin(settings, env), training)
        saver = Saver(run, step.state, {}, world, sharded=True)
        ((images, labels),) = training.batches(torch.arange(BATCH)[None])
        train = partial(step, images, labels)
        train()
        rows = [one_round(train, saver) for _ in range(rounds + 1)][1:]
    if rank == 0:
        size = sum(path.stat().st_size for path in run.glob("checkpoints/step_*/*")) / 2
        print(f"checkpoints of {size / 1e6:,.0f} MB in {processes} parts")
        for name in rows[0]:
            print(f"{name:42} {spread([row[name] for row in rows], '.3f')} s")


def one_round(train: Callable[[], object], saver: Saver) -> dict[str, float]:
    """Time a step, a checkpoint that is written while training goes on, and one that is not."""
    alone = statistics.median(timed(train) for _ in range(3))
    pause, begin, during = timed(saver.save), time.perf_counter(), []
    assert saver._pending is not None
    while not saver.world.agree(saver._pending.done()):
        during.append(timed(train))
    background = pause + time.perf_counter() - begin
    saver.wait()

    def save_and_wait() -> None:
        saver.save()
        saver.wait()

    return {
        "a step": alone,
        "pause of the step at which it begins": pause,
        "a step while it is written": statistics.median(during),
        "until it is written": background,
        "pause if training waits until it is": timed(save_and_wait),
    }


def main() -> None:
    """Parse the command line and start the processes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--embed_dim", type=int, default=384)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    folder = tempfile.mkdtemp()
    try:
        values = (options.processes, folder, options.embed_dim, options.depth, options.rounds)
        start_processes(measure, values, options.processes, start_method="spawn")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
