"""The schedule of a run: its length, and the image size, mixing and learning rate of each step."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple


class Phase(NamedTuple):
    """A part of a run in which all steps cost the same."""

    start: int  # its first step
    fraction: float  # of the steps of the run
    image_size: tuple[int, int]


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run, as pure functions of the step."""

    total_steps: int  # optimizer steps in the run
    steps_per_epoch: int
    batch_size: int  # images per step, over all processes
    full_size: tuple[int, int]  # height and width of the images, in pixels
    small_size: tuple[int, int]  # the same at the beginning of the run
    small_fraction: float  # fraction of the steps that use small images, 0 to 1
    mix_fraction: float  # fraction of the steps that may use mixup and cutmix, 0 to 1
    warmup: float  # fraction of the steps in which the learning rate rises, 0 to 1
    decay: str  # how the learning rate falls after that: "linear" or "cosine"

    @property
    def epochs(self) -> int:
        """Epochs in the run; the last one may be incomplete."""
        return -(-self.total_steps // self.steps_per_epoch)

    def image_size(self, step: int) -> tuple[int, int]:
        """Return the height and width of a step's images; small images come first."""
        is_small = step < self.small_fraction * self.total_steps
        return self.small_size if is_small else self.full_size

    def mixes(self, step: int) -> bool:
        """Tell whether a step may use mixup and cutmix; the last steps may not."""
        return step < self.mix_fraction * self.total_steps

    def lr_factor(self, step: int) -> float:
        """Return the learning rate of a step relative to its peak: up to 1, then down towards 0."""
        total_steps, warmup_steps = self.total_steps, int(self.warmup * self.total_steps)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        done = (step - warmup_steps) / (total_steps - warmup_steps)
        return 1 - done if self.decay == "linear" else (1 + math.cos(math.pi * done)) / 2

    def phases(self) -> list[Phase]:
        """List the phases of the run in order: they differ in image size or mixing."""
        phases = []
        for begin, end in pairwise(sorted({0.0, self.small_fraction, self.mix_fraction, 1.0})):
            start = math.ceil(begin * self.total_steps)
            phases.append(Phase(start, end - begin, self.image_size(start)))
        return phases


def scaled_size(size: tuple[int, int], scale: float, patch_size: int) -> tuple[int, int]:
    """Scale a height and width, rounding each to whole patches and at least one."""
    rows, columns = (patch_size * max(1, round(n / patch_size * scale)) for n in size)
    return rows, columns
