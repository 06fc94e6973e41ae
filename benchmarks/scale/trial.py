"""One trial of settings on held-out images, as a line in docs/measurements/trials.md.

    python -m benchmarks.scale.trial "whitened stem off" --train.epochs 2 --train.whiten false

Trains quick, or the recipe that --config names, with 5,000 held-out images unless the flags say
otherwise, once for each of --seeds, one run after the other, and appends a line to the log: nothing
in it is edited later. The test images that a run ends with are not looked at.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from benchmarks.tables import spread
from vit.run.folder import METRICS_FILE
from vit.training.messages import clock

REPOSITORY = Path(__file__).resolve().parents[2]
LOG = REPOSITORY / "docs/measurements/trials.md"


def machine() -> str:
    """Return the name of the processor and the number of its cores."""
    about = Path("/proc/cpuinfo")
    text = about.read_text() if about.exists() else ""
    names = re.findall(r"model name\s*: (.*)", text) or [platform.processor()]
    return f"{names[0]}, {max(1, len(names))} cores"


def git(*words: str) -> str:
    """Return what git prints about this repository."""
    command = ["git", "-C", str(REPOSITORY), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit() -> str:
    """Return the commit of this repository, and whether what trains has been changed since."""
    changed = git("status", "--porcelain", "--", "vit", "configs", "train.py", "benchmarks/scale")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def program(name: str, *words: str) -> str:
    """Run train.py or eval.py; return what it prints."""
    command = [sys.executable, str(REPOSITORY / name), *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(flags: list[str], seed: int, out: Path) -> tuple[float, float, float]:
    """Train a run; return its last accuracy in percent and loss, and the seconds it took."""
    words = ["--data.val_size", "5000", *flags, "--train.seed", str(seed), "--out", str(out)]
    printed = program("train.py", *words)
    (minutes, seconds) = re.findall(r"^time +(\d+):(\d+) of training", printed, re.MULTILINE)[0]
    lines = map(json.loads, (out / METRICS_FILE).read_text().splitlines())
    last = [line for line in lines if "val/accuracy" in line][-1]
    return 100 * last["val/accuracy"], last["val/loss"], 60 * int(minutes) + int(seconds)


def main() -> None:
    """Train and append the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", help="what is tried, in words")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given, flags = parser.parse_known_args()
    at = commit()  # before an edit during the runs
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(flags, seed, Path(folder) / f"{seed}") for seed in given.seeds]
    accuracies, losses, seconds = zip(*runs, strict=True)
    numbers = [spread(accuracies), spread(losses, ".3f")] if len(runs) > 1 else [
        f"{accuracies[0]:.2f}", f"{losses[0]:.3f}"
    ]  # fmt: skip
    cells = [
        str(date.today()), at, given.what, f"`{' '.join(flags)}`", machine(),
        " ".join(map(str, given.seeds)), *numbers, clock(sum(seconds) / len(seconds)),
    ]  # fmt: skip
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.write(f"{' | '.join(cells)}\n")


if __name__ == "__main__":
    main()
