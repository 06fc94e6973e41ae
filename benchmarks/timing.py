"""Timing works against each other on a machine that is never quite quiet.

Works take turns, A B C A B C, so that what else the machine does meets all of them; each round
gives a ratio to the first work, and medians over the rounds are reported.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# A script in benchmarks/ imports this first, and finds `vit` from wherever it is called.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Timing:
    """What was measured of one work.

    Attributes:
        seconds: Median.
        ratio: Median over the rounds of its speed over that of the first work.
        low: Smallest ratio of a round.
        high: Largest ratio of a round.
    """

    seconds: float
    ratio: float
    low: float
    high: float


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def take_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time works by name in turns, after a round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            seconds = timed(work)
            if turn:
                times[name].append(seconds)
    first = next(iter(times.values()))
    result = {}
    for name, seconds_of in times.items():
        ratios = [base / seconds for base, seconds in zip(first, seconds_of, strict=True)]
        result[name] = Timing(
            statistics.median(seconds_of), statistics.median(ratios), min(ratios), max(ratios)
        )
    return result
