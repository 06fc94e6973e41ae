"""The faithfulness of every kind of map, with several fillings of hidden patches.

    python benchmarks/map_faithfulness.py RUN ... [--images 1000] [--kinds ...] [--fillings ...]
        [--masks 50 100 ...] [--out results.json] [--add other.json ...]

RUN is a run folder, a model file or the name of a bundled model; several runs are seeds of one
recipe. For each run and filling, Markdown tables show deletion, insertion and (LeRF - MoRF) / 2 of
every kind of map, image by image over the centred Gaussian, then the ranks of the kinds by filling
and how far the fillings agree. Images, maps and scores with mean filling are those of
`eval.py RUN maps --faithfulness N`.

--out keeps the scores of every image, and is written after each kind of map. If the file exists,
what it has is not measured again, so an interrupted measurement goes on with the kind it was at,
and kinds can be measured one after the other. The scores of a model that has changed since are
refused. --add takes scores from further files; without RUN, only the tables are printed. RISE is
measured for each number of masks in --masks; it takes as many forward passes per image:

    python benchmarks/map_faithfulness.py runs/quick --out quick.json
    python benchmarks/map_faithfulness.py runs/quick --kinds rise --out quick_rise.json
    python benchmarks/map_faithfulness.py --add quick.json quick_rise.json
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from map_results import Results, add, digest_of, read
from map_tables import RISE, number_of_masks, tables
from timing import timed
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.cli import user_errors
from vit.data.sampling import balanced_subset
from vit.explain.faithfulness import LEVELS, score_maps, with_baselines
from vit.explain.filling import FILLINGS, Filling, make_filling, to_patches
from vit.explain.references import rise
from vit.files import write_atomically
from vit.model.attention_model import no_maps_text
from vit.model_file import SavedModel, load_model
from vit.registry import ALL_KINDS
from vit.reporting.config import MapsConfig
from vit.reporting.loading import load_test
from vit.reporting.map_faithfulness import BASELINES
from vit.seeding import generator

BATCH = MapsConfig().batch_size  # images per forward pass, as in eval.py


def measure(
    saved: SavedModel,
    kinds: Sequence[str],
    fillings: Sequence[str],
    count: int,
    seed: int,
    entry: Results,
    save: Callable[[], None],
) -> None:
    """Add the scores of a run that its entry lacks.

    Args:
        saved: The run's model.
        kinds: Labels, see `labels_of`; the two baselines are added.
        fillings: Keys of `FILLINGS`.
        count: Number of test images.
        seed: Seed of the choice of images, of random maps and of fillings.
        entry: "fillings", scores by filling and kind, and "passes", by kind.
        save: Called when the scores of a kind have been added for all fillings.

    Raises:
        ValueError: The test images cannot be read.
    """
    scores = entry["fillings"]
    missing = {
        name: [kind for kind in [*BASELINES, *kinds] if kind not in scores.get(name, {})]
        for name in fillings
    }
    needed = [kind for kind in kinds if any(kind in found for found in missing.values())]
    if not any(missing.values()):
        return
    classifier, pixels = saved.classifier, choose_images(saved, count, seed)
    logits, first = classifier.maps(pixels, ["rollout", "lrp"], None, classifier.precision, BATCH)
    target, grid = logits.argmax(dim=1), (first["lrp"].shape[1], first["lrp"].shape[2])
    inputs = classifier.normalize(pixels)
    fills = {name: make_filling(name, inputs, seed) for name, found in missing.items() if found}
    everything = with_baselines({"lrp": first["lrp"]}, seed)
    baselines = {kind: everything[kind] for kind in BASELINES}
    # The baselines come first: tables need them.
    computed = compute_maps(classifier, pixels, needed, grid, target)
    for maps, passes in itertools.chain([(baselines, {})], computed):
        lacking = {
            name: {kind: values for kind, values in maps.items() if kind in missing[name]}
            for name in fills
        }
        for name, found in score(classifier, inputs, target, lacking, fills).items():
            scores.setdefault(name, {}).update(found)
        entry["passes"] |= passes
        save()


def score(
    classifier: Classifier,
    inputs: Tensor,
    target: Tensor,
    maps: Mapping[str, dict[str, Tensor]],
    fills: Mapping[str, Filling],
) -> dict[str, dict[str, Any]]:
    """Score maps, by filling and kind; return deletion and insertion of every image likewise."""
    scores = {}
    total = 2 * len(LEVELS) * len(inputs) * sum(map(len, maps.values()))
    # disable=None shows the bar on terminals only.
    with tqdm(total=total, desc="faithfulness", unit="image", leave=False, disable=None) as bar:

        def classify(part: Tensor) -> Tensor:
            bar.update(len(part))
            return classifier.forward(part)

        for name, by_kind in maps.items():
            found = score_maps(
                classify, inputs, by_kind, target, batch_size=BATCH, fill=fills[name]
            )
            scores[name] = {
                kind: {
                    metric: [round(value, 6) for value in values[metric].tolist()]
                    for metric in ("deletion", "insertion")
                }
                for kind, values in found.items()
            }
    return scores


def load_runs(runs: Sequence[str]) -> tuple[dict[str, SavedModel], dict[str, str]]:
    """Load models, each once even if it is named twice.

    Returns:
        The models, and the digests of their files, by run.

    Raises:
        ValueError: A model cannot be read, has no attention maps, or is that of another run.
    """
    models, digests = {}, {}
    names: dict[str, str] = {}  # by digest
    for run in dict.fromkeys(str(Path(run)) for run in runs):
        saved = load_model(run)
        if not saved.classifier.has_maps:
            raise ValueError(f"{run}: {no_maps_text(saved.classifier.model)}; leave it out")
        models[run], digests[run] = saved, digest_of(saved.path)
        other = names.setdefault(digests[run], run)
        if other != run:
            raise ValueError(f"{run}: the same model as {other}; give only one of them")
    return models, digests


def choose_images(saved: SavedModel, count: int, seed: int) -> Tensor:
    """Return the test images (B, channels, H, W) uint8 that eval.py chooses, too."""
    test = load_test(saved)
    chosen = balanced_subset(test.labels, min(count, len(test)), seed, "eval.faithfulness")
    pixels = test.select(chosen).pixels()
    print(f"{saved.describe()}, {len(pixels):,} {saved.config.data.name} test images", flush=True)
    return pixels


def compute_maps(
    classifier: Classifier,
    pixels: Tensor,
    kinds: Sequence[str],
    grid: tuple[int, int],
    target: Tensor,
) -> Iterator[tuple[dict[str, Tensor], dict[str, float]]]:
    """Compute maps of the predicted class, one kind after the other, and what they cost.

    Yields:
        Maps (B, rows, columns) on the CPU by label: one, or those of RISE with all numbers of
        masks. And the time of each, in forward passes of the same images just before and after it.
    """
    numbers = sorted(number_of_masks(kind) for kind in kinds if kind.startswith(RISE))
    for kind in [kind for kind in kinds if not kind.startswith(RISE)] + ["rise"] * bool(numbers):
        print(f"  {ALL_KINDS[kind].title}", flush=True)
        before = timed(lambda: classifier.logits(pixels, BATCH))
        if kind == "rise":
            found, seconds = rise_maps(classifier, pixels, grid, target, numbers)
        else:
            # None: the class that the kind's own pass predicts, as in eval.py.
            aim = target if not ALL_KINDS[kind].default else None
            start = time.perf_counter()
            _, found = classifier.maps(pixels, [kind], aim, classifier.precision, BATCH)
            seconds = {kind: time.perf_counter() - start}
        after = timed(lambda: classifier.logits(pixels, BATCH))
        yield (
            {name: to_patches(values.cpu(), grid) for name, values in found.items()},
            {name: round(2 * took / (before + after), 2) for name, took in seconds.items()},
        )


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
            random = generator(0, "rise")  # the masks of vit.explain.references
            began, done, mean = time.perf_counter(), 0, torch.zeros(())
            for number, (label, maps) in zip(numbers, parts.items(), strict=True):
                more = rise(classify, inputs, grid, aim, number - done, random)
                mean = (done * mean.to(more.device) + (number - done) * more) / number
                done = number
                maps.append(mean)
                seconds[label] += time.perf_counter() - began
    return {label: torch.cat(maps) for label, maps in parts.items()}, seconds


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
    models, digests = load_runs(args.runs)
    if args.runs:
        results: Results = {"images": args.images, "seed": args.seed, "runs": {}}
        if args.out is not None and args.out.exists():
            add(results, read(args.out, args.images, args.seed, digests))
    else:
        found = read(args.add[0], None, None, digests)
        results = {"images": found["images"], "seed": found["seed"], "runs": {}}

    def save() -> None:
        if args.out is not None:
            write_atomically(args.out, json.dumps(results).encode())

    others = [read(path, results["images"], results["seed"], digests) for path in args.add]
    for run, saved in models.items():
        entry = results["runs"].setdefault(run, {"fillings": {}, "passes": {}})
        entry["digest"] = digests[run]
        measure(saved, kinds, args.fillings, args.images, args.seed, entry, save)
        save()
    for other in others:
        add(results, other)
    print(f"\n{tables(results)}")


if __name__ == "__main__":
    with user_errors():
        main()
