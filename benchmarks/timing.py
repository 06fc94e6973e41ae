"""Comparing the speed of functions on a noisy machine.

The functions take turns (A B C A B C), so that other load on the machine affects all of them alike.
Each round gives a ratio to the first function; the median over the rounds is reported.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

# The scripts in benchmarks/ import this module first, so that they find `vit` from any folder.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


@dataclass(frozen=True)
class Timing:
    """The timing of one function.

    Attributes:
        seconds: Median duration.
        ratio: Median over the rounds of its speed divided by that of the first function.
        low: Lowest ratio of any round.
        high: Highest ratio of any round.
    """

    seconds: float
    ratio: float
    low: float
    high: float


def timed(work: Callable[[], object]) -> float:
    """Return the duration of a call, in seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def take_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time functions in turns, after one round of warm-up; return timings by name."""
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
