"""The faithfulness of every kind of map, with several fillings of hidden patches.

    python -m benchmarks.maps.faithfulness RUN ... [--images 1000] [--kinds ...] [--fillings ...]
        [--out results.json]

RUN is a run folder, a model file or the name of a bundled model; several runs are seeds of one
recipe. For each run and filling, Markdown tables show deletion, insertion and (LeRF - MoRF) / 2 of
every kind of map, image by image over the centred Gaussian, then the ranks of the kinds by filling
and how far the fillings agree. Images, maps and scores with mean filling are those of
`eval.py RUN maps --faithfulness N`.

--out keeps the scores of every image, and is written after each kind of map. If the file exists,
what it has is not measured again, so an interrupted measurement goes on with the kind it was at,
and kinds can be measured one after the other. The scores of a model that has changed since are
refused. Without RUN, the tables of --out are printed. RISE takes 1,000 forward passes per image, so
it is measured only if asked for:

    python -m benchmarks.maps.faithfulness runs/quick --out quick.json
    python -m benchmarks.maps.faithfulness runs/quick --kinds rise --out quick.json

Expect layer-wise relevance of pixels to be above the centred Gaussian with every filling.
"""

import argparse
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from benchmarks.maps.faithfulness_tables import tables
from benchmarks.maps.filling import FILLINGS, make_filling
from benchmarks.timing import timed
from vit.classifier import Classifier
from vit.cli import user_errors
from vit.data.sampling import balanced_subset
from vit.explain.faithfulness import LEVELS, Filling, score_maps, to_patches, with_baselines
from vit.files import write_atomically
from vit.model.attention_model import no_maps_text
from vit.model_file import SavedModel, load_model
from vit.registry import ALL_KINDS
from vit.reporting.config import MapsConfig
from vit.reporting.loading import load_test
from vit.reporting.map_faithfulness import BASELINES

BATCH = MapsConfig().batch_size  # images per forward pass, as in eval.py

# images, seed, and by run: fillings (scores of every image), passes, digest of the model file
Results = dict[str, Any]


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
        kinds: Kinds of map; the two baselines are added.
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


def load_with_maps(run: str) -> SavedModel:
    """Load a model.

    Raises:
        ValueError: It cannot be read, or has no attention maps.
    """
    saved = load_model(run)
    if not saved.classifier.has_maps:
        raise ValueError(f"{run}: {no_maps_text(saved.classifier.model)}; leave it out")
    return saved


def read(path: Path) -> Results:
    """Read the results that `main` has written.

    Raises:
        ValueError: The file has none.
    """
    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError):
        results = None
    if not (isinstance(results, dict) and {*results} == {"images", "seed", "runs"}):
        raise ValueError(f"{path}: not a file that --out wrote")
    return results


def entry_of(results: Results, run: str, model: Path) -> dict[str, Any]:
    """Return what results have of a run, which is nothing at first.

    Raises:
        ValueError: They have the scores of another model file.
    """
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    entry = results["runs"].setdefault(run, {"digest": digest, "fillings": {}, "passes": {}})
    if entry["digest"] != digest:
        raise ValueError(f"--out: its scores of {run} are those of another model; use another file")
    return entry


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
        The maps (B, rows, columns) of a kind on the CPU, and its time, in forward passes of the
        same images just before and after it; both by kind.
    """
    for kind in kinds:
        print(f"  {ALL_KINDS[kind].title}", flush=True)
        # None: the class that the kind's own pass predicts, as in eval.py.
        aim = target if not ALL_KINDS[kind].default else None
        before = timed(lambda: classifier.logits(pixels, BATCH))
        start = time.perf_counter()
        _, found = classifier.maps(pixels, [kind], aim, classifier.precision, BATCH)
        seconds = time.perf_counter() - start
        after = timed(lambda: classifier.logits(pixels, BATCH))
        passes = round(2 * seconds / (before + after), 2)
        yield {kind: to_patches(found[kind].cpu(), grid)}, {kind: passes}


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
    parser.add_argument("--seed", type=int, default=0, help="of the images (default: 0)")
    parser.add_argument("--out", type=Path, help="file that keeps the scores, and goes on")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, and print the tables."""
    args = parse(arguments)
    if not args.runs and args.out is None:
        raise ValueError("give a RUN to measure, or the --out whose tables to print")
    if args.images < 2:
        raise ValueError(f"--images: {args.images} is not allowed; it must be at least 2")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out: folder not found: {args.out.parent}")
    results: Results = {"images": args.images, "seed": args.seed, "runs": {}}
    if args.out is not None and (args.out.exists() or not args.runs):
        results = read(args.out)
    if args.runs and (results["images"], results["seed"]) != (args.images, args.seed):
        raise ValueError(
            f"{args.out}: has --images {results['images']} --seed {results['seed']}, not "
            f"--images {args.images} --seed {args.seed}; use the same, or another file"
        )

    def save() -> None:
        if args.out is not None:
            write_atomically(args.out, json.dumps(results).encode())

    # All are loaded first, so that a mistake in the last name is seen at once.
    models = {run: load_with_maps(run) for run in (str(Path(name)) for name in args.runs)}
    for run, saved in models.items():
        entry = entry_of(results, run, saved.path)
        measure(saved, args.kinds, args.fillings, args.images, args.seed, entry, save)
    print(f"\n{tables(results)}")


if __name__ == "__main__":
    with user_errors():
        main()
