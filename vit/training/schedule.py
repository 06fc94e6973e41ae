"""The schedule of a run: the image size, mixing and learning rate of each step."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vit.run.length import Length


class Phase(NamedTuple):
    """A part of a run in which all steps cost the same."""

    start: int  # its first step
    fraction: float  # of the steps of the run
    image_size: tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run: functions of the step, and of the length of the run."""

    length: Length  # of the run, in optimizer steps; shared with its state
    steps_per_epoch: int
    batch_size: int  # images per step, over all processes
    full_size: tuple[int, int]  # height and width of the images, in pixels
    small_size: tuple[int, int]  # the same at the beginning of the run
    small_fraction: float  # fraction of the steps that use small images, 0 to 1
    mix_fraction: float  # fraction of the steps that may use mixup and cutmix, 0 to 1
    warmup: float  # fraction of the steps in which the learning rate rises, 0 to 1
    decay: str  # how the learning rate falls after that: "linear" or "cosine"

    @property
    def total_steps(self) -> int:
        """Optimizer steps in the run."""
        return self.length.total_steps

    @property
    def epochs(self) -> int:
        """Epochs in the run; the last one may be incomplete."""
        return -(-self.total_steps // self.steps_per_epoch)

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps in an epoch; the run may end within it."""
        return min(self.steps_per_epoch, self.total_steps - epoch * self.steps_per_epoch)

    def image_size(self, step: int) -> tuple[int, int]:
        """Return the height and width of a step's images; small images come first."""
        return self.size_at(self.length.done(step))

    def size_at(self, done: float) -> tuple[int, int]:
        """Return the height and width of images when a fraction of the run is done."""
        return self.small_size if done < self.small_fraction else self.full_size

    def mixes(self, step: int) -> bool:
        """Tell whether a step may use mixup and cutmix; the last steps may not."""
        return self.length.done(step) < self.mix_fraction

    def lr_factor(self, step: int) -> float:
        """Return the learning rate of a step relative to its peak: up to 1, then down towards 0."""
        done, one = self.length.done(step), self.length.step_fraction
        planned = self.length.first_total
        warmup = int(self.warmup * planned) / planned  # in whole steps
        if done < warmup:
            return (done + one) / (warmup + one)
        fallen = (done - warmup) / (1 - warmup)
        return 1 - fallen if self.decay == "linear" else (1 + math.cos(math.pi * fallen)) / 2

    def phases(self) -> list[Phase]:
        """List the phases of the run in order: they differ in image size or mixing."""
        edges = pairwise(sorted({0.0, self.small_fraction, self.mix_fraction, 1.0}))
        return [
            Phase(math.ceil(begin * self.total_steps), end - begin, self.size_at(begin))
            for begin, end in edges
        ]


def scaled_size(size: tuple[int, int], scale: float, patch_size: int) -> tuple[int, int]:
    """Scale a height and width, rounding each to whole patches and at least one."""
    rows, columns = (patch_size * max(1, round(n / patch_size * scale)) for n in size)
    return rows, columns
