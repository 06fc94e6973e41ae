"""Training speed next to other busy programs: processes compared with threads.

    python benchmarks/busy.py [--rounds 3] [--root data] [--same_session] [--kinds processes]

Trains configs/quick.yaml on a part of CIFAR-10, which must be unpacked under --root, with one
process that uses all cores as threads and with one process per core, in turns: on the idle machine,
next to one program that is always busy, and next to two. Speeds are images per second in the last
two of three short epochs; ratios compare runs of one round, which takes up to ten minutes with
threads. Linux first divides the cores among sessions, then each session's part among its programs:
by default the busy programs run in sessions of their own, as those of another user or window.
"""

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from timing import compare

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
IMAGES = 2560  # in an epoch: 20 steps
KINDS = {"threads": ["--train.processes", "1"], "processes": []}
LOADS = (0, 1, 2)


@contextlib.contextmanager
def busy_programs(number: int, same_session: bool) -> Iterator[None]:
    """Run programs that are always busy, each in a session of its own or in that of training."""
    command = [sys.executable, "-c", "while True: pass"]
    own = not same_session
    programs = [subprocess.Popen(command, start_new_session=own) for _ in range(number)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def training_speed(root: str, flags: list[str]) -> float:
    """Train for three epochs; return the images per second of the last two."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, str(TRAIN), "--out", f"{folder}/run", "--data.root", root,
            "--data.train_size", str(IMAGES), "--data.val_size", "0", "--train.epochs", "3",
            "--train.small_share", "1", "--track.probes", "0", *flags,
        ]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            speeds = re.findall(r"^epoch.* ([\d,]+) images/s", process.stdout.read(), re.MULTILINE)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return statistics.harmonic_mean(float(speed.replace(",", "")) for speed in speeds[1:])


def ratio(speeds: list[float], others: list[float]) -> str:
    """Compare speeds with others of the same rounds."""
    seconds = {"others": [1 / speed for speed in others], "these": [1 / speed for speed in speeds]}
    return compare(seconds)["these"].speed()


def main() -> None:
    """Print the speeds, and what is left of the idle machine's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", default="data")
    parser.add_argument("--same_session", action="store_true")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    arguments = parser.parse_args()
    speeds: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for load in LOADS:
            with busy_programs(load, arguments.same_session):
                for kind in arguments.kinds:
                    speed = training_speed(arguments.root, KINDS[kind])
                    speeds.setdefault((kind, load), []).append(speed)
                    print(f"{load} busy, {kind}: {speed:.0f} images/s", flush=True)
    print("configs/quick.yaml at 24 x 24 pixels: images/s, and ratios (lowest to highest round)")
    first = arguments.kinds[0]
    print(f"busy programs   kind         images/s   to the idle machine       to {first}, idle")
    for (kind, load), values in speeds.items():
        shown = "   ".join(ratio(values, speeds[other, 0]) for other in (kind, first))
        print(f"{load:>13}   {kind:<10}{statistics.median(values):>11.0f}   {shown}")


if __name__ == "__main__":
    main()
