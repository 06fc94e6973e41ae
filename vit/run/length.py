"""The length of a run in steps, which changes on the way if a time budget would be missed.

What happens at certain steps asks for them each time.
"""

import math
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass
class Length:
    """The number of steps of a run, and what fraction of the run is done after each.

    When the number changes, what is done stays done: the rest is divided into more or fewer steps.
    """

    total_steps: int = 0  # of the whole run; 0 until they are known
    planned_steps: int = 0  # the first such number; 0 (early checkpoints) means total_steps
    changed_at: int = 0  # the step at which the number changed last
    changed_done: float = 0.0  # the fraction of the run that was done then
    # Parts of a run whose steps cost the same: the fraction of the run at which each ends, and the
    # seconds of a step, expected when the run began. Without a time budget there are none.
    costs: tuple[tuple[float, float], ...] = ()

    @property
    def first_total(self) -> int:
        """The number of steps that was planned at first, also in a resumed run."""
        return self.planned_steps or self.total_steps

    @property
    def step_fraction(self) -> float:
        """The fraction of the run that a step does."""
        return (1 - self.changed_done) / (self.total_steps - self.changed_at)

    def done(self, step: int) -> float:
        """Return the fraction of the run that is done after a number of steps, 0 to 1."""
        rest = (step - self.changed_at) / (self.total_steps - self.changed_at)
        return self.changed_done + (1 - self.changed_done) * rest

    def step_at(self, fraction: float) -> int:
        """Return the first step after which a fraction of the run is done."""
        rest = (fraction - self.changed_done) / (1 - self.changed_done)
        return self.changed_at + math.ceil(rest * (self.total_steps - self.changed_at) - 1e-9)

    def plan(self, total_steps: int) -> None:
        """Set the number of steps as if it had never changed."""
        self.total_steps = self.planned_steps = total_steps
        self.changed_at, self.changed_done = 0, 0.0

    def change(self, step: int, total_steps: int) -> None:
        """Change the number of steps of the whole run, at a step."""
        if total_steps != self.total_steps:
            self.changed_done, self.changed_at = self.done(step), step
            self.total_steps = total_steps

    def seconds(self, begin: float, end: float) -> float:
        """Return the expected mean seconds of a step between two fractions of the run."""
        edges = pairwise([0.0, *(edge for edge, _ in self.costs)])
        parts = [max(0.0, min(end, last) - max(begin, first)) for first, last in edges]
        costs = (seconds for _, seconds in self.costs)
        return sum(a * b for a, b in zip(parts, costs, strict=True)) / (end - begin)


@dataclass(frozen=True)
class EpochEnds(Container[int]):
    """The steps after which an epoch ends, or the run."""

    length: Length
    steps_per_epoch: int

    def __contains__(self, step: object) -> bool:
        assert isinstance(step, int)
        return step == self.length.total_steps or (step > 0 and step % self.steps_per_epoch == 0)


@dataclass(frozen=True)
class Milestones(Collection[int]):
    """At most `count` steps after which attention is logged: the last, 0, and steps between."""

    length: Length
    count: int

    def __iter__(self) -> Iterator[int]:
        # They are denser at the start, where attention changes fastest.
        last = self.count - 1
        fractions = [(n / last) ** 2 for n in range(self.count)] if last else [1.0]
        return iter(sorted({self.length.step_at(fraction) for fraction in fractions}))

    def __contains__(self, step: object) -> bool:
        return any(step == own for own in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
