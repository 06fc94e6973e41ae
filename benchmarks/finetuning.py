"""What fine-tuning gains over training from scratch.

    python benchmarks/finetuning.py classes [--quick] [--data data] [--out runs/finetuning]
    python benchmarks/finetuning.py size [--quick] [--data data] [--out runs/finetuning]

classes: trains the quick recipe on eight classes of CIFAR-10, without cat and dog. With 100
training images each of cat and dog it then trains the same model from scratch, the whole pretrained
model, and only its head (linear probe), and tests on their 2,000 test images, with three draws of
training images and seeds.

size: trains on 5,000 images of CIFAR-10 at 64 x 64 pixels, from scratch and from the bundled
cifar10_quick, and cifar10_quick at its own 32 x 32 pixels, for the same number of epochs.

Hyperparameters are chosen for each method from a grid of equal size. In `classes`, models trained
on 100 other training images each are compared on 1,000 training images each of cat and dog, none of
which is in a run of the table. In `size`, they are compared on 2,000 held-out training images. The
test images are used once per run of the table. Both write all numbers and commands to
OUT/<experiment>.json. --quick runs everything on a few images in a minute, to no purpose but that.
"""

import argparse
import itertools
import json
import shlex
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import timing  # noqa: F401  # so that vit is found from any folder
import torch
from PIL import Image
from torch import Tensor

from vit.cli import parse_train
from vit.data.datasets import ImageSet, load
from vit.run.folder import EVAL_FOLDER, METRICS_FILE, MODEL_FILE, REPORT_FILE
from vit.seeding import generator
from vit.training.train import train

NEW = ("cat", "dog")
SEEDS = (0, 1, 2)
PER_CLASS = 100  # training images of each new class
POOL = 3000  # images of each new class from which those of the table are drawn; others choose
CHOICE = 1000  # images of each new class on which hyperparameters are chosen
HELD_OUT = 2000  # training images on which those of `size` are chosen
FEW = 5000  # training images of `size`
BUNDLED = "cifar10_quick"

Flags = dict[str, Any]


def run(out: Path, recipe: str, flags: Flags) -> dict[str, Any]:
    """Train as the command line does, unless that is done already; return report and command."""
    words = ["--config", recipe, "--out", str(out)]
    for key, value in {"track.probes": 0, "track.every": 1000, **flags}.items():
        words += [f"--{key}", str(value)]
    command = shlex.join(["python", "train.py", *words])
    print(f"\n{command}", flush=True)
    if not (out / MODEL_FILE).exists():
        train(parse_train(words)[0])
    report = json.loads((out / EVAL_FOLDER / REPORT_FILE).read_text())
    return {"command": command, "accuracy": report["accuracy"], "n": report["n"]}


def validation_accuracy(out: Path) -> float:
    """Return the accuracy on the held-out images after the last step of a run."""
    rows = map(json.loads, (out / METRICS_FILE).read_text().splitlines())
    return [row["val/accuracy"] for row in rows if "val/accuracy" in row][-1]


def combinations(grid: dict[str, Sequence[Any]]) -> Iterator[Flags]:
    """List all combinations of a grid {flag: values}."""
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def write_folder(root: Path, train_set: ImageSet, test_set: ImageSet) -> Path:
    """Write an image folder, root/{train,test}/<class>/<number>.png, unless it is there already."""
    done = root / "complete"
    if not done.exists():
        for split, images in (("train", train_set), ("test", test_set)):
            pairs = zip(images.pixels(), images.labels, strict=True)
            for number, (image, label) in enumerate(pairs):
                path = root / split / images.classes[int(label)] / f"{number:05d}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
        done.touch()
    return root


def of_classes(images: ImageSet, names: Sequence[str], most: int | None) -> Tensor:
    """Return the indices of the images of some classes, in order, at most so many of each."""
    found = [(images.labels == images.classes.index(name)).nonzero()[:, 0] for name in names]
    return torch.cat([indices[:most] for indices in found])


def drawn(images: ImageSet, first: int, last: int, count: int, seed: int) -> Tensor:
    """Draw `count` images of each new class from its images number `first` to `last`."""
    parts = []
    for name in NEW:
        members = (images.labels == images.classes.index(name)).nonzero()[first:last, 0]
        order = torch.randperm(len(members), generator=generator(seed, "draw", name))
        parts.append(members[order[:count]])
    return torch.cat(parts)


def write_data(out: Path, data: str, quick: bool) -> tuple[Path, Path, dict[int, Path]]:
    """Write the image folders: eight classes, cat and dog for the choice, and for each seed."""
    training, test = (load("cifar10", data, train=split) for split in (True, False))
    old = [name for name in training.classes if name not in NEW]
    few, choice = (100, 100) if quick else (None, CHOICE)
    eight = write_folder(
        out / "eight",
        training.select(of_classes(training, old, few)),
        test.select(of_classes(test, old, few)),
    )
    end = POOL + PER_CLASS + choice
    chooser = write_folder(
        out / "choice",
        training.select(drawn(training, POOL, POOL + PER_CLASS, PER_CLASS, seed=0)),
        training.select(drawn(training, POOL + PER_CLASS, end, choice, seed=0)),
    )
    tested = test.select(of_classes(test, NEW, few))
    return (
        eight,
        chooser,
        {
            seed: write_folder(
                out / f"seed_{seed}",
                training.select(drawn(training, 0, POOL, PER_CLASS, seed)),
                tested,
            )
            for seed in (SEEDS[:1] if quick else SEEDS)
        },
    )


def methods_of_classes(
    pretrained: Path, quick: bool
) -> dict[str, tuple[str, Flags, dict[str, Any]]]:
    """Return for each method its recipe, its flags and the grid from which others are chosen."""
    common: Flags = {"data.name": "folder", "data.val_size": 0, "train.batch_size": 50}
    weights: Flags = {"model.pretrained": pretrained}
    still: Flags = {"train.freeze": "backbone", "augment.crop_padding": 0, "augment.flip": False}
    epochs = (1,) if quick else (50, 150)
    return {
        "from scratch": (
            "quick",
            {**common, "train.small_share": 0},
            {"train.epochs": epochs, "optim.muon_lr": (0.01,) if quick else (0.005, 0.01, 0.02)},
        ),
        "linear probe": (
            "finetune",
            {**common, **weights, **still, "optim.layer_decay": "null"},
            {"train.epochs": epochs, "optim.lr": (0.01,) if quick else (1e-3, 1e-2, 1e-1)},
        ),
        "fine-tuned": (
            "finetune",
            {**common, **weights},
            {"train.epochs": epochs, "optim.lr": (1e-3,) if quick else (3e-4, 1e-3, 3e-3)},
        ),
    }


def compare_classes(out: Path, data: str, quick: bool) -> dict[str, Any]:
    """Run the experiment `classes`; return what is written as JSON."""
    eight, chooser, folders = write_data(out / "data", data, quick)
    length: Flags = {"train.epochs": 1, "data.val_size": 80} if quick else {}
    flags: Flags = {"data.name": "folder", "data.root": eight, **length}
    pretrained = out / "pretrained"
    result: dict[str, Any] = {"pretrained": run(pretrained, "quick", flags), "methods": {}}
    for name, (recipe, flags, grid) in methods_of_classes(pretrained, quick).items():
        folder = out / name.replace(" ", "_")
        choices = []
        for number, chosen in enumerate(combinations(grid)):
            values = {**flags, **chosen, "data.root": chooser, "train.seed": 100}
            choices.append({**chosen, **run(folder / f"choice_{number}", recipe, values)})
        best = max(choices, key=lambda choice: choice["accuracy"])
        chosen = {key: best[key] for key in grid}
        runs = [
            run(
                folder / f"seed_{seed}",
                recipe,
                {**flags, **chosen, "data.root": root, "train.seed": seed},
            )
            for seed, root in folders.items()
        ]
        result["methods"][name] = {"chosen": chosen, "choices": choices, "runs": runs}
    return result


def compare_sizes(out: Path, data: str, quick: bool) -> dict[str, Any]:
    """Run the experiment `size`; return what is written as JSON."""
    common: Flags = {"data.name": "cifar10", "data.root": data, "data.val_size": HELD_OUT}
    common["data.train_size"] = FEW
    common |= {"train.epochs": 1, "data.train_size": 256, "data.val_size": 100} if quick else {}
    common = {"train.epochs": 3, **common}
    rates = (3e-4,) if quick else (1e-4, 3e-4, 1e-3)
    large: Flags = {"data.image_size": 64}
    weights: Flags = {"model.pretrained": BUNDLED}
    methods: dict[str, tuple[str, Flags, dict[str, Any]]] = {
        "64 x 64, from scratch": (
            "quick",
            {**common, **large},
            {"optim.muon_lr": (0.02,) if quick else (0.01, 0.02, 0.04)},
        ),
        "32 x 32, fine-tuned": ("finetune", {**common, **weights}, {"optim.lr": rates}),
        "64 x 64, fine-tuned": ("finetune", {**common, **large, **weights}, {"optim.lr": rates}),
    }
    result: dict[str, Any] = {"methods": {}}
    for name, (recipe, flags, grid) in methods.items():
        folder = out / name.replace(" ", "").replace(",", "_")
        choices, runs = [], []
        for number, chosen in enumerate(combinations(grid)):
            # Seed 0 is the first run of the table too; its test result is not looked at before.
            path = folder / f"choice_{number}"
            done = run(path, recipe, {**flags, **chosen, "train.seed": SEEDS[0]})
            choices.append({**chosen, **done, "accuracy": validation_accuracy(path)})
        best = max(range(len(choices)), key=lambda number: choices[number]["accuracy"])
        chosen = {key: choices[best][key] for key in grid}
        runs = [run(folder / f"choice_{best}", recipe, {**flags, **chosen, "train.seed": SEEDS[0]})]
        for seed in () if quick else SEEDS[1:]:
            values = {**flags, **chosen, "train.seed": seed}
            runs.append(run(folder / f"seed_{seed}", recipe, values))
        result["methods"][name] = {"chosen": chosen, "choices": choices, "runs": runs}
    return result


def table(result: dict[str, Any]) -> str:
    """Format the methods with mean, standard deviation and single test accuracies, in percent."""
    lines = ["| method | test accuracy, % | spread | runs | chosen |", "|---|---|---|---|---|"]
    for name, method in result["methods"].items():
        values = [100 * done["accuracy"] for done in method["runs"]]
        spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""
        single = ", ".join(f"{value:.2f}" for value in values)
        chosen = ", ".join(f"{key} {value}" for key, value in method["chosen"].items())
        lines.append(f"| {name} | {statistics.mean(values):.2f} | {spread} | {single} | {chosen} |")
    return "\n".join(lines)


def main() -> None:
    """Run an experiment and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("experiment", choices=("classes", "size"))
    parser.add_argument("--quick", action="store_true", help="a few images, one run per method")
    parser.add_argument("--data", default="data", help="folder of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("runs/finetuning"))
    options = parser.parse_args()
    compare = {"classes": compare_classes, "size": compare_sizes}[options.experiment]
    out = options.out / (f"{options.experiment}_quick" if options.quick else options.experiment)
    result = compare(out, options.data, options.quick)
    path = options.out / f"{out.name}.json"
    path.write_text(json.dumps(result, indent=2, default=str))
    print(f"\n{table(result)}\n\nwrote {path}")


if __name__ == "__main__":
    main()
