"""Soak test: a run that is killed again and again must end bit for bit like an undisturbed one.

    python -m benchmarks.scale.soak [--kills 100] [--seed 0]
    python -m benchmarks.scale.soak --processes 2 [--kills 25] [--seed 0]

A small run, with every feature enabled that uses random numbers or keeps state, is killed with
SIGKILL and restarted repeatedly: at random moments, while a checkpoint is being written, and while
the final report is being written. Its outputs are compared with those of an undisturbed run:
weights, optimizers, averages, every logged number, TensorBoard's curves and pictures, the report.
Exits with 1 if anything differs. Processes are forked from a server that has already imported
everything, so that they start quickly.

With two or more processes, the run is sharded, and torchrun starts them (Linux only). One of them
or all are killed, while they start, train or resume, and while a checkpoint is being written;
`--max-restarts` starts them anew each time.

Expect "all the same, bit for bit", after about four seconds for each kill, 20 with torchrun.
"""

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tqdm import tqdm

from vit.commands.train import train
from vit.config import Config, to_dict
from vit.run.checkpoint import CHECKPOINT_FOLDER, checkpoint_paths, latest_checkpoint, step_of
from vit.run.sharded import read_whole

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
SPAWN = multiprocessing.get_context("forkserver")
# Everything that draws random numbers or keeps state is on: what a resumed run could get wrong.
SMALL: dict[str, Any] = {
    "data": {"name": "shapes", "val_size": 60, "train_size": 320},
    "model": {
        "stem": "conv", "embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0,
        "mlp_conv": True, "zero_init": True, "reg_tokens": 1, "global_pool": "avg",
        "drop_rate": 0.1, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.2,
    },
    "augment": {"erasing": 0.5, "mixup": 0.5, "cutmix": 0.5},
    "optim": {"ema_decay": 0.9, "clip_grad": 1.0},
    "train": {
        "epochs": 6, "batch_size": 64, "accumulate": 2, "device": "cpu", "precision": "float32"
    },
    "track": {"every": 2, "probes": 3, "live_mb": 0},  # exporting takes seconds
}  # fmt: skip
EPOCH = 5  # steps per epoch
LONGEST_LIFE = 2.5  # maximum seconds before a process is killed
LONGEST_LIFE_OF_TORCHRUN = 12.0  # half of them for imports
MOST_EPOCHS = 4  # maximum progress of a process, so that the run outlives all kills
DEADLINE = 120.0  # maximum seconds to wait for an expected event


def checkpoint_steps(run: Path) -> list[int]:
    """List the steps of a run's checkpoints, oldest first."""
    return [step_of(path) for path in checkpoint_paths(run)]


def small_config(out: Path, epochs: int) -> Config:
    """Return a run of short epochs with every feature that a resumed run could get wrong."""
    data = {**SMALL["data"], "val_size": 20, "train_size": 40 * EPOCH}
    train = {**SMALL["train"], "epochs": epochs, "batch_size": 40}
    return Config(**{**SMALL, "out": str(out), "data": data, "train": train})


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


def wait(is_alive: Callable[[], bool], done: Callable[[], bool], seconds: float) -> None:
    """Wait until `done` returns True, the time is up, or the run has ended by itself."""
    end = time.monotonic() + seconds
    while is_alive() and not done() and time.monotonic() < end:
        time.sleep(0.0005)


def has_reached(run: Path, step: int) -> bool:
    """Tell whether a run has a checkpoint of the given step or a later one."""
    return max(checkpoint_steps(run), default=0) >= step


def half_written(run: Path) -> bool:
    """Tell whether there is a part of a checkpoint."""
    return any((run / CHECKPOINT_FOLDER).glob(".*.tmp"))


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
            wait(process.is_alive, partial(has_reached, run, last_step), DEADLINE)
            time.sleep(draw.uniform(0, LONGEST_LIFE / 2))
        elif number % 3 == 0:
            enough = before + EPOCH * draw.randrange(MOST_EPOCHS)
            wait(process.is_alive, partial(has_reached, run, enough), DEADLINE)
            wait(process.is_alive, partial(half_written, run), DEADLINE)
        else:
            most = before + EPOCH * MOST_EPOCHS
            longest = draw.uniform(0, LONGEST_LIFE)
            wait(process.is_alive, partial(has_reached, run, most), longest)
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
    training = report.pop("training")
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
        "training": {k: v for k, v in training.items() if k not in ("seconds", "of_products")},
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


def sharded(config: Config) -> Config:
    """Return the config of the same run with sharded weights, and fewer pictures, to save time."""
    train = replace(config.train, parallel="shard")
    return replace(config, train=train, track=replace(config.track, milestones=2))


def start_torchrun(config: Config, processes: int, restarts: int) -> subprocess.Popen[bytes]:
    """Start torchrun; its config and its log are next to the run folder."""
    run = Path(config.out)
    run.with_suffix(".yaml").write_text(yaml.safe_dump(to_dict(config)))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc_per_node", str(processes), "--max-restarts", str(restarts)]
    words += [str(TRAIN), "--config", str(run.with_suffix(".yaml"))]
    with run.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            words, stdout=log, stderr=log, env={**os.environ, "TQDM_DISABLE": "1"}
        )


def workers(torchrun: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of the run, in the order in which they were started."""
    with contextlib.suppress(OSError):  # one of them has just ended
        tasks = Path(f"/proc/{torchrun.pid}/task").iterdir()
        numbers = {int(word) for task in tasks for word in (task / "children").read_text().split()}
        words = {n: Path(f"/proc/{n}/cmdline").read_bytes().split(b"\0") for n in numbers}
        return sorted(n for n in numbers if str(TRAIN).encode() in words[n])
    return []


def kill_one_life(
    torchrun: subprocess.Popen[bytes],
    run: Path,
    earlier: set[int],
    processes: int,
    draw: random.Random,
    when_saving: bool,
    everyone: bool,
) -> str:
    """Wait for new processes, kill some at a random moment, and return what that interrupted.

    Args:
        torchrun: Starts the processes.
        run: The run folder.
        earlier: The processes of earlier lives; those of this one are added.
        processes: Number of processes of the run.
        draw: Draws the moment and, unless everyone is killed, the victim.
        when_saving: Whether to wait for a checkpoint that is being written.
        everyone: Whether to kill all processes.
    """

    def is_alive() -> bool:
        return torchrun.poll() is None

    wait(is_alive, lambda: len({*workers(torchrun)} - earlier) == processes, DEADLINE)
    before = max(checkpoint_steps(run), default=0)
    if when_saving:
        wait(is_alive, partial(has_reached, run, before + EPOCH), DEADLINE)
        wait(is_alive, partial(half_written, run), DEADLINE)
    else:
        longest = draw.uniform(0, LONGEST_LIFE_OF_TORCHRUN)
        wait(is_alive, partial(has_reached, run, before + EPOCH * MOST_EPOCHS), longest)
    if not is_alive():
        raise RuntimeError("the run ended by itself")
    found = sorted({*workers(torchrun)} - earlier)
    for victim in found if everyone else [draw.choice(found)]:
        os.kill(victim, signal.SIGKILL)
    earlier |= {*found}
    if half_written(run):
        return "left a checkpoint half written"
    return "came after the first checkpoint" if before else "came before the first checkpoint"


def kill_again_and_again(config: Config, processes: int, kills: int, draw: random.Random) -> str:
    """Train to the end despite a number of kills; return a summary of what they interrupted."""
    run, earlier = Path(config.out), set[int]()
    torchrun = start_torchrun(config, processes, kills)
    results = Counter(
        kill_one_life(torchrun, run, earlier, processes, draw, number % 3 == 0, number % 2 == 1)
        for number in range(kills)
    )
    if torchrun.wait() != 0:
        raise RuntimeError(f"the run failed:\n{run.with_suffix('.log').read_text()}")
    found = ", ".join(f"{count} {what}" for what, count in sorted(results.items()))
    return f"{kills} kills, {kills // 2} of all {processes} processes, the others of one: {found}"


def soak(folder: Path, kills: int, processes: int, draw: random.Random) -> tuple[str, Path, Path]:
    """Return what a run lived through, its folder, and that of an undisturbed run."""
    epochs = (MOST_EPOCHS + 1) * kills
    alone, killed = (small_config(folder / name, epochs) for name in ("alone", "killed"))
    if processes == 1:
        SPAWN.set_forkserver_preload(["vit.commands.train", "timm.utils"])
        undisturbed = start(alone, folder / "alone.log")
        undisturbed.join()
        failed = undisturbed.exitcode != 0
    else:
        alone, killed = sharded(alone), sharded(killed)
        failed = start_torchrun(alone, processes, 0).wait() != 0
    if failed:
        raise RuntimeError(f"the run failed:\n{(folder / 'alone.log').read_text()}")
    if processes == 1:
        summary = kill_and_resume(killed, EPOCH * epochs, kills, draw)
    else:
        summary = kill_again_and_again(killed, processes, kills, draw)
    return summary, Path(killed.out), Path(alone.out)


def main() -> None:
    """Parse the command line, run the test and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, help="default: 100, or 25 with several processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports every restart
    kills = options.kills or (100 if options.processes == 1 else 25)
    begin, draw = time.monotonic(), random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        summary, killed, alone = soak(Path(name), kills, options.processes, draw)
        expected = left_behind(alone)
        different = differences(expected, left_behind(killed))
    steps, seconds = EPOCH * (MOST_EPOCHS + 1) * kills, time.monotonic() - begin
    print(f"{summary}; {steps} steps, {seconds:.0f} s")
    print(f"compared: {', '.join(expected)}")
    if different:
        print(f"different: {', '.join(different)}")
        raise SystemExit(1)
    print("all the same, bit for bit")


if __name__ == "__main__":
    main()
