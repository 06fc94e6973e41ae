"""At which steps attention is logged, so that a short run does not spend its time on logging.

The plan is a function of the config and the number of images, not of a clock: the same run has the
same logs on every machine. It compares costs on two CPU cores; on a GPU, drawing takes a larger
fraction of a run.
"""

from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from vit.config import Config
from vit.reporting.attention_logging import JUDGED, JUDGED_KINDS, JUDGED_LEVELS
from vit.tracking import milestones
from vit.training.step import TrainingStep

# Measured on two cores of an AMD EPYC (Zen 4) in bfloat16, for the models of quick and shapes.
PASS_SECONDS = 0.25e-3  # of the forward pass of an image, in addition to
SECONDS_PER_FLOP = 1 / 300e9
DRAWING_SECONDS = 0.2  # of the pictures of a milestone, in addition to
PROBE_SECONDS = 0.015  # of the pictures of a probe
TRAINING_PASSES = 3  # a forward and a backward pass, in forward passes
# Deletion and insertion for each kind of map and two baselines; and the maps themselves.
JUDGING_PASSES = 2 * len(JUDGED_LEVELS) * (len(JUDGED_KINDS) + 2) + 3


@dataclass(frozen=True)
class LoggingPlan:
    """When attention is logged.

    Attributes:
        drawn: The steps after which attention is drawn.
        judged: The steps after which the faithfulness of the maps is measured.
        complete: Number of steps after which both would be done in a longer run.
        limit: Fraction of the run's time that logging may take, 0 to 1.
    """

    drawn: list[int]
    judged: list[int]
    complete: int
    limit: float

    def describe(self) -> str | None:
        """Say what is left out, or return None if nothing is."""
        drawn, judged = len(self.drawn), len(self.judged)
        if drawn == judged == self.complete:
            return None
        return (
            f"attention is drawn at {drawn} of {self.complete} milestones, the faithfulness of its "
            f"maps is measured at {judged}; more would take over {100 * self.limit:.3g}% of the "
            "training time (track.max_cost)"
        )


def plan_logging(config: Config, step: TrainingStep, available: int) -> LoggingPlan:
    """Choose the steps at which attention is logged.

    Attention is drawn at the last step, however short the run, and if possible at the first. Beyond
    that, drawing and measuring faithfulness may each take half of what logging may take in all, and
    what the other one leaves.

    Args:
        config: The run.
        step: The training step, with model and schedule.
        available: Number of images to choose from.
    """
    schedule, limit = step.schedule, config.track.max_cost
    everywhere = milestones(schedule.total_steps)
    complete = len(everywhere)
    if limit is None or config.track.probes == 0:
        return LoggingPlan(everywhere, everywhere, complete, 1.0)
    seconds = PASS_SECONDS + SECONDS_PER_FLOP * forward_flops(step)
    passes = config.train.batch_size * schedule.work(schedule.total_steps)
    if step.features is not None:  # each image passes through the frozen model once
        passes = available
    elif not step.state.frozen:
        passes *= TRAINING_PASSES
    drawing = DRAWING_SECONDS + PROBE_SECONDS * min(config.track.probes, available)
    judging = JUDGING_PASSES * min(JUDGED, available) * seconds
    affordable = limit * passes * seconds
    for_drawing = (affordable / 2, affordable - complete * judging, min(affordable, 2 * drawing))
    draws = int(max(for_drawing) / drawing)
    drawn = thin_out(everywhere, max(draws, 1))
    judged = thin_out(everywhere, max(int((affordable - len(drawn) * drawing) / judging), 0))
    return LoggingPlan(drawn, judged, complete, limit)


def thin_out(steps: list[int], count: int) -> list[int]:
    """Choose at most `count` of the steps, evenly: the last, then the first, then in between."""
    if count >= len(steps):
        return steps
    if count <= 1:
        return steps[len(steps) - count :]
    last = len(steps) - 1
    return [steps[round(number * last / (count - 1))] for number in range(count)]


def forward_flops(step: TrainingStep) -> int:
    """Count the FLOPs of the forward pass of one image of full size."""
    device = next(step.state.model.parameters()).device
    shape = (1, step.preprocess.channels, *step.schedule.full_size)
    image = torch.zeros(shape, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        step.state.evaluated()(image)
    return counter.get_total_flops()
