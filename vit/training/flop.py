"""The floating-point operations of training, and how they compare with what the machine can do."""

import time
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vit.hardware import local_processes
from vit.model.copying import copy_module
from vit.training.step import TrainingStep


def flop_of_steps(step: TrainingStep) -> dict[tuple[int, int], float]:
    """Count the FLOP of a step of all processes, by the size of its images.

    These are the products and convolutions of the forward pass, twice as many of the backward pass,
    and those of a teacher, as torch's FLOP counter counts them. What is computed again to save
    memory does not count, nor what the optimizer computes. Empty for a model that the counter does
    not understand, such as one with a user's attention.
    """
    schedule, flop = step.schedule, {}
    for size in {phase.image_size for phase in schedule.phases()}:
        try:
            flop[size] = schedule.batch_size * _flop_of_image(step, size)
        except Exception:  # other people's code may raise any type
            return {}
    return flop


def _flop_of_image(step: TrainingStep, size: tuple[int, int]) -> float:
    """Count the FLOP of a step for one image."""
    state, shape = step.state, (step.preprocess.channels, *size)
    if step.features is not None:
        return 3 * _forward_flop(step.forward, step.features.shape[1:])
    flop = (1 if state.frozen else 3) * _forward_flop(state.structure(), shape)
    if step.teacher is not None:
        flop += _forward_flop(step.teacher.classifier.model, shape)
    return flop


def _forward_flop(model: nn.Module, shape: tuple[int, ...]) -> float:
    """Count the FLOP of the forward pass of one input of a shape."""
    from torch.utils.flop_counter import FlopCounterMode

    model, device = copy_module(model).eval(), next(model.parameters()).device
    # The counter does not know the fused kernels of all devices.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(2, *shape, device=device))
    return counter.get_total_flops() / 2


def product_speed(device: torch.device, precision: torch.dtype, processes: int) -> float:
    """Measure the FLOP/s that matrix products reach on all devices of some processes."""
    size = 1024 if device.type == "cpu" else 8192  # rows and columns of square matrices
    matrix = torch.randn(size, size, device=device, dtype=precision)
    seconds = []
    for _ in range(8):
        begin = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - begin)
    devices = processes // local_processes() if device.type == "cpu" else processes
    return devices * 2 * size**3 / min(seconds)


def account(step: TrainingStep, minutes: float | None) -> dict[str, Any]:
    """Return what a finished run has done, for its report."""
    state, schedule = step.state, step.schedule
    pflop, ratio = None, None
    if state.flop is not None:
        device = next(state.model.parameters()).device
        speed = product_speed(device, step.precision, step.world.size)
        pflop, ratio = state.flop / 1e15, state.flop / (state.seconds * speed)
    return {
        "steps": state.step,
        "planned_steps": state.length.first_total,
        "epochs": state.step / schedule.steps_per_epoch,
        "seconds": state.seconds,
        "budget_minutes": minutes,
        "pflop": pflop,
        "of_products": ratio,
    }
