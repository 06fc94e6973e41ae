"""Building a run's training step: model, optimizers, schedule, and where its weights come from."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor, nn

from vit.classifier import Classifier
from vit.console import is_out_of_memory, say
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.sampling import class_weights, divide_epoch
from vit.distributed.shard import is_sharded, replicate
from vit.model.attention_model import size_unit
from vit.pretrained.adapt import Pretrained
from vit.settings import shorten
from vit.training.budget import TRAINING_FRACTION, fit_budget
from vit.training.compile import Compilation, choose_compilation, compiled
from vit.training.config import Config
from vit.training.schedule import Schedule, scaled_size
from vit.training.start import Environment, Run
from vit.training.state import TrainState, start_state
from vit.training.step import TrainingStep

FEATURE_BATCH = 100  # images per forward pass for the features of a frozen model
MEMORY = 0.1  # fraction of a run over which the statistics of batch norm average, at most


def build_step(run: Run, training: ImageSet, source: Pretrained | None = None) -> TrainingStep:
    """Build the training step with its schedule, and its state: new, pretrained or resumed.

    Args:
        run: The run.
        training: The training images.
        source: The pretrained weights that a new run starts from, if any.

    Raises:
        ValueError: The checkpoint is beyond the last step, or the model is to be compiled and what
            torch needs for it is missing.
    """
    config, checkpoint, env = run.config, run.checkpoint, run.env
    train, preprocess = config.train, run.preprocess
    state = start_state(run, training, source)
    model: Any = state.model  # ours or timm's
    unit = size_unit(state.model)
    whole = len(training) // train.batch_size  # batches; early versions used no others
    began = checkpoint.environment.get("steps_per_epoch", whole) if checkpoint else None
    parts = env.world.size * train.accumulate
    epoch = divide_epoch(len(training), train.batch_size, parts, began)
    schedule = build_schedule(config, epoch, preprocess.image_size, unit)
    fixed = (
        state.frozen
        and isinstance(model.get_classifier(), nn.Linear)
        and not (config.augment.changes_images or schedule.resizes)
    )
    forward: nn.Module = model.get_classifier() if fixed else model
    begin = time.perf_counter()
    features = compute_features(state, training, preprocess, env) if fixed else None
    step = TrainingStep(
        state=state,
        forward=forward,
        preprocess=preprocess,
        classes=training.classes,
        schedule=schedule,
        augmentation=config.augment,
        label_smoothing=config.optim.label_smoothing,
        clip_grad=config.optim.clip_grad,
        accumulate=train.accumulate,
        precision=env.precision,
        seed=train.seed,
        world=env.world,
        class_weights=(
            class_weights(training.class_counts()).to(env.device)
            if config.data.balance == "loss"
            else None
        ),
        features=features,
    )
    if train.budget_minutes is None or state.total_steps:  # a resumed run keeps its steps
        state.total_steps = state.total_steps if train.budget_minutes else schedule.total_steps
        step = compile_step(run, step, training, state.total_steps)
    else:
        logged = config.track.milestones * config.track.probes
        end = begin + TRAINING_FRACTION * 60 * train.budget_minutes
        state.total_steps = fit_budget(step, training, end, logged)
        fast = compile_step(run, step, training, state.total_steps)
        if fast.forward is not step.forward:
            state.total_steps = fit_budget(fast, training, end, logged)
        step = fast
    state.seconds += env.world.agree(time.perf_counter() - begin)
    if state.step > state.total_steps:
        raise ValueError(
            f"train.epochs: {train.epochs} are {state.total_steps:,} steps, but the run in "
            f"{config.out} has already made {state.step:,}; use more epochs"
        )
    # The first part of an extended run, so that it is what it was before the extension.
    shorten_averages(model, (*schedule.restarts, state.total_steps)[0])
    schedule = dataclasses.replace(step.schedule, total_steps=state.total_steps)
    return dataclasses.replace(step, schedule=schedule)


def compile_step(run: Run, step: TrainingStep, training: ImageSet, steps: int) -> TrainingStep:
    """Compile the model of a step if the run is to be compiled, the same in all processes.

    Args:
        run: The run.
        step: The training step without compilation.
        training: The training images.
        steps: Steps in the run.

    Returns:
        The step; several accelerators average gradients in its backward pass.

    Raises:
        ValueError: The model is to be compiled, but cannot be.
    """
    checkpoint, env = run.checkpoint, run.env
    choice, began = run.config.train.compile, None
    if checkpoint is not None:  # early versions stored it only in the config
        began = checkpoint.environment.get("compiled", checkpoint.config["train"].get("compile"))
    with env.world.main_first():
        compilation = choose_compilation(choice, began, env.device, env.precision, steps)
    compilation = env.world.agree(compilation)
    exchanges = env.world.size > 1 and env.device.type != "cpu"  # during the backward pass
    sharded = is_sharded(step.forward)
    step = dataclasses.replace(step, compilation=compilation)
    if compilation.used:
        step, error = _try_compiled(step, training, by_block=exchanges or sharded)
        if error is not None and (choice != "auto" or began):
            with env.world.main_first():
                raise ValueError(
                    f"train.compile: torch.compile failed ({error}); train without it by "
                    f"--train.compile false{' --resume.allow_changes' if began else ''}"
                )
    if exchanges and not sharded:
        step = dataclasses.replace(step, forward=replicate(step.forward))
    return step


def _try_compiled(
    step: TrainingStep, training: ImageSet, by_block: bool
) -> tuple[TrainingStep, str | None]:
    """Return the compiled step and None; or, if a process cannot compile it, the step and why."""
    if step.world.main:
        say("compiling the model, which takes a minute or two the first time")
    fast = dataclasses.replace(step, forward=compiled(step.forward, by_block))
    error = try_sizes(fast, training)
    if not step.world.largest(torch.tensor(float(error is not None))):
        return fast, None
    error = shorten(error or "in another process", 200)
    return dataclasses.replace(step, compilation=Compilation(False, f"it failed ({error})")), error


def try_sizes(step: TrainingStep, training: ImageSet) -> str | None:
    """Run a forward and a backward pass for each image size, so that the model is compiled.

    A failure is found here, not at the step at which the images grow. The state stays as it is.

    Args:
        step: The training step.
        training: The training images.

    Returns:
        What went wrong, or None.
    """
    state = step.state
    began, buffers = state.step, [(b, b.clone()) for b in state.model.buffers()]
    indices = torch.arange(step.schedule.batch_size) % len(training)
    starts = {phase.image_size: phase.start for phase in step.schedule.phases()}
    try:
        for start in starts.values():
            state.step = start
            for images, labels in step.inputs(training).batches(step.world.part(indices)[None]):
                step.backward(*step.prepare(images, labels))
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return str(error)
    finally:
        state.step = began
        state.model.zero_grad(set_to_none=True)
        for buffer, old in buffers:
            buffer.copy_(old)
    return None


def shorten_averages(model: nn.Module, total_steps: int) -> None:
    """Let the running statistics of batch norm forget their initial values in a short run.

    With torch's momentum of 0.1 they average over about 10 steps, so after 12 steps they would
    still be initial values to 28%. Runs of 100 steps and more keep torch's momentum.

    Args:
        model: Its batch norms are changed in place.
        total_steps: Optimizer steps in the run.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            least = min(1.0, 1 / (MEMORY * total_steps))
            module.momentum = max(module.momentum, least)


def compute_features(
    state: TrainState, images: ImageSet, preprocess: Preprocess, env: Environment
) -> Tensor:
    """Return what the head gets for each image, (N, D) float32."""
    model, classes = state.model.eval(), images.classes
    classifier = Classifier(model, preprocess, classes, env.device, env.precision)
    parts = images.parts(FEATURE_BATCH)
    return torch.cat([classifier.features(part) for part in parts])


def build_schedule(
    config: Config, epoch: tuple[int, int], image_size: tuple[int, int], unit: int
) -> Schedule:
    """Build the schedule of a run of `train.epochs` epochs.

    Args:
        config: The run.
        epoch: Steps in an epoch, and images per step.
        image_size: Height and width of the images, in pixels.
        unit: Pixels that the sides of smaller images are multiples of.
    """
    train = config.train
    per_epoch, batch_size = epoch
    return Schedule(
        total_steps=train.epochs * per_epoch,
        steps_per_epoch=per_epoch,
        batch_size=batch_size,
        full_size=image_size,
        small_size=scaled_size(image_size, train.small_scale, unit),
        small_fraction=train.small_share,
        mix_fraction=config.augment.mix_share,
        warmup=config.optim.warmup,
        decay=config.optim.schedule,
        restarts=tuple(epochs * per_epoch for epochs in train.restarts),
    )
