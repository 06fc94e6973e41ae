"""Records: accuracy on CIFAR-10 within a time budget, by the rules of docs/speedrun.md.

    python -m benchmarks.scale.speedrun run NAME CLASS MINUTES [--seeds 0 1 2 3 4] FLAGS
    python -m benchmarks.scale.speedrun verify NAME --seeds 5
    python -m benchmarks.scale.speedrun table

`run` trains with the FLAGS of train.py, evaluates each model with one view of the test images and
with six, and writes benchmarks/records/NAME.json; finished runs in --runs are not repeated.
`verify` trains a record's config with other seeds, and fails if one is below the record's 95%
prediction interval. `table` prints the table of docs/speedrun.md. A teacher is an earlier run, in
whose name {seed} stands for the seed; its time counts. Anchors are other people's models: timm's,
or the network of airbench.py, which takes no FLAGS.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import yaml
from scipy.stats import t as students_t
from torch import nn

from benchmarks.scale import airbench
from benchmarks.scale.trial import REPOSITORY, commit, machine, program
from benchmarks.tables import markdown, mean_of_runs, plus_minus
from vit.model_file import SavedModel, load_saved
from vit.run.folder import CONFIG_FILE, EVAL_FOLDER, METRICS_FILE, MODEL_FILE, REPORT_FILE
from vit.training.messages import clock

RECORDS = REPOSITORY / "benchmarks/records"
CLASSES = ("plain", "hybrid", "taught", "timm", "cnn")  # the last two are anchors
OVERTIME = 1.03  # of a budget
SIX = "eval_six"  # folder in that of a run
RUN_FILE = "run.json"  # of an anchor that train.py does not train
FEWEST = 5  # seeds of a record


def train(flags: list[str], kind: str, minutes: float, seed: int, out: Path, root: str) -> Any:
    """Train and evaluate a model unless that is finished; return what the record says of it.

    Raises:
        ValueError: The run took longer than the budget, or is not of the class.
    """
    if kind == "cnn":
        finished = out / RUN_FILE
        if not finished.exists():
            out.mkdir(parents=True, exist_ok=True)
            finished.write_text(json.dumps(airbench.run(minutes, seed, root)))
        return json.loads(finished.read_text())
    places = ["--train.seed", str(seed), "--out", str(out), "--data.root", root]
    filled = [flag.replace("{seed}", str(seed)) for flag in flags]
    if not (out / MODEL_FILE).exists():
        program("train.py", *filled, *places)
    if not (out / SIX / REPORT_FILE).exists():
        program("eval.py", str(out), "--views", "6", "--out", str(out / SIX), "--data.root", root)
    single, six = (json.loads((out / at / REPORT_FILE).read_text()) for at in (EVAL_FOLDER, SIX))
    spent, saved = single["training"], load_saved(out, "cpu")
    teacher = saved.config.optim.teacher
    if teacher is not None:
        other = json.loads((Path(teacher) / EVAL_FOLDER / REPORT_FILE).read_text())["training"]
        spent = {**spent, **{key: spent[key] + other[key] for key in ("seconds", "pflop")}}
        check_class("hybrid", load_saved(teacher, "cpu"), Path(teacher))
    if spent["seconds"] > OVERTIME * 60 * minutes:
        raise ValueError(f"{out}: {clock(spent['seconds'])} is more than {minutes:g} minutes")
    check_class(kind, saved, out)
    rows = map(json.loads, (out / METRICS_FILE).read_text().splitlines())
    curve = [[row["step"], row["val/accuracy"]] for row in rows if "val/accuracy" in row]
    return {
        "seed": seed, "accuracy": single["accuracy"], "six_views": six["accuracy"],
        **{key: spent[key] for key in ("seconds", "epochs", "steps", "pflop", "of_products")},
        "held_out_accuracy": curve,
    }  # fmt: skip


def check_class(kind: str, saved: SavedModel, out: Path) -> None:
    """Check that a model is of a class.

    Raises:
        ValueError: It is not.
    """
    model = saved.config.model
    is_timm = model.name.startswith("timm:") and saved.has_maps  # with attention
    if (saved.config.data.name, model.pretrained) != ("cifar10", None):
        raise ValueError(f"{out}: a record is of CIFAR-10, and from scratch")
    if not (is_timm if kind == "timm" else model.name == "vit"):
        raise ValueError(f"{out}: {model.name} is not a Vision Transformer of the class {kind}")
    if (saved.config.optim.teacher is not None) != (kind == "taught"):
        raise ValueError(f"{out}: a run with a teacher is taught, and others are not")
    if kind == "plain":
        if sum(isinstance(module, nn.Conv2d) for module in saved.model.modules()) != 1:
            raise ValueError(f"{out}: a plain model has no convolution but that of the patches")
        with tempfile.TemporaryDirectory() as folder:
            program("eval.py", str(out), "export", "timm", "--out", f"{folder}/timm")


def run(given: argparse.Namespace, flags: list[str]) -> None:
    """Train a recipe with several seeds, and write the record."""
    path = RECORDS / f"{given.name}.json"
    outs = [given.runs / f"{given.name}_{seed}" for seed in given.seeds]
    if len(given.seeds) < FEWEST:
        raise ValueError(f"--seeds: a record has at least {FEWEST}")
    if path.exists():
        raise ValueError(f"{path} is a record, and never changes; choose another name")
    at = commit()  # before an edit during the runs
    runs = [
        train(flags, given.kind, given.minutes, seed, out, given.root)
        for seed, out in zip(given.seeds, outs, strict=True)
    ]
    config = None
    if given.kind != "cnn":
        config = yaml.safe_load((outs[0] / CONFIG_FILE).read_text())
        del config["out"], config["train"]["seed"], config["data"]["root"]
    record = {
        "class": given.kind, "minutes": given.minutes, "date": str(date.today()),
        "commit": at, "machine": machine(), "flags": flags, "config": config, "runs": runs,
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(table([path]))


def verify(given: argparse.Namespace) -> None:
    """Train the config of a record with other seeds, and compare their accuracy."""
    record = json.loads((RECORDS / f"{given.name}.json").read_text())
    accuracies = [run["accuracy"] for run in record["runs"]]
    count, mean = len(accuracies), statistics.mean(accuracies)
    # The lower end of the 95% interval of one more run.
    width = float(students_t.ppf(0.975, count - 1)) * math.sqrt(1 + 1 / count)
    lowest = mean - width * statistics.stdev(accuracies)
    config = given.runs / f"{given.name}.yaml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(yaml.safe_dump(record["config"]))
    flags = [] if record["config"] is None else ["--config", str(config)]
    if record["class"] == "taught":  # by a teacher for each seed; the config names that of one
        at = record["flags"].index("--optim.teacher")
        flags += record["flags"][at : at + 2]
    for seed in given.seeds:
        out = given.runs / f"{given.name}_verify_{seed}"
        again = train(flags, record["class"], record["minutes"], seed, out, given.root)
        accuracy = again["accuracy"]
        print(f"seed {seed}: {accuracy:.2%}, record {mean:.2%}, at least {lowest:.2%} expected")
        if accuracy < lowest:
            raise ValueError(f"{given.name}: {accuracy:.2%} is below {lowest:.2%}")


def table(paths: list[Path]) -> str:
    """Format records as the table of docs/speedrun.md."""
    records = {path.stem: json.loads(path.read_text()) for path in paths}
    order = sorted(
        records, key=lambda n: (CLASSES.index(records[n]["class"]), records[n]["minutes"], n)
    )

    def cells(name: str) -> list[str]:
        record, runs = records[name], records[name]["runs"]
        single, six = ([100 * run[key] for run in runs] for key in ("accuracy", "six_views"))
        return [
            record["class"], f"{record['minutes']:g}",
            f"[{name}](../benchmarks/records/{name}.json)",
            ", ".join(clock(run["seconds"]) for run in runs),
            f"{statistics.mean(run['epochs'] for run in runs):.1f}",
            f"{statistics.mean(run['pflop'] for run in runs):.3g}",
            ", ".join(f"{value:.2f}" for value in single),
            plus_minus(*mean_of_runs(single), ".2f"), plus_minus(*mean_of_runs(six), ".2f"),
            f"{record['date']}, {record['commit']}, {record['machine']}",
        ]  # fmt: skip

    heads = ["class", "minutes", "record", "training time", "epochs", "PFLOP"]
    heads += ["accuracy, %", "mean", "mean, six views", "date, commit, machine"]
    return markdown(heads, map(cells, order))


def main() -> None:
    """Set or verify a record, or print all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table")
    for command, seeds in (("run", [0, 1, 2, 3, 4]), ("verify", [5])):
        part = commands.add_parser(command)
        part.add_argument("name")
        if command == "run":
            part.add_argument("kind", choices=CLASSES)
            part.add_argument("minutes", type=float)
        part.add_argument("--seeds", type=int, nargs="+", default=seeds)
        part.add_argument("--runs", type=Path, default=Path("runs/speedrun"))
        part.add_argument("--root", default="data")
    given, flags = parser.parse_known_args()
    if flags and (given.command != "run" or given.kind == "cnn"):
        parser.error(f"{given.command} takes no flags here: {' '.join(flags)}")
    try:
        if given.command == "run":
            run(given, flags)
        elif given.command == "verify":
            verify(given)
        else:
            print(table(sorted(RECORDS.glob("*.json"))))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
