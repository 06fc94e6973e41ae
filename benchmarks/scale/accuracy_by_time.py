"""Accuracy against training time: CIFAR-10 from scratch in 1 to 60 minutes.

    python -m benchmarks.scale.accuracy_by_time [--seeds 3] [--runs runs/curve] [--root data]

Trains configs/quick.yaml with time budgets of 1, 3 and 10 minutes, and configs/cifar10_hour.yaml,
each with several seeds, on CIFAR-10, which must be unpacked under --root; nothing else should run
meanwhile. The test images are used at the end of each run: once as they are, and once together with
their mirror images. Finished runs are not repeated and unfinished ones are resumed, so the command
can be interrupted. Prints a table and draws docs/images/accuracy_by_time.png, with the record
plain_10 as well. With --seeds 3 it takes about four hours.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.scale.trial import REPOSITORY
from benchmarks.tables import markdown, mean_of_runs, plus_minus
from vit.run.checkpoint import latest_checkpoint
from vit.run.folder import EVAL_FOLDER, MODEL_FILE, REPORT_FILE
from vit.training.messages import clock

PICTURE = REPOSITORY / "docs/images/accuracy_by_time.png"
PLAIN = REPOSITORY / "benchmarks/records/plain_10.json"
ROWS = {  # flags by time
    "1 minute": ["--train.budget_minutes", "1"],
    "3 minutes": ["--train.budget_minutes", "3"],
    "10 minutes": ["--train.budget_minutes", "10"],
    "1 hour": ["--config", "cifar10_hour"],
}
FLIPPED = "eval_flipped"  # folder in that of a run
# Compact Transformers on an AMD 5900X: minutes and test accuracy (arXiv 2104.05704, version 4).
PUBLISHED = (30, 80)


class Run(NamedTuple):
    """What a finished run has reached."""

    seconds: float  # training time, with evaluation and logging
    epochs: float  # passes over the training images
    speed: float  # training images per second
    accuracy: float  # of the test images, in percent
    flipped: float  # the same if the logits of each image and its mirror image are averaged


def train(flags: list[str], seed: int, out: Path, root: str) -> None:
    """Train and evaluate a model, unless the folder contains a finished run."""
    if not (out / MODEL_FILE).exists():
        words = ["--train.seed", str(seed), "--out", str(out), "--data.root", root]
        subprocess.run([sys.executable, str(REPOSITORY / "train.py"), *flags, *words], check=True)
    if not (out / FLIPPED / REPORT_FILE).exists():
        words = ["--flip", "--out", str(out / FLIPPED), "--data.root", root]
        subprocess.run([sys.executable, str(REPOSITORY / "eval.py"), str(out), *words], check=True)


def read(out: Path) -> Run:
    """Read what a finished run has reached."""
    checkpoint = latest_checkpoint(out)
    assert checkpoint is not None
    seen = checkpoint.step * checkpoint.config.train.batch_size
    accuracies = (
        100 * json.loads((out / folder / REPORT_FILE).read_text())["accuracy"]
        for folder in (EVAL_FOLDER, FLIPPED)
    )
    seconds = checkpoint.seconds
    return Run(seconds, seen / checkpoint.num_images, seen / seconds, *accuracies)


def table(rows: dict[str, list[Run]]) -> str:
    """Format the runs of each row, and the mean of their accuracies with its 95% interval."""

    def cells(name: str, runs: list[Run]) -> list[str]:
        return [
            name,
            ", ".join(clock(run.seconds) for run in runs),
            ", ".join(f"{run.epochs:.1f}" for run in runs),
            ", ".join(f"{run.speed:,.0f}" for run in runs),
            ", ".join(f"{run.accuracy:.2f}" for run in runs),
            plus_minus(*mean_of_runs([run.accuracy for run in runs]), ".2f"),
            plus_minus(*mean_of_runs([run.flipped for run in runs]), ".2f"),
        ]

    heads = ["time budget", "training time", "epochs", "images/s", "test accuracy"]
    heads += ["mean", "mean with flips"]
    return markdown(heads, [cells(name, runs) for name, runs in rows.items()])


def draw(rows: dict[str, list[Run]]) -> None:
    """Draw accuracy against time: each run as a dot, the means of each recipe as a line."""
    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axis = figure.subplots()
    record = json.loads(PLAIN.read_text())["runs"]
    plain = [(run["seconds"] / 60, 100 * run["accuracy"]) for run in record]
    curve = [[(run.seconds / 60, run.accuracy) for run in runs] for runs in rows.values()]
    for label, groups in {"convolutional stem": curve, "plain ViT": [plain]}.items():
        means = [np.mean(group, axis=0) for group in groups]
        axis.plot(*np.transpose(means), "_-", markersize=14, label=label)
        for group, (time, mean) in zip(groups, means, strict=True):
            axis.plot(*np.transpose(group), ".", color="0.35", markersize=5)
            axis.annotate(
                f"{mean:.1f}%", (time, mean), (0, 7), textcoords="offset points", ha="center"
            )
    axis.plot(*PUBLISHED, "x", color="tab:red", label="Compact Transformers, AMD 5900X")
    axis.legend(frameon=False, loc="upper left", fontsize="small")
    axis.set_xscale("log")
    axis.set_xticks([1, 3, 10, 30, 60], ["1", "3", "10", "30", "60"])
    axis.minorticks_off()
    axis.set(xlabel="training time on two CPU cores, minutes", ylabel="test accuracy, %")
    axis.margins(y=0.15)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE)


def main() -> None:
    """Train what is missing, print the table and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/curve"))
    parser.add_argument("--root", default="data")
    arguments = parser.parse_args()
    rows: dict[str, list[Run]] = {}
    for name, flags in ROWS.items():
        for seed in range(arguments.seeds):
            out = arguments.runs / f"{name.replace(' ', '_')}_{seed}"
            train(flags, seed, out, arguments.root)
            rows.setdefault(name, []).append(read(out))
    print(f"\n{table(rows)}")
    draw(rows)


if __name__ == "__main__":
    main()
