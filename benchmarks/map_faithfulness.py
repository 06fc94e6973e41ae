"""The faithfulness of every kind of map, with several fillings of hidden patches.

    python benchmarks/map_faithfulness.py RUN ... [--images 1000] [--kinds ...] [--fillings ...]
        [--masks 50 100 ...] [--out results.json] [--add other.json ...]

RUN is a run folder, a model file or the name of a bundled model; several runs are seeds of one
recipe. For each run and filling, Markdown tables show deletion, insertion and (LeRF - MoRF) / 2 of
every kind of map, image by image over the centred Gaussian, then the ranks of the kinds by filling
and how far the fillings agree. Images, maps and scores with mean filling are those of
`eval.py RUN --attention --faithfulness N`.

--out keeps the scores of every image. If the file exists, what it has is not measured again, so an
interrupted measurement goes on, and kinds can be measured one after the other. --add takes scores
from further files; without RUN, only the tables are printed. RISE is measured for each number of
masks in --masks; it takes as many forward passes per image:

    python benchmarks/map_faithfulness.py runs/quick --out quick.json
    python benchmarks/map_faithfulness.py runs/quick --kinds rise --out quick_rise.json
    python benchmarks/map_faithfulness.py --add quick.json quick_rise.json
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from map_tables import RISE, number_of_masks, tables
from timing import timed
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.cli import user_errors
from vit.config import EvalConfig
from vit.data.splits import balanced_subset
from vit.explain.faithfulness import LEVELS, score_maps, with_baselines
from vit.explain.filling import FILLINGS, make_filling
from vit.explain.maps import ALL_KINDS, REFERENCES, to_patches
from vit.explain.references import rise
from vit.files import write_atomically
from vit.model.attention_model import no_maps_text
from vit.reporting.loading import load_run, load_test
from vit.reporting.map_faithfulness import BASELINES
from vit.seeding import generator

BATCH = EvalConfig().batch_size  # images per forward pass, as in eval.py
Results = dict[str, Any]  # images, seed, and by run: fillings (scores of every image), passes


def measure(
    run: str,
    kinds: Sequence[str],
    fillings: Sequence[str],
    count: int,
    seed: int,
    entry: Results,
    save: Callable[[], None],
) -> None:
    """Add the scores of a run that its entry lacks.

    Args:
        run: Run folder, model file or name of a bundled model.
        kinds: Labels, see `labels_of`; the two baselines are added.
        fillings: Keys of `FILLINGS`.
        count: Number of test images.
        seed: Seed of the choice of images, of random maps and of fillings.
        entry: "fillings", scores by filling and kind, and "passes", by kind.
        save: Called when the scores of a kind have been added.

    Raises:
        ValueError: The model or its test images cannot be read, or it has no attention maps.
    """
    scores = entry["fillings"]
    missing = {
        name: [kind for kind in [*BASELINES, *kinds] if kind not in scores.get(name, {})]
        for name in fillings
    }
    needed = [kind for kind in kinds if any(kind in found for found in missing.values())]
    if not any(missing.values()):
        return
    classifier, pixels = load(run, count, seed)
    target, maps, passes = compute_maps(classifier, pixels, needed)
    entry["passes"] |= passes
    inputs = classifier.normalize(pixels)
    by_kind = with_baselines(maps, seed)
    total = 2 * len(LEVELS) * len(inputs) * sum(map(len, missing.values()))
    # disable=None shows the bar on terminals only.
    with tqdm(total=total, desc="faithfulness", unit="image", leave=False, disable=None) as bar:

        def classify(part: Tensor) -> Tensor:
            bar.update(len(part))
            return classifier.forward(part)

        for name, lacking in missing.items():
            fill = make_filling(name, inputs, seed)
            for kind in lacking:
                found = score_maps(
                    classify, inputs, {kind: by_kind[kind]}, target, batch_size=BATCH, fill=fill
                )[kind]
                scores.setdefault(name, {})[kind] = {
                    metric: [round(value, 6) for value in found[metric].tolist()]
                    for metric in ("deletion", "insertion")
                }
                save()


def load(run: str, count: int, seed: int) -> tuple[Classifier, Tensor]:
    """Load a model and the test images (B, channels, H, W) uint8 that eval.py chooses, too."""
    options = EvalConfig(seed=seed)
    saved = load_run(run, options)
    classifier = saved.classifier
    if not classifier.has_maps:
        raise ValueError(f"{run}: {no_maps_text(classifier.model)}; leave it out")
    test = load_test(saved, options)
    chosen = balanced_subset(test.labels, min(count, len(test)), seed, "eval.faithfulness")
    pixels = test.select(chosen).pixels()
    print(f"{saved.describe()}, {len(pixels):,} {saved.config.data.name} test images", flush=True)
    return classifier, pixels


def compute_maps(
    classifier: Classifier, pixels: Tensor, kinds: Sequence[str]
) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Compute maps of the predicted class, and what they cost.

    Returns:
        The predicted classes (B,); maps (B, rows, columns) on the CPU by kind; and the time of each
        kind, in forward passes of the same images just before and after it.
    """
    precision = classifier.precision
    logits, first = classifier.maps(pixels, ["rollout", "lrp"], None, precision, BATCH)
    target, grid = logits.argmax(dim=1), (first["lrp"].shape[1], first["lrp"].shape[2])
    maps: dict[str, Tensor] = {}
    passes: dict[str, float] = {}
    numbers = sorted(number_of_masks(kind) for kind in kinds if kind.startswith(RISE))
    for kind in [kind for kind in kinds if not kind.startswith(RISE)] + ["rise"] * bool(numbers):
        print(f"  {ALL_KINDS[kind]}", flush=True)
        before = timed(lambda: classifier.logits(pixels, BATCH))
        if kind == "rise":
            found, seconds = rise_maps(classifier, pixels, grid, target, numbers)
        else:
            # None: the class that the kind's own pass predicts, as in eval.py.
            aim = target if kind in REFERENCES else None
            start = time.perf_counter()
            _, found = classifier.maps(pixels, [kind], aim, precision, BATCH)
            seconds = {kind: time.perf_counter() - start}
        after = timed(lambda: classifier.logits(pixels, BATCH))
        maps |= {name: to_patches(values.cpu(), grid) for name, values in found.items()}
        passes |= {name: round(2 * took / (before + after), 2) for name, took in seconds.items()}
    return target, maps, passes


def rise_maps(
    classifier: Classifier,
    pixels: Tensor,
    grid: tuple[int, int],
    target: Tensor,
    numbers: Sequence[int],
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Compute RISE with growing numbers of masks, each of which includes the masks before it.

    Returns:
        Maps (B, rows, columns) and seconds by label, such as "rise_500".
    """
    parts: dict[str, list[Tensor]] = {f"{RISE}{number}": [] for number in numbers}
    seconds = dict.fromkeys(parts, 0.0)
    total = numbers[-1] * len(pixels)
    with tqdm(total=total, desc="RISE", unit="image", leave=False, disable=None) as bar:

        def classify(inputs: Tensor) -> Tensor:
            bar.update(len(inputs))
            return classifier.forward(inputs)

        for start in range(0, len(pixels), BATCH):
            inputs = classifier.normalize(pixels[start : start + BATCH])
            aim = target[start : start + BATCH]
            random = generator(0, "rise")  # the masks of vit.explain.maps
            began, done, mean = time.perf_counter(), 0, torch.zeros(())
            for number, (label, maps) in zip(numbers, parts.items(), strict=True):
                more = rise(classify, inputs, grid, aim, number - done, random)
                mean = (done * mean.to(more.device) + (number - done) * more) / number
                done = number
                maps.append(mean)
                seconds[label] += time.perf_counter() - began
    return {label: torch.cat(maps) for label, maps in parts.items()}, seconds


def read(path: Path, images: int | None, seed: int | None) -> Results:
    """Read results.

    Raises:
        ValueError: The file has no results, or those of other images.
    """
    try:
        results = json.loads(path.read_text())
        found = results["images"], results["seed"]
    except (OSError, ValueError, TypeError, KeyError):
        raise ValueError(f"{path}: not a file that --out wrote") from None
    if images is not None and found != (images, seed):
        raise ValueError(
            f"{path}: has --images {found[0]} --seed {found[1]}, not --images {images} "
            f"--seed {seed}; use the same, or another file"
        )
    return results


def add(results: Results, more: Results) -> None:
    """Add the scores of other results to results."""
    for run, entry in more["runs"].items():
        own = results["runs"].setdefault(run, {"fillings": {}, "passes": {}})
        own["passes"] |= entry["passes"]
        for filling, kinds in entry["fillings"].items():
            own["fillings"].setdefault(filling, {}).update(kinds)


def labels_of(kinds: Sequence[str], masks: Sequence[int]) -> list[str]:
    """Return kinds, with "rise" replaced by a label for each number of masks, such as "rise_500".

    Raises:
        ValueError: A number of masks is odd, or less than 2.
    """
    if wrong := [number for number in masks if number < 2 or number % 2]:
        raise ValueError(f"--masks: {wrong[0]} is not allowed; it must be an even number from 2")
    labels = [f"{RISE}{number}" for number in sorted({*masks})]
    return [label for kind in kinds for label in (labels if kind == "rise" else [kind])]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run folder or model file")
    parser.add_argument("--images", type=int, default=1000, help="test images (default: 1000)")
    parser.add_argument(
        "--kinds", nargs="+", choices=ALL_KINDS, metavar="KIND",
        default=[kind for kind in ALL_KINDS if kind != "rise"],
        help=f"kinds of map, of {', '.join(ALL_KINDS)} (default: all but rise)",
    )  # fmt: skip
    parser.add_argument(
        "--fillings", nargs="+", choices=FILLINGS, metavar="FILLING", default=[*FILLINGS],
        help=f"fillings, of {', '.join(FILLINGS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--masks", nargs="+", type=int, metavar="N", default=[50, 100, 200, 500, 1000, 2000],
        help="numbers of masks of kind rise (default: 50 100 200 500 1000 2000)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the images (default: 0)")
    parser.add_argument("--out", type=Path, help="file that keeps the scores, and goes on")
    parser.add_argument("--add", nargs="+", type=Path, default=[], help="files with more scores")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and print the tables."""
    args = parse(arguments)
    if not (args.runs or args.add):
        raise ValueError("give a RUN to measure, or --add files whose tables to print")
    if args.images < 2:
        raise ValueError(f"--images: {args.images} is not allowed; it must be at least 2")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out: folder not found: {args.out.parent}")
    kinds = labels_of(args.kinds, args.masks)
    if args.runs:
        results: Results = {"images": args.images, "seed": args.seed, "runs": {}}
        if args.out is not None and args.out.exists():
            add(results, read(args.out, args.images, args.seed))
    else:
        found = read(args.add[0], None, None)
        results = {"images": found["images"], "seed": found["seed"], "runs": {}}

    def save() -> None:
        if args.out is not None:
            write_atomically(args.out, json.dumps(results).encode())

    others = [read(path, results["images"], results["seed"]) for path in args.add]
    for run in args.runs:
        entry = results["runs"].setdefault(run, {"fillings": {}, "passes": {}})
        measure(run, kinds, args.fillings, args.images, args.seed, entry, save)
    for other in others:
        add(results, other)
    print(f"\n{tables(results)}")


if __name__ == "__main__":
    with user_errors():
        main()
