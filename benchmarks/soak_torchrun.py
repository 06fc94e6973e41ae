"""Soak test: a sharded run whose processes are killed must end like an undisturbed one.

    python benchmarks/soak_torchrun.py [--kills 25] [--processes 2] [--seed 0]

torchrun starts the processes of a small sharded run, with every feature that uses random numbers or
keeps state. Again and again, one of them or all are killed with SIGKILL: at a random moment, while
they start, train or resume, and while a checkpoint is being written. `--max-restarts` starts them
anew each time. In the end, the outputs are compared with those of an undisturbed run. Exits with 1
if anything differs. Linux only.
"""

import argparse
import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import timing  # noqa: F401  it makes `vit` importable
import yaml
from soak import (
    EPOCH,
    MOST_EPOCHS,
    conclude,
    half_written,
    has_reached,
    left_behind,
    small_config,
)

from vit.run.checkpoint import checkpoint_steps
from vit.training.config import Config, to_dict

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
LONGEST_LIFE = 12.0  # maximum seconds before a process is killed; half of them for imports
DEADLINE = 120.0  # maximum seconds to wait for an expected event


def sharded(config: Config) -> Config:
    """Return the config of the same run with sharded weights, and fewer pictures, to save time."""
    train = replace(config.train, parallel="shard")
    return replace(config, train=train, track=replace(config.track, milestones=2))


def start(config: Config, processes: int, restarts: int) -> subprocess.Popen[bytes]:
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


def wait(torchrun: subprocess.Popen[bytes], done: Callable[[], bool], seconds: float) -> None:
    """Wait until `done` returns True or the time is up.

    Raises:
        RuntimeError: torchrun has ended.
    """
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        if torchrun.poll() is not None:
            raise RuntimeError("the run ended by itself")
        time.sleep(0.001)


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
    wait(torchrun, lambda: len({*workers(torchrun)} - earlier) == processes, DEADLINE)
    before = max(checkpoint_steps(run), default=0)
    if when_saving:
        wait(torchrun, partial(has_reached, run, before + EPOCH), DEADLINE)
        wait(torchrun, lambda: half_written(run), DEADLINE)
    else:
        longest = draw.uniform(0, LONGEST_LIFE)
        wait(torchrun, partial(has_reached, run, before + EPOCH * MOST_EPOCHS), longest)
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
    torchrun = start(config, processes, kills)
    results = Counter(
        kill_one_life(torchrun, run, earlier, processes, draw, number % 3 == 0, number % 2 == 1)
        for number in range(kills)
    )
    if torchrun.wait() != 0:
        raise RuntimeError(f"the run failed:\n{run.with_suffix('.log').read_text()}")
    told = ", ".join(f"{count} {what}" for what, count in sorted(results.items()))
    return f"{kills} kills, {kills // 2} of all {processes} processes and the others of one: {told}"


def main() -> None:
    """Parse the command line, run the test and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it reports every restart
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        epochs = (MOST_EPOCHS + 1) * options.kills
        alone, killed = (
            sharded(small_config(Path(name, out), epochs)) for out in ("alone", "killed")
        )
        if start(alone, options.processes, 0).wait() != 0:
            raise RuntimeError(f"the run failed:\n{Path(name, 'alone.log').read_text()}")
        expected = left_behind(Path(alone.out))
        told = kill_again_and_again(
            killed, options.processes, options.kills, random.Random(options.seed)
        )
        found = left_behind(Path(killed.out))
    seconds = time.monotonic() - begin
    conclude(f"{told}; {EPOCH * epochs} steps, {seconds:.0f} s", expected, found)


if __name__ == "__main__":
    main()
