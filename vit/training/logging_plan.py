"""At which steps attention is logged, so that a short run does not spend its time on logging.

The plan is a function of the config and the number of images, not of a clock: the same run has the
same logs on every machine. It compares costs on two CPU cores; on a GPU, drawing takes a larger
fraction of a run.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit.model.attention_model import attention_model
from vit.reporting.attention_logging import JUDGED, JUDGED_KINDS, JUDGED_LEVELS
from vit.reporting.attention_records import ALL_CLASSES, BEST_CLASSES
from vit.reporting.weight_budget import count_weights, images_with_weights, left_out_text
from vit.run.tracker import MILESTONES, milestones
from vit.training.config import Config
from vit.training.step import TrainingStep

# Measured on two cores of an AMD EPYC (Zen 4) in bfloat16, for the models of quick and shapes.
PASS_SECONDS = 0.25e-3  # of the forward pass of an image, in addition to
SECONDS_PER_FLOP = 1 / 300e9
FIRST_DRAWING_SECONDS = 0.15  # of the first pictures, for which matplotlib draws two colour bars
DRAWING_SECONDS = 0.06  # of the pictures of a milestone, in addition to
PROBE_SECONDS = 0.016  # of the two pictures of a probe
RECORD_SECONDS = 0.006  # of the record of a probe, in addition to
SECONDS_PER_WEIGHT = 1 / 35e6  # to compress its attention weights
TRAINING_PASSES = 3  # a forward and a backward pass, in forward passes
READING_PASSES = 2  # as it is, and with the rules of layer-wise relevance
EXPLAINING_PASSES = 4  # the maps that explain a class: a backward pass of both
# Deletion and insertion for each kind of map and two baselines; and the maps themselves.
JUDGING_PASSES = 2 * len(JUDGED_LEVELS) * (len(JUDGED_KINDS) + 2) + 6
SCORING_PASSES = 2 * len(JUDGED_LEVELS) * len(JUDGED_KINDS)  # for the record of a probe


@dataclass(frozen=True)
class LoggingPlan:
    """When attention is logged, and what.

    Attributes:
        drawn: The steps after which attention is drawn.
        judged: The steps after which the faithfulness of the maps is measured.
        complete: Number of steps after which both would be done in a longer run.
        limit: Fraction of the run's time that logging may take, 0 to 1.
        probes: Number of images.
        wanted: Number of images in a longer run.
        pictures: Whether there are pictures, besides numbers and records for the Attention tab.
        weighted: Number of images whose records contain attention weights.
    """

    drawn: list[int]
    judged: list[int]
    complete: int
    limit: float
    probes: int
    wanted: int
    pictures: bool
    weighted: int

    def describe(self) -> str | None:
        """Say what is left out, or return None if nothing is."""
        texts = []
        drawn, judged = len(self.drawn), len(self.judged)
        if not drawn == judged == self.complete:
            what = "attention is drawn" if self.pictures else "attention is logged without pictures"
            few = f" for {self.probes} of {self.wanted} images"
            texts.append(
                f"{what}{few if self.probes < self.wanted else ''} at {drawn} of {self.complete} "
                f"milestones, the faithfulness of its maps is measured at {judged}; more would "
                f"take over {100 * self.limit:.3g}% of the training time "
                "(--track.max_cost null sets no limit)"
            )
        if self.weighted < self.probes:
            texts.append(left_out_text(self.weighted, self.probes))
        return "; ".join(texts) or None


def plan_logging(config: Config, step: TrainingStep, available: int) -> LoggingPlan:
    """Choose the steps at which attention is logged.

    Attention is logged at the last step, however short the run, and if possible at the first.
    Beyond that, drawing and measuring faithfulness may each take half of what logging may take in
    all, and what the other one leaves. Where the pictures of one step would take too long, there
    are none, and the records are of as many images and steps as fit.

    Args:
        config: The run.
        step: The training step, with model and schedule.
        available: Number of images to choose from.
    """
    everywhere, limit = milestones(step.schedule.total_steps), config.track.max_cost
    wanted = probes = min(config.track.probes, available)
    model = step.state.structure()
    has_maps = attention_model(model) is not None
    num_weights = count_weights(model, _blank_image(step)) if has_maps else 1
    drawn = judged = everywhere
    pictures = True
    if limit is not None and probes:
        cost = estimate_costs(config, step, available, num_weights)
        affordable = limit * cost.training - FIRST_DRAWING_SECONDS
        milestone = cost.pictures + probes * cost.record
        pictures = affordable >= milestone
        if pictures:
            left = affordable - len(everywhere) * cost.judging
            draws = int(max(affordable / 2, left, min(affordable, 2 * milestone)) / milestone)
            drawn = thin_out(everywhere, draws)
            left = affordable - len(drawn) * milestone
            judged = thin_out(drawn, int(left / cost.judging))
        else:
            records = int(limit * cost.training / cost.record)
            probes = max(1, min(probes, records))
            drawn, judged = thin_out(everywhere, max(1, records // probes)), []
    return LoggingPlan(
        drawn, judged, len(everywhere), limit or 0.0, probes, wanted, pictures,
        images_with_weights(num_weights, probes, len(drawn)),
    )  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """Estimated seconds.

    Attributes:
        training: Of the whole run without logging.
        pictures: Of the pictures of a milestone, after the first one.
        record: Of the record of an image.
        judging: Of measuring the faithfulness of maps at a milestone.
    """

    training: float
    pictures: float
    record: float
    judging: float


def estimate_costs(config: Config, step: TrainingStep, available: int, num_weights: int) -> Costs:
    """Estimate what training and logging cost on two CPU cores.

    Args:
        config: The run.
        step: The training step, with model and schedule.
        available: Number of images to choose from.
        num_weights: Attention weights of an image.
    """
    probes, seconds = min(config.track.probes, available), _pass_seconds(step)
    classes = len(step.classes)
    explained = classes if classes <= ALL_CLASSES else BEST_CLASSES
    recording = (READING_PASSES + EXPLAINING_PASSES * explained) * seconds
    judging = JUDGING_PASSES * min(JUDGED, available) + SCORING_PASSES * probes
    return Costs(
        training=training_seconds(config, step),
        pictures=DRAWING_SECONDS + PROBE_SECONDS * probes,
        record=RECORD_SECONDS + SECONDS_PER_WEIGHT * num_weights + recording,
        judging=judging * seconds,
    )


def logging_seconds(config: Config, step: TrainingStep, available: int, seconds: float) -> float:
    """Estimate what logging attention takes at most in a run of a given length.

    Args:
        config: The run.
        step: The training step, with model and schedule.
        available: Number of images to choose from.
        seconds: Length of the run.
    """
    model = step.state.structure()
    if not config.track.probes or attention_model(model) is None:
        return 0.0
    num_weights = count_weights(model, _blank_image(step))
    cost = estimate_costs(config, step, available, num_weights)
    of_probes = min(config.track.probes, available) * cost.record
    milestone = cost.pictures + of_probes + cost.judging
    everything = FIRST_DRAWING_SECONDS + MILESTONES * milestone
    limit = config.track.max_cost
    return everything if limit is None else min(everything, limit * seconds)


def training_seconds(config: Config, step: TrainingStep) -> float:
    """Estimate what training costs on two CPU cores without logging, in seconds.

    Args:
        config: The run.
        step: The training step, with model and schedule.
    """
    schedule = step.schedule
    passes = schedule.batch_size * schedule.work(schedule.total_steps)
    if step.features is not None:  # each image passes through the frozen model once
        passes = len(step.features)
    elif not step.state.frozen:
        passes *= TRAINING_PASSES
    return passes * _pass_seconds(step)


def _pass_seconds(step: TrainingStep) -> float:
    """Estimate what the forward pass of an image costs on two CPU cores, in seconds."""
    return PASS_SECONDS + SECONDS_PER_FLOP * forward_flops(step)


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
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        step.state.structure()(_blank_image(step))
    return counter.get_total_flops()


def _blank_image(step: TrainingStep) -> Tensor:
    device = next(step.state.structure().parameters()).device
    return torch.zeros(1, step.preprocess.channels, *step.schedule.full_size, device=device)
