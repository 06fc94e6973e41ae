"""Fitting a run into a time budget: a short benchmark sets the number of steps."""

import copy
import dataclasses
import time

import torch

from vit.data.images import ImageSet
from vit.data.stream import ImageFiles
from vit.seeding import generator
from vit.training.step import TrainingStep

TRAINING_FRACTION = 0.96  # of the budget; the rest is for validation and checkpoints
LOGGED_IMAGES = 80  # images trained on in the time in which the attention of one is logged
WARMUP_STEPS, TIMED_STEPS = 5, 10  # in each phase; few, because they count as training time
AHEAD = 2  # batches that each worker decodes in advance, torch's default
TRIAL_LENGTH = 10_000  # steps of the hypothetical run whose phases are timed


def fit_budget(step: TrainingStep, training: ImageSet, end: float, logged: int) -> int:
    """Benchmark each phase of a run and return the number of steps that end in time.

    The effect of the benchmark on the weights is undone.

    Args:
        step: The training step. The phases of its schedule are timed; its state is restored.
        training: The training images.
        end: When training has to end, in seconds as `time.perf_counter` counts them.
        logged: How many times the attention of an image is logged until then.

    Returns:
        Number of steps, at least 1, the same in all processes.
    """
    before = copy.deepcopy(step.state.state_dict())
    seconds_per_step = mean_step_seconds(step, training)
    step.state.load_state_dict(before)
    steps = (end - time.perf_counter()) / seconds_per_step
    steps -= LOGGED_IMAGES * logged / step.schedule.batch_size
    return int(step.world.agree(max(1, int(steps))))


def mean_step_seconds(step: TrainingStep, training: ImageSet) -> float:
    """Time steps of each phase of a run; return the mean over the whole run, in seconds per step.

    Where images are decoded during training and this is slower than the step, it sets the time.

    This changes the state: weights, optimizers and counts.

    Args:
        step: The training step.
        training: The training images.
    """
    warmup, timed = WARMUP_STEPS, TIMED_STEPS
    if isinstance(training.images, ImageFiles):  # not those that are decoded in advance
        ahead = step.world.agree(AHEAD * training.images.num_workers)
        warmup, timed = max(warmup, ahead + 1), max(timed, ahead)
    schedule = dataclasses.replace(step.schedule, total_steps=TRIAL_LENGTH)
    trial = dataclasses.replace(step, schedule=schedule)
    draw = generator(step.seed, "trial")
    seconds = 0.0
    for phase in schedule.phases():
        trial.state.step = phase.start
        shape = (warmup + timed, schedule.batch_size)
        batches = torch.randint(len(training), shape, generator=draw)
        for number, (images, labels) in enumerate(
            step.inputs(training).batches(step.world.part(batches.T).T), start=1
        ):
            result = trial(images, labels)
            if number == warmup:
                result.sum().item()  # waits for the device
                begin = time.perf_counter()
        result.sum().item()
        seconds += phase.fraction * (time.perf_counter() - begin) / timed
    return seconds
