"""Markdown tables of the scores that faithfulness.py measures.

Scores are deletion and insertion of every image, by run, filling and kind of map.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from scipy.stats import kendalltau
from torch import Tensor

from benchmarks.maps.filling import FILLINGS
from benchmarks.tables import markdown, mean_of_runs, plus_minus
from vit.explain.faithfulness import mean_interval
from vit.registry import ALL_KINDS
from vit.reporting.map_faithfulness import BASELINES, METRICS

SHOWN = ("deletion", "insertion", "lerf_morf", "over_centred")

Scores = Mapping[str, Mapping[str, Tensor]]  # by kind and metric, (images,) each


def tables(results: dict[str, Any]) -> str:
    """Format all tables of the results of one or several runs."""
    runs = {
        run: {filling: with_differences(kinds) for filling, kinds in entry["fillings"].items()}
        for run, entry in results["runs"].items()
    }
    parts = []
    for run, fillings in runs.items():
        count = len(next(iter(fillings.values()))["centred"]["deletion"])
        parts.append(f"## {run}, {count:,} test images, mean ± 95% interval over them")
        for filling, scores in fillings.items():
            passes = results["runs"][run]["passes"]
            parts += [f"### {run}, {FILLINGS[filling]}", score_table(scores, passes)]
        if len(fillings) > 1:
            parts += [f"### {run}, by filling", *comparison(fillings)]
    if len(runs) > 1:
        parts.append(f"## mean ± 95% interval over {len(runs)} runs")
        for filling in shared(runs.values()):
            each = [scores[filling] for scores in runs.values()]
            parts += [f"### {FILLINGS[filling]}", table_over_runs(each)]
    return "\n\n".join(parts)


def with_differences(kinds: Mapping[str, Mapping[str, Sequence[float]]]) -> Scores:
    """Compute all metrics of each image from its deletion and insertion; baselines come last."""
    scores: dict[str, dict[str, Tensor]] = {}
    for kind in sorted(kinds, key=_place):
        deletion, insertion = (
            torch.tensor(kinds[kind][name], dtype=torch.float64)
            for name in ("deletion", "insertion")
        )
        scores[kind] = {
            "deletion": deletion, "insertion": insertion, "lerf_morf": (insertion - deletion) / 2,
        }  # fmt: skip
    for kind, found in scores.items():
        if kind != "centred":
            found["over_centred"] = found["lerf_morf"] - scores["centred"]["lerf_morf"]
    return scores


def _place(kind: str) -> int:
    """Return the place of a kind in tables: maps first, then baselines."""
    return [*ALL_KINDS, *BASELINES].index(kind)


def score_table(scores: Scores, passes: Mapping[str, float]) -> str:
    """Format every metric of one run and filling, with the cost of each map."""
    rows = []
    for kind, values in scores.items():
        cells = [
            plus_minus(*mean_interval(values[name])) if name in values else "–" for name in SHOWN
        ]
        cost = f"{passes[kind]:,.{0 if passes[kind] >= 10 else 1}f}" if kind in passes else "–"
        rows.append([title(kind), *cells, cost])
    return markdown(["map", *(METRICS[name] for name in SHOWN), "cost (forward passes)"], rows)


def comparison(fillings: Mapping[str, Scores]) -> Iterator[str]:
    """Format the ranks of the kinds by filling, the fillings' agreement, and reversed pairs."""
    kinds = ranked_kinds(list(fillings.values()))
    ranks = {name: ranks_of(scores, kinds) for name, scores in fillings.items()}
    rows = [
        [
            title(kind),
            *(
                f"{ranks[name][kind]}" + (
                    f" ({mean_interval(scores[kind]['over_centred'])[0]:+.3f})"
                    if "over_centred" in scores[kind] else ""
                )
                for name, scores in fillings.items()
            ),
        ]
        for kind in kinds
    ]  # fmt: skip
    heads = [FILLINGS[name] for name in fillings]
    yield "Rank by (LeRF−MoRF)/2, and the difference to the centred Gaussian:"
    yield markdown(["map", *heads], rows)
    yield "Agreement of the fillings, Kendall's tau of the mean scores (1: the same order):"
    means = {
        name: [scores[kind]["lerf_morf"].mean().item() for kind in kinds]
        for name, scores in fillings.items()
    }
    yield markdown(
        ["", *heads],
        [
            [FILLINGS[a], *(f"{kendalltau(means[a], means[b]).statistic:.2f}" for b in fillings)]
            for a in fillings
        ],
    )
    found = [f"- {line}" for line in reversals(fillings, kinds)]
    yield "What depends on the filling (both differences are significant at the 5% level):"
    yield "\n".join(found) if found else "- No two maps change places."


def reversals(fillings: Mapping[str, Scores], kinds: Sequence[str]) -> Iterator[str]:
    """Yield pairs of maps of which each is significantly better than the other by some filling."""
    for a, b in itertools.combinations(kinds, 2):
        better: dict[bool, list[str]] = {True: [], False: []}
        for name, scores in fillings.items():
            mean, half = mean_interval(scores[a]["lerf_morf"] - scores[b]["lerf_morf"])
            if abs(mean) > half:
                better[mean > 0].append(f"{FILLINGS[name]} ({abs(mean):.3f} ± {half:.3f})")
        if better[True] and better[False]:
            yield (
                f"{title(a)} is above {title(b)} with {', '.join(better[True])}, and below it "
                f"with {', '.join(better[False])}"
            )


def table_over_runs(runs: Sequence[Scores]) -> str:
    """Format the mean of every metric over runs, and the ranks in each of them."""
    kinds = shared(runs)
    order = ranked_kinds(runs)
    ranks = [ranks_of(scores, order) for scores in runs]
    rows = []
    for kind in kinds:
        cells = []
        for name in SHOWN:
            means = [scores[kind][name].mean().item() for scores in runs if name in scores[kind]]
            cells.append(plus_minus(*mean_of_runs(means)) if means else "–")
        places = ", ".join(str(rank[kind]) for rank in ranks) if kind in order else "–"
        rows.append([title(kind), *cells, places])
    return markdown(["map", *(METRICS[name] for name in SHOWN), "rank in each run"], rows)


def ranks_of(scores: Scores, kinds: Sequence[str]) -> dict[str, int]:
    """Rank kinds by their mean (LeRF - MoRF) / 2; 1 is the best."""
    best = sorted(kinds, key=lambda kind: -scores[kind]["lerf_morf"].mean().item())
    return {kind: rank for rank, kind in enumerate(best, start=1)}


def ranked_kinds(parts: Sequence[Scores]) -> list[str]:
    """Return the kinds that all parts have, without random maps."""
    return [kind for kind in shared(parts) if kind != "random"]


def shared(parts: Any) -> list[str]:
    """Return the keys that all dictionaries have, in the order of the first."""
    first, *others = parts
    return [key for key in first if all(key in other for other in others)]


def title(kind: str) -> str:
    """Return a map's or baseline's name for tables."""
    return BASELINES.get(kind) or ALL_KINDS[kind].title
