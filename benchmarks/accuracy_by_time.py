"""Accuracy against training time: CIFAR-10 from scratch in 1 to 60 minutes.

    python benchmarks/accuracy_by_time.py [--seeds 3] [--runs runs/curve] [--root data]

Trains configs/quick.yaml with time budgets of 1, 3 and 10 minutes and configs/cifar10_hour.yaml,
each with several seeds, on CIFAR-10, which must be unpacked under --root; nothing else should run
meanwhile. Each run evaluates on the test images once, at its end. Finished runs are not repeated
and unfinished ones are resumed, so the command can be interrupted. Prints a table and draws
docs/images/accuracy_by_time.png.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import timing  # noqa: F401  it makes `vit` importable
from matplotlib.figure import Figure
from scipy.stats import t

from vit.run.checkpoint import latest_checkpoint
from vit.training.messages import clock

REPOSITORY = Path(__file__).resolve().parent.parent
PICTURE = REPOSITORY / "docs/images/accuracy_by_time.png"
ROWS = {  # flags by name
    "1 minute": ["--train.budget_minutes", "1"],
    "3 minutes": ["--train.budget_minutes", "3"],
    "10 minutes": ["--train.budget_minutes", "10"],
    "1 hour": ["--config", "cifar10_hour"],
}


@dataclass(frozen=True)
class Run:
    """What a finished run has reached.

    Attributes:
        seconds: Training time, with evaluation and logging.
        epochs: Passes over the training images.
        speed: Training images per second, over all of the training time.
        accuracy: Of the test images, in percent.
    """

    seconds: float
    epochs: float
    speed: float
    accuracy: float


def train(flags: list[str], seed: int, out: Path, root: str) -> None:
    """Train a model, unless the folder contains a finished run."""
    if not (out / "model.safetensors").exists():
        words = ["--train.seed", str(seed), "--out", str(out), "--data.root", root]
        subprocess.run([sys.executable, str(REPOSITORY / "train.py"), *flags, *words], check=True)


def read(out: Path) -> Run:
    """Read what a finished run has reached."""
    checkpoint = latest_checkpoint(out)
    assert checkpoint is not None
    seen = checkpoint.step * checkpoint.config["train"]["batch_size"]
    report = json.loads((out / "eval/report.json").read_text())
    return Run(
        checkpoint.seconds,
        seen / checkpoint.num_images,
        seen / checkpoint.seconds,
        100 * report["accuracy"],
    )


def interval(values: list[float]) -> float:
    """Return half the width of the 95% confidence interval of the mean of a few values."""
    if len(values) < 2:
        return float("nan")
    error = statistics.stdev(values) / len(values) ** 0.5
    return float(t.ppf(0.975, len(values) - 1)) * error


def print_table(rows: dict[str, list[Run]]) -> None:
    """Print a Markdown table."""
    print("\n| time budget | training time | epochs | images/s | test accuracy | mean |")
    print("|---|---|---|---|---|---|")
    for name, runs in rows.items():
        accuracies = [run.accuracy for run in runs]
        times = ", ".join(clock(run.seconds) for run in runs)
        print(
            f"| {name} | {times} | {', '.join(f'{run.epochs:.1f}' for run in runs)} | "
            f"{', '.join(f'{run.speed:,.0f}' for run in runs)} | "
            f"{', '.join(f'{accuracy:.2f}' for accuracy in accuracies)} | "
            f"{statistics.mean(accuracies):.2f} ± {interval(accuracies):.2f} |"
        )


def draw(rows: dict[str, list[Run]]) -> None:
    """Draw accuracy against time: each run as a dot, means with their intervals as a line."""
    figure = Figure(figsize=(6.4, 4), dpi=150, layout="constrained")
    axis = figure.subplots()
    minutes = [statistics.mean(run.seconds for run in runs) / 60 for runs in rows.values()]
    means = [statistics.mean(run.accuracy for run in runs) for runs in rows.values()]
    spreads = [interval([run.accuracy for run in runs]) for runs in rows.values()]
    axis.errorbar(minutes, means, spreads, color="tab:blue", capsize=4, linewidth=1.5)
    for runs in rows.values():
        times, accuracies = [run.seconds / 60 for run in runs], [run.accuracy for run in runs]
        axis.plot(times, accuracies, ".", color="0.35", markersize=5)
    for time, mean, spread in zip(minutes, means, spreads, strict=True):
        axis.annotate(
            f"{mean:.1f}%", (time, mean + spread), (0, 5), textcoords="offset points", ha="center"
        )
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
    print_table(rows)
    draw(rows)


if __name__ == "__main__":
    main()
