"""How long a run is, and what size and learning rate each of its steps has."""

from dataclasses import dataclass

from vit.config import IMAGE_SIZE, Config
from vit.training.optim import lr_at


@dataclass(frozen=True)
class Plan:
    """A run's course as a function of the step.

    Attributes:
        total_steps: Optimizer steps in the run.
        steps_per_epoch: Full batches in an epoch.
        small_size: Pixels on a side of the images at first.
        small_share: Share of all steps with images of that size.
        mix_share: Share of all steps in which images are mixed.
        warmup: Share of all steps in which the learning rate rises.
        schedule: How it falls: "linear" or "cosine".
    """

    total_steps: int
    steps_per_epoch: int
    small_size: int
    small_share: float
    mix_share: float
    warmup: float
    schedule: str

    @property
    def epochs(self) -> int:
        """Epochs in the run; the last may be cut short."""
        return -(-self.total_steps // self.steps_per_epoch)

    def stages(self) -> list[tuple[int, float]]:
        """List the image sizes of the run, in order, each with its share of the steps."""
        stages = ((self.small_size, self.small_share), (IMAGE_SIZE, 1 - self.small_share))
        return [(size, share) for size, share in stages if share > 0]

    def image_size(self, step: int) -> int:
        """Return the pixels on a side of a step's images: small ones come first."""
        return self.small_size if step < self.small_share * self.total_steps else IMAGE_SIZE

    def mixes(self, step: int) -> bool:
        """Tell whether a step may mix images; whole ones come last."""
        return step < self.mix_share * self.total_steps

    def lr_share(self, step: int) -> float:
        """Return the learning rate of a step as a share of its peak, 0 to 1."""
        return lr_at(step, self.total_steps, int(self.warmup * self.total_steps), self.schedule)

    def work(self, steps: int) -> float:
        """Return how long the first steps take, in units of a step with images of full size."""
        small = min(steps, self.small_share * self.total_steps)
        return steps - small * (1 - (self.small_size / IMAGE_SIZE) ** 2)


def make_plan(config: Config, total_steps: int, steps_per_epoch: int) -> Plan:
    """Make the plan of a config whose steps are counted."""
    patch, train = config.model.patch_size, config.train
    small_size = patch * max(1, round(IMAGE_SIZE / patch * train.small_scale))
    return Plan(
        total_steps, steps_per_epoch, small_size, train.small_share,
        config.augment.mix_share, config.optim.warmup, config.optim.schedule,
    )  # fmt: skip
