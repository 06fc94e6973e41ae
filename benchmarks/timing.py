"""Comparing the speed of functions on a noisy machine.

The functions take turns (A B C A B C), so that other load on the machine affects all of them alike.
Each round gives a ratio to the first function; the median over the rounds is reported, unless the
rounds differ so much that it says nothing.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SPREAD = 1.5  # highest ratio of the rounds divided by the lowest, above which they are not reported


@dataclass(frozen=True)
class Timing:
    """The timing of one function."""

    seconds: float  # median duration
    ratio: float  # median over the rounds of its speed divided by that of the first function
    low: float  # lowest ratio of any round
    high: float  # highest ratio of any round

    def speed(self, scale: float = 1.0) -> str:
        """Return its speed over the first function's, as in "1.03 x  (0.97 to 1.09)".

        Args:
            scale: Its work divided by that of the first function.
        """
        low, ratio, high = (scale * value for value in (self.low, self.ratio, self.high))
        return self._verdict(f"{ratio:.2f} x  ({low:.2f} to {high:.2f})")

    def cost(self) -> str:
        """Return its duration over the first function's, as in "0.97 x  (0.92 to 1.03)"."""
        return self._verdict(f"{1 / self.ratio:.2f} x  ({1 / self.high:.2f} to {1 / self.low:.2f})")

    def fraction(self) -> str:
        """Return its duration over the first function's, as in "1.4%  (1.2% to 1.5%)"."""
        return self._verdict(f"{1 / self.ratio:.1%}  ({1 / self.high:.1%} to {1 / self.low:.1%})")

    def _verdict(self, text: str) -> str:
        spread = self.high / self.low
        if spread <= SPREAD:
            return text
        return f"no verdict: the machine is busy, rounds differ by {spread:.1f} x; run again"


Clock = Callable[[], float]  # time.process_time hardly depends on other load, with one thread


def timed(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the duration of a call, in seconds."""
    start = clock()
    work()
    return clock() - start


def take_turns(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, Timing]:
    """Time functions in turns, after one round of warm-up; return timings by name."""
    return compare(take_times(works, rounds, clock))


def take_times(
    works: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time functions in turns as `take_turns` does; return the seconds of each round by name."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            seconds = timed(work, clock)
            if turn:
                times[name].append(seconds)
    return times


def compare(times: Mapping[str, Sequence[float]]) -> dict[str, Timing]:
    """Compare durations with those of the first function in the same rounds.

    Args:
        times: The seconds of each round, by name.
    """
    first = next(iter(times.values()))
    result = {}
    for name, seconds_of in times.items():
        ratios = [base / seconds for base, seconds in zip(first, seconds_of, strict=True)]
        result[name] = Timing(
            statistics.median(seconds_of), statistics.median(ratios), min(ratios), max(ratios)
        )
    return result
