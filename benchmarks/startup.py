"""Startup time of the commands, and the peak memory of a run.

    python benchmarks/startup.py [--rounds 5] [--root data]

Runs whole commands in separate processes, on CIFAR-10, which must be unpacked under --root:

1. `train.py --help`.
2. A run of configs/quick.yaml with a single training step: seconds from the start of the command to
   the line that reports the step.
3. The peak resident memory of one epoch of configs/quick.yaml, including evaluation and figures.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parent.parent / "train.py"


def seconds_until(command: list[str], sign: str) -> float:
    """Run a command until it prints a line that begins with `sign`; return the seconds taken."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(sign):
                seconds = time.perf_counter() - start
                process.kill()
                return seconds
    raise SystemExit(f"{' '.join(command)} ended without a line that begins with {sign!r}")


def peak_memory(command: list[str]) -> int:
    """Run a command to its end and return its peak resident memory, in bytes."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return usage.ru_maxrss * 1024


def main() -> None:
    """Run all three measurements."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", default="data")
    arguments = parser.parse_args()

    help_text = [sys.executable, str(TRAIN), "--help"]
    with tempfile.TemporaryDirectory() as folder:
        quick = [
            sys.executable, str(TRAIN), "--out", f"{folder}/run", "--data.root", arguments.root,
            "--train.epochs", "1", "--overwrite",
        ]  # fmt: skip
        one_step = [*quick, "--data.train_size", "128", "--data.val_size", "0"]
        for name, command, sign in (
            ("train.py --help", help_text, "usage"),
            ("first training step", one_step, "epoch"),
        ):
            times = [seconds_until(command, sign) for _ in range(arguments.rounds)]
            print(
                f"{name:<22}{statistics.median(times):5.2f} s   "
                f"({min(times):.2f} to {max(times):.2f}, {arguments.rounds} times)"
            )
        memory = peak_memory(quick)
        print(f"{'peak memory':<22}{memory / 1e9:5.2f} GB")


if __name__ == "__main__":
    main()
