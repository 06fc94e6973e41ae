"""Building a run's training step: its state, its length, and compilation.

torch.compile takes time that long runs win back. The choice is stored in the checkpoints: a resumed
run goes on as it began.
"""

import copy
import dataclasses
import importlib.util
import os
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, cast

import torch
from einops import rearrange
from torch import nn

from vit.classifier import Classifier
from vit.config import Config, Plans, to_dict
from vit.console import say
from vit.data.images import ImageSet
from vit.data.sampling import class_weights, divide_epoch
from vit.data.stream import ImageFiles
from vit.distributed.shard import is_sharded, replicate
from vit.model.attention_model import size_unit
from vit.model.variants import is_edited
from vit.pretrained.adapt import Pretrained
from vit.run.length import Length
from vit.seeding import generator
from vit.settings import changed_keys
from vit.training.flop import flop_of_steps
from vit.training.schedule import Schedule, scaled_size
from vit.training.start import Run
from vit.training.state import TrainState, start_state
from vit.training.step import TrainingStep
from vit.training.teacher import load_teacher

BATCH_NORM_FRACTION = 0.1  # of a run, over which batch norm averages its statistics, at most
TRAINING_FRACTION = 0.98  # of a time budget; the rest is for checkpoints and muted heads
WARMUP_STEPS, TIMED_STEPS = 5, 10  # in each phase; few, because they count as training time
TRIAL_LENGTH = 10_000  # steps of the hypothetical run whose phases are timed
# Compiling takes half a minute to two minutes and saves about an eighth of a step.
MANY_STEPS = 5_000  # from which auto compiles
COMPILABLE = ("cpu", "cuda", "xpu")  # devices for which auto compiles
CXX = {"darwin": "clang++", "win32": "cl"}  # what torch calls where CXX does not name a compiler


def build_step(
    run: Run,
    training: ImageSet,
    source: Pretrained | None = None,
    held_out: int = 0,
    plans: Plans | None = None,
) -> tuple[Run, TrainingStep]:
    """Build the training step with its schedule, and its state: new, pretrained or resumed.

    A time budget allows for the validation of `held_out` images after each epoch. A new run whose
    epochs reach a plan follows it, measured again; the run that is returned has its config.

    Raises:
        ValueError: The checkpoint is beyond the last step or does not fit, or there is no compiler.
    """
    begin, plans = time.perf_counter(), plans or {}
    step = _measure_step(run, training, source, held_out, begin)
    epochs = step.schedule.total_steps / step.schedule.steps_per_epoch
    reached = [start for start in plans if start <= epochs and run.checkpoint is None]
    config = plans[max(reached)] if reached else run.config
    changes = changed_keys(to_dict(run.config), to_dict(config))
    if changes:
        if run.world.main:
            say(f"budget   {epochs:.2g} epochs fit without changes, so {'; '.join(changes)}")
        run = dataclasses.replace(run, config=config)
        step = _measure_step(run, training, source, held_out, begin)
    return run, _finish_step(run, step, training, held_out, begin)


def _measure_step(
    run: Run, training: ImageSet, source: Pretrained | None, held_out: int, begin: float
) -> TrainingStep:
    """Build the step, not compiled, and its state, and set the length of the run."""
    state = start_state(run, training, source)
    step = _assemble_step(run, training, state)
    if run.world.main:
        step = dataclasses.replace(step, flop=flop_of_steps(step))
    if run.config.train.budget_minutes is None:
        state.length.plan(run.config.train.epochs * step.schedule.steps_per_epoch)
    elif not state.length.total_steps:
        _fit_budget(run, step, training, held_out, begin)
    return step


def _finish_step(
    run: Run, step: TrainingStep, training: ImageSet, held_out: int, begin: float
) -> TrainingStep:
    """Compile the step if the run is long enough, and set the length by the compiled step."""
    state = step.state
    step = compile_step(run, step)
    if step.compiled and state.length.costs and run.checkpoint is None:
        _fit_budget(run, step, training, held_out, begin)
    total_steps = state.length.total_steps
    state.seconds += time.perf_counter() - begin
    if state.step > total_steps:
        raise ValueError(
            f"train.epochs: {run.config.train.epochs} are {total_steps:,} steps, but the run in "
            f"{run.config.out} has already made {state.step:,}; use more epochs"
        )
    # In a short run, the running statistics of batch norm have to forget their initial values. With
    # torch's momentum of 0.1, these would still count 28% after 12 steps.
    for module in state.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            module.momentum = max(
                module.momentum, min(1.0, 1 / (BATCH_NORM_FRACTION * state.length.first_total))
            )
    return step


def deadline(config: Config) -> float | None:
    """Return the seconds of training by which a run should end; None without a time budget."""
    if config.train.budget_minutes is None:
        return None
    return TRAINING_FRACTION * 60 * config.train.budget_minutes


def _assemble_step(run: Run, training: ImageSet, state: TrainState) -> TrainingStep:
    """Decide what a step computes: schedule, teacher, class weights, features of a frozen model."""
    config = run.config
    schedule = _build_schedule(run, len(training), size_unit(state.model), state.length)
    teacher = load_teacher(run, training, schedule)
    model: Any = state.model  # ours or timm's
    forward, features = state.model, None
    resizes = schedule.small_fraction > 0 and schedule.small_size != schedule.full_size
    varies = config.augment.changes_images or resizes or teacher is not None
    if state.frozen and not varies and isinstance(model.get_classifier(), nn.Linear):
        settings = run.preprocess, training.classes, run.device, run.precision
        features = Classifier(model.eval(), *settings).features(training)
        forward = model.get_classifier()
    balanced = config.data.balance == "loss"
    weights = class_weights(training.class_counts()).to(run.device) if balanced else None
    return TrainingStep(
        state, forward, run.preprocess, training.classes, schedule, config.augment,
        label_smoothing=config.optim.label_smoothing, clip_grad=config.optim.clip_grad,
        accumulate=config.train.accumulate, precision=run.precision, seed=config.train.seed,
        world=run.world, teacher=teacher, class_weights=weights, features=features,
    )  # fmt: skip


def _build_schedule(run: Run, num_images: int, unit: int, length: Length) -> Schedule:
    """Build the schedule of a run; the sides of smaller images are multiples of `unit` pixels."""
    config, train = run.config, run.config.train
    began = None
    if run.checkpoint is not None:  # early versions used full batches only
        full_batches = num_images // train.batch_size
        began = run.checkpoint.environment.get("steps_per_epoch", full_batches)
    parts = run.world.size * train.accumulate
    per_epoch, batch_size = divide_epoch(num_images, train.batch_size, parts, began)
    full_size = run.preprocess.image_size
    return Schedule(
        length, per_epoch, batch_size, full_size,
        small_size=scaled_size(full_size, train.small_scale, unit),
        small_fraction=train.small_share or 0.0, mix_fraction=config.augment.mix_share,
        warmup=config.optim.warmup, decay=config.optim.schedule,
    )  # fmt: skip


def _fit_budget(
    run: Run, step: TrainingStep, training: ImageSet, held_out: int, begin: float
) -> None:
    """Set the length of the run to as many steps, at least 1, as fit into its time budget.

    The budget counts from `begin`, and includes the validation of `held_out` images after each
    epoch. Logging shortens the run when it is measured.
    """
    state, seconds = step.state, deadline(run.config)
    assert seconds is not None, "there is a budget"
    before = copy.deepcopy(state.state_dict())
    costs = time_phases(step, training, (begin + seconds - time.perf_counter()) / 4)
    state.load_state_dict(before)
    length = state.length
    length.costs = costs
    validated = held_out / 3 / len(training)  # classifying an image takes a third of training on it
    steps = (begin + seconds - time.perf_counter()) / (length.seconds(0, 1) * (1 + validated))
    length.plan(step.world.agree(max(1, int(steps))))


def time_phases(
    step: TrainingStep, training: ImageSet, seconds: float
) -> tuple[tuple[float, float], ...]:
    """Time steps in each phase of a run, for `Length.costs`; changes the state.

    All phases together take at most about `seconds`, or two steps each, of which the second is
    timed.
    """
    warmup, timed = WARMUP_STEPS, TIMED_STEPS
    # Skip the batch that each worker prepares in advance.
    if isinstance(training.images, ImageFiles):
        ahead = step.world.agree(training.images.num_workers)
        warmup, timed = max(warmup, ahead + 1), max(timed, ahead)
    schedule = dataclasses.replace(step.schedule, length=Length(TRIAL_LENGTH))
    trial = dataclasses.replace(step, schedule=schedule)
    draw = generator(step.seed, "trial")
    costs, end, phases = [], 0.0, schedule.phases()
    for phase in phases:
        trial.state.step = phase.start
        shape = (warmup + timed, schedule.batch_size)
        indices = torch.randint(len(training), shape, generator=draw)
        begin, first = time.perf_counter(), 0
        for number, batch in enumerate(step.batches(training, indices), start=1):
            result = trial(*batch)
            if number == 2:  # the first one may compile
                result.sum().item()  # waits for the device
                needed = (time.perf_counter() - begin) * len(indices)
                if step.world.agree(needed > seconds / len(phases)):
                    break
            if number in (1, warmup):
                result.sum().item()
                begin, first = time.perf_counter(), number
        result.sum().item()
        end += phase.fraction
        costs.append((round(end, 9), (time.perf_counter() - begin) / (number - first)))
    return tuple(costs)


def compile_step(run: Run, step: TrainingStep) -> TrainingStep:
    """Compile a step if the run is long enough to benefit; accelerators average gradients in it."""
    world, choice, steps = run.world, run.config.train.compile, step.state.length.total_steps
    began = None if run.checkpoint is None else run.checkpoint.environment.get("compiled")
    with world.main_first():
        wanted = choose_compilation(choice, began, run.device, steps)
    wanted = world.agree(wanted)
    exchanges = world.size > 1 and run.device.type != "cpu"  # during the backward pass
    sharded, forward = is_sharded(step.forward), step.forward
    if wanted:
        if world.main:
            say("compiling the model in the first steps, which takes a minute or two once")
        # What torch fails to compile runs as it is, unless compilation was asked for.
        torch._dynamo.config.suppress_errors = choice == "auto"
        forward = compiled(forward, by_block=exchanges or sharded)
    if exchanges and not sharded:
        forward = replicate(forward, unused=is_edited(run.config.model.attention))
    return dataclasses.replace(step, forward=forward, compiled=wanted)


def choose_compilation(
    choice: bool | str, began: bool | None, device: torch.device, steps: int
) -> bool:
    """Decide whether to compile the model of a run; `began` says how a resumed run began.

    Raises:
        ValueError: The run is to be compiled, but what torch needs for it is missing.
    """
    missing = missing_tool(device)
    wanted = choice if began is None or choice != "auto" else began
    if wanted is True and missing:
        raise ValueError(
            f"train.compile: compiling needs {missing}, which was not found; install it, or train "
            "without with --train.compile false"
            f"{' --resume.allow_changes' if began else ''}"
        )
    if isinstance(wanted, bool):  # else "auto"
        return wanted
    return device.type in COMPILABLE and steps >= MANY_STEPS and missing is None


def missing_tool(device: torch.device) -> str | None:
    """Name what torch.compile needs on a device and does not find, or return None."""
    if device.type == "mps":  # for which torch compiles without
        return None
    compilers = [os.environ.get("CXX") or CXX.get(sys.platform, "g++")]
    if device.type != "cpu":
        if importlib.util.find_spec("triton") is None:
            return "triton"
        if sys.platform != "linux":  # where triton may bring its own compiler
            return None
        compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return "a C++ compiler" if device.type == "cpu" else "a C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (package python3-dev)"
    return None


def compiled(forward: nn.Module, by_block: bool = False) -> nn.Module:
    """Compile a model; it draws the same random numbers as without compilation.

    By block, each encoder block is compiled on its own, in place, so that processes can exchange
    weights and gradients between blocks.
    """
    # Traced, it would be compiled again after its first call with another kind of tensor.
    torch.compiler.allow_in_graph(rearrange)
    # Each image size is compiled separately, so that the grid is a plain number.
    options: dict[str, Any] = {"dynamic": False, "options": {"fallback_random": True}}
    if not by_block:
        return cast(nn.Module, torch.compile(forward, **options))
    for block in cast(Any, getattr(forward, "blocks", ())):
        block.compile(**options)
    return forward
