"""The faithfulness of every kind of map, with several fillings of hidden patches.

    python -m benchmarks.maps.faithfulness RUN ... [--images 1000] [--kinds ...] [--fillings ...]

RUN is a run folder, a model file or the name of a bundled model. For each run and filling, a
Markdown table shows deletion, insertion and (LeRF - MoRF) / 2 of every kind of map, and image by
image its difference to the centred Gaussian; then come the ranks of the kinds by filling. Images,
maps and scores with mean filling are those of `eval.py RUN maps --faithfulness N`. RISE takes 1,000
forward passes per image, so it is measured only if it is among --kinds.

Expect layer-wise relevance of pixels to be above the centred Gaussian with every filling.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.maps.filling import FILLINGS, make_filling
from benchmarks.tables import markdown, plus_minus
from vit.cli import user_errors
from vit.commands.config import MapsConfig
from vit.data.sampling import balanced_subset
from vit.explain.kinds import ALL_KINDS
from vit.model_file import SavedModel
from vit.pretrained.load import load as load_model
from vit.reporting.faithfulness import BASELINES, METRICS, Table, score_maps
from vit.reporting.loading import load_test

BATCH = MapsConfig().batch_size  # images per forward pass, as in eval.py
SHOWN = ("deletion", "insertion", "lerf_morf", "over_centred")


def measure(
    saved: SavedModel, kinds: Sequence[str], fillings: Sequence[str], count: int, seed: int
) -> dict[str, Table]:
    """Measure kinds of map of a model on so many test images; a table for each filling.

    Raises:
        ValueError: The test images cannot be read, or the model has no attention maps.
    """
    test = load_test(saved)
    chosen = balanced_subset(test.labels, count, seed, "eval.faithfulness")
    images = test.select(chosen).in_memory()
    print(f"{saved.describe()}, {len(images):,} {saved.config.data.name} test images", flush=True)
    pixels, inputs = images.pixels(), saved.normalize(images.pixels())
    logits, maps = saved.maps(pixels, kinds, None, saved.precision, BATCH)
    target = logits.argmax(dim=1)
    return {
        name: score_maps(saved, images, maps, target, BATCH, seed, make_filling(name, inputs, seed))
        for name in fillings
    }


def tables(run: str, fillings: Mapping[str, Table]) -> Iterator[str]:
    """Format the results of a run as Markdown: a table for each filling, and the ranks."""
    for filling, table in fillings.items():
        yield f"### {run}, {FILLINGS[filling]}"
        rows = [
            [title(kind), *(plus_minus(*found[m]) if m in found else "–" for m in SHOWN)]
            for kind, found in table.items()
        ]
        yield markdown(["map", *(METRICS[metric] for metric in SHOWN)], rows)
    yield f"### {run}, rank by (LeRF−MoRF)/2 (difference to the centred Gaussian)"
    ranks = {name: ranks_of(table) for name, table in fillings.items()}
    kinds = [kind for kind in next(iter(fillings.values())) if kind != "random"]
    rows = [[title(kind), *(ranks[filling][kind] for filling in fillings)] for kind in kinds]
    yield markdown(["map", *(FILLINGS[filling] for filling in fillings)], rows)


def ranks_of(table: Table) -> dict[str, str]:
    """Rank kinds of map, except random ones, by their mean (LeRF - MoRF) / 2; 1 is the best."""
    kinds = sorted(table.keys() - {"random"}, key=lambda kind: -table[kind]["lerf_morf"][0])
    ranks = {kind: str(rank) for rank, kind in enumerate(kinds, start=1)}
    for kind in kinds:
        if "over_centred" in table[kind]:
            ranks[kind] += f" ({table[kind]['over_centred'][0]:+.3f})"
    return ranks


def title(kind: str) -> str:
    """Return a map's or baseline's name for tables."""
    return BASELINES.get(kind) or ALL_KINDS[kind].title


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every run, and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder or model file")
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
    args = parser.parse_args(arguments)
    models = {run: load_model(run) for run in args.runs}  # so that a wrong name is seen at once
    for run, saved in models.items():
        found = measure(saved, args.kinds, args.fillings, args.images, args.seed)
        print("\n" + "\n\n".join(tables(run, found)))


if __name__ == "__main__":
    with user_errors():
        main()
