"""Soak test: a run that is killed again and again must end bit for bit like an undisturbed one.

    python benchmarks/soak.py [--kills 100] [--seed 0]

A small run, with every feature enabled that uses random numbers or keeps state, is killed with
SIGKILL and restarted repeatedly: at random moments, while a checkpoint is being written, and while
the final report is being written. Its outputs are compared with those of an undisturbed run:
weights, optimizers, averages, every logged number, TensorBoard's curves and pictures, the report.
Exits with 1 if anything differs. Processes are forked from a server that has already imported
everything, so that they start quickly.
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vit.run.checkpoint import CHECKPOINT_FOLDER, checkpoint_steps, latest_checkpoint
from vit.run.sharded import read_whole
from vit.training.config import Config, from_dict
from vit.training.train import train

SPAWN = multiprocessing.get_context("forkserver")
EPOCH = 5  # steps per epoch
LONGEST_LIFE = 2.5  # maximum seconds before a process is killed
MOST_EPOCHS = 4  # maximum progress of a process, so that the run outlives all kills
DEADLINE = 120.0  # maximum seconds to wait for an expected event


def small_config(out: Path, epochs: int) -> Config:
    """Return a run of short epochs with every feature that a resumed run could get wrong."""
    return from_dict(
        {
            "out": str(out),
            "data": {"name": "shapes", "val_size": 20, "train_size": 40 * EPOCH},
            "model": {
                "embed_dim": 24, "depth": 2, "num_heads": 2, "reg_tokens": 1, "class_token": True,
                "drop_rate": 0.1, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1,
                "drop_path_rate": 0.2,
            },
            "augment": {"erasing": 0.5, "mixup": 0.5, "cutmix": 0.5},
            "optim": {"ema_decay": 0.9, "clip_grad": 1.0},
            "train": {
                "epochs": epochs, "batch_size": 40, "accumulate": 2, "device": "cpu",
                "precision": "float32",
            },
            "track": {"every": 2, "probes": 2},
        }
    )  # fmt: skip


def work(config: Config, log: Path) -> None:
    """Train on one thread with all output in a log file; runs in a process of its own."""
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # instead of a semaphore, which a killed process leaks
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    train(config)


def start(config: Config, log: Path) -> BaseProcess:
    """Start a process that trains."""
    process = SPAWN.Process(target=work, args=(config, log))
    process.start()
    return process


def wait(process: BaseProcess, done: Callable[[], bool], seconds: float) -> None:
    """Wait until `done` returns True, the time is up, or the process has ended by itself."""
    end = time.monotonic() + seconds
    while process.is_alive() and not done() and time.monotonic() < end:
        time.sleep(0.0005)


def has_reached(run: Path, step: int) -> bool:
    """Tell whether a run has a checkpoint of the given step or a later one."""
    return max(checkpoint_steps(run), default=0) >= step


def half_written(run: Path) -> bool:
    """Tell whether there is a part of a checkpoint."""
    return any((run / CHECKPOINT_FOLDER).glob(".step_*.tmp"))


def kill_and_resume(config: Config, last_step: int, kills: int, draw: random.Random) -> str:
    """Train to the end despite a number of kills; return a summary of what they interrupted."""
    run = Path(config.out)
    log = run.with_suffix(".log")
    halves = resumed = 0
    at_the_end = max(1, kills // 10)
    for number in range(kills):
        before = max(checkpoint_steps(run), default=0)
        resumed += before > 0
        process = start(config, log)
        if number >= kills - at_the_end:
            wait(process, partial(has_reached, run, last_step), DEADLINE)
            time.sleep(draw.uniform(0, LONGEST_LIFE / 2))
        elif number % 3 == 0:
            enough = before + EPOCH * draw.randrange(MOST_EPOCHS)
            wait(process, partial(has_reached, run, enough), DEADLINE)
            wait(process, partial(half_written, run), DEADLINE)
        else:
            most = before + EPOCH * MOST_EPOCHS
            wait(process, partial(has_reached, run, most), draw.uniform(0, LONGEST_LIFE))
        process.kill()
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"the run ended by itself before kill {number}:\n{log.read_text()}")
        halves += half_written(run)
    process = start(config, log)
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"the resumed run failed:\n{log.read_text()}")
    return (
        f"{kills} kills: {halves} left a checkpoint half written, {at_the_end} came after the last "
        f"step, {resumed} hit a process that had resumed"
    )


def left_behind(run: Path) -> dict[str, Any]:
    """Read every output of a run that must not depend on how often it was killed."""
    newest = latest_checkpoint(run)
    assert newest is not None
    report = json.loads((run / "eval" / "report.json").read_text())
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "images": 0}).Reload()
    curves = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if tag != "train/images_per_second" and "processes/" not in tag
    }
    pictures = {
        tag: {event.step: event.encoded_image_string for event in events.Images(tag)}
        for tag in events.Tags()["images"]
    }
    return {
        "weights": load_file(run / "model.safetensors"),
        **{part: getattr(newest, part) for part in ("model", "optimizers", "ema", "points")},
        "parts": {} if newest.folder is None else read_whole(newest.folder, ""),
        "metrics.jsonl": (run / "metrics.jsonl").read_text(),
        "curves": curves,
        "pictures": pictures,
        "report": {k: v for k, v in report.items() if k != "images_per_second"},
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """List the parts that are not bit for bit the same."""
    different = []
    for part in one:
        try:
            torch.testing.assert_close(one[part], other[part], rtol=0, atol=0, equal_nan=True)
        except AssertionError:
            different.append(part)
        except TypeError:  # texts and bytes
            if one[part] != other[part]:
                different.append(part)
    return different


def conclude(told: str, expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Print the result.

    Args:
        told: A summary of what was done.
        expected: What the undisturbed run has left behind.
        found: What the other run has left behind.

    Raises:
        SystemExit: With 1 if they differ.
    """
    different = differences(expected, found)
    print(told)
    print(f"compared: {', '.join(expected)}")
    if different:
        print(f"different: {', '.join(different)}")
        raise SystemExit(1)
    print("all the same, bit for bit")


def main() -> None:
    """Parse the command line, run the test and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports every restart
    SPAWN.set_forkserver_preload(["vit.training.train", "timm.utils"])
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        epochs = (MOST_EPOCHS + 1) * options.kills
        alone, killed = (small_config(Path(name, out), epochs) for out in ("alone", "killed"))
        start(alone, Path(name, "alone.log")).join()
        expected = left_behind(Path(alone.out))
        steps = EPOCH * epochs
        told = kill_and_resume(killed, steps, options.kills, random.Random(options.seed))
        found = left_behind(Path(killed.out))
    conclude(f"{told}; {steps} steps, {time.monotonic() - begin:.0f} s", expected, found)


if __name__ == "__main__":
    main()
