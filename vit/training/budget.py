"""Fitting a run into a time budget: how many steps can be taken in so many seconds."""

import copy
import dataclasses
import time

import torch

from vit.seeding import generator
from vit.training.step import TrainingStep

TRAINING_FRACTION = 0.96  # of the budget; the rest is for evaluation and logging
WARMUP_STEPS, TIMED_STEPS = 10, 20  # in each phase of the schedule
TRIAL_LENGTH = 10_000  # steps of the imagined run whose phases are timed


def fit_budget(step: TrainingStep, seconds: float, batch_size: int) -> int:
    """Time some steps of each phase of a run, undo them, and return how many fit into a budget.

    The time this takes counts as training time (`state.seconds`).

    Args:
        step: The step of the run; its schedule's phases are timed, its state is left unchanged.
        seconds: The budget for training, evaluation and logging.
        batch_size: Images per step, over all processes.

    Returns:
        Number of steps, at least 1, the same in all processes.
    """
    start = time.perf_counter()
    fresh = copy.deepcopy(step.state.state_dict())
    seconds_per_step = step.world.agree(mean_step_seconds(step, batch_size))
    step.state.load_state_dict(fresh)
    step.state.seconds = step.world.agree(time.perf_counter() - start)
    left = TRAINING_FRACTION * seconds - step.state.seconds
    return max(1, int(left / seconds_per_step))


def mean_step_seconds(step: TrainingStep, batch_size: int) -> float:
    """Take steps in each phase of a run and return the mean duration of a step of the whole run.

    The steps change the state: weights, optimizers and counts.

    Args:
        step: The step of the run.
        batch_size: Images per step, over all processes.
    """
    schedule = dataclasses.replace(step.schedule, total_steps=TRIAL_LENGTH)
    trial = dataclasses.replace(step, schedule=schedule)
    draw = generator(step.seed, "trial")
    seconds = 0.0
    for phase in schedule.phases():
        trial.state.step = phase.start
        for steps in (WARMUP_STEPS, TIMED_STEPS):
            begin = time.perf_counter()
            for _ in range(steps):
                indices = torch.randint(len(step.images), (batch_size,), generator=draw)
                result = trial(indices.to(step.images.images.device))
            result.sum().item()  # waits for the device
        seconds += phase.fraction * (time.perf_counter() - begin) / TIMED_STEPS
    return seconds
