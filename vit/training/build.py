"""Building a run's training step: model, optimizers, schedule, and where its weights come from."""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor, nn

from vit.checkpoint import Checkpoint
from vit.classifier import Classifier
from vit.config import PATCH_SIZE, Config, ModelConfig
from vit.console import is_out_of_memory, say
from vit.data.balance import class_weights
from vit.data.batches import divide_epoch
from vit.data.datasets import ImageSet
from vit.data.preprocess import Preprocess
from vit.model.attention_model import size_unit
from vit.model.pretrained import Source, adapt
from vit.model.timm_weights import TimmSource, keep_head
from vit.settings import shorten
from vit.training.budget import fit_budget
from vit.training.compile import (
    Compilation,
    choose_compilation,
    compiled,
    gain,
    seconds_on,
    training_seconds,
)
from vit.training.environment import Environment
from vit.training.pretrained import with_statistics
from vit.training.saving import load_folder
from vit.training.schedule import Schedule, scaled_size
from vit.training.sharding import is_sharded, replicate
from vit.training.state import TrainState, build_state
from vit.training.step import TrainingStep

FEATURE_BATCH = 100  # images per forward pass for the features of a frozen model
WHITENING_IMAGES = 500  # training images whose patches whiten the stem
MEMORY = 0.1  # fraction of a run over which the statistics of batch norm average, at most


def build_step(
    config: Config,
    checkpoint: Checkpoint | None,
    training: ImageSet,
    env: Environment,
    source: Source | TimmSource | None = None,
) -> TrainingStep:
    """Build the training step with its schedule, and its state: new, pretrained or resumed.

    Args:
        config: The run.
        checkpoint: The state to resume from, if any.
        training: The training images.
        env: The environment of the run.
        source: The pretrained weights to start from, if any.

    Raises:
        ValueError: The checkpoint is beyond the last step, or the model is to be compiled and what
            torch needs for it is missing.
    """
    train = config.train
    preprocess = with_statistics(Preprocess.from_config(config.data), source, checkpoint)
    state = first_state(config, checkpoint, training, preprocess, env, source)
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
    step = compile_step(config, checkpoint, step, training, env)
    if env.world.size > 1 and env.device.type != "cpu" and not is_sharded(state.model):
        step = dataclasses.replace(step, forward=replicate(step.forward))
    spent = env.world.agree(time.perf_counter() - begin)
    if train.budget_minutes is None:
        state.total_steps = step.schedule.total_steps
    elif state.total_steps == 0:  # a resumed run keeps the steps of its first process
        logged = config.track.milestones * config.track.probes
        left = 60 * train.budget_minutes - spent
        state.total_steps = fit_budget(step, training, left, logged)
    state.seconds += spent
    if state.step > state.total_steps:
        raise ValueError(
            f"train.epochs: {train.epochs} are {state.total_steps:,} steps, but the run in "
            f"{config.out} has already made {state.step:,}; use more epochs"
        )
    # The first part of an extended run, so that it is what it was before the extension.
    shorten_averages(model, (*schedule.restarts, state.total_steps)[0])
    schedule = dataclasses.replace(step.schedule, total_steps=state.total_steps)
    return dataclasses.replace(step, schedule=schedule)


def compile_step(
    config: Config,
    checkpoint: Checkpoint | None,
    step: TrainingStep,
    training: ImageSet,
    env: Environment,
) -> TrainingStep:
    """Compile the model of a step if the run is to be compiled, the same in all processes.

    Args:
        config: The run.
        checkpoint: The state to resume from, if any.
        step: The training step without compilation.
        training: The training images.
        env: The environment of the run.

    Raises:
        ValueError: The model is to be compiled, but cannot be.
    """
    train, began = config.train, None
    if checkpoint is not None:  # early versions stored it only in the config
        began = checkpoint.environment.get("compiled", checkpoint.config["train"].get("compile"))
    cores = env.world.size * torch.get_num_threads()
    estimate = training_seconds(step)
    seconds = seconds_on(env.device, env.precision, cores, estimate)
    if train.budget_minutes is not None:
        seconds = 60 * train.budget_minutes
    num_sizes = 1 + step.schedule.resizes
    with env.world.main_first():
        saved = gain(env.device, env.precision) * seconds
        choice = choose_compilation(train.compile, began, env.device, saved, num_sizes)
    choice = env.world.agree(choice)
    if not choice.used:
        return dataclasses.replace(step, compilation=choice)
    if env.world.main:
        say("compiling the model, which takes a minute or two the first time")
    # A CPU gains nothing from exchanging gradients during the backward pass.
    by_block = is_sharded(step.forward) or (env.world.size > 1 and env.device.type != "cpu")
    fast = dataclasses.replace(step, forward=compiled(step.forward, by_block), compilation=choice)
    error = try_sizes(fast, training)
    if not env.world.largest(torch.tensor(float(error is not None))):
        return fast
    text = shorten(error or "in another process", 200)
    if train.compile != "auto" or began:
        with env.world.main_first():
            raise ValueError(
                f"train.compile: torch.compile failed ({text}); train without it by "
                f"--train.compile false{' --resume.allow_changes' if began else ''}"
            )
    return dataclasses.replace(step, compilation=Compilation(False, f"it failed ({text})"))


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


def first_state(
    config: Config,
    checkpoint: Checkpoint | None,
    training: ImageSet,
    preprocess: Preprocess,
    env: Environment,
    source: Source | TimmSource | None,
) -> TrainState:
    """Build the state that training starts from; arguments as for `build_step`."""
    train, weights = config.train, None
    if source is not None and checkpoint is None:
        weights, account = _adapted(source, config.model, preprocess, training.classes)
        if env.world.main:
            say(account)
    sample = None
    if train.whiten and checkpoint is None and weights is None:  # these bring their own kernels
        first = torch.arange(min(WHITENING_IMAGES, len(training)))
        sample = training.select(first).pixels().cpu()
    state = build_state(
        config.model, config.optim, preprocess, len(training.classes), train.seed, env.device,
        sample, weights, frozen=train.freeze == "backbone", world=env.world,
        parallel=train.parallel, precision=env.precision,
    )  # fmt: skip
    model: Any = state.model  # ours or timm's, which have this method
    if train.checkpoint_blocks:
        model.set_grad_checkpointing()
    if checkpoint is not None and checkpoint.folder is not None:
        load_folder(state, checkpoint)
    elif checkpoint is not None:
        if state.copy is not None:
            raise ValueError(
                f"train.parallel: {train.parallel} cannot resume the run in {config.out}, whose "
                "checkpoints are not sharded; resume it with --train.parallel replicate"
            )
        state.load_state_dict(vars(checkpoint))
    return state


def _adapted(
    source: Source | TimmSource,
    model: ModelConfig,
    preprocess: Preprocess,
    classes: tuple[str, ...],
) -> tuple[dict[str, Tensor], str]:
    """Adapt pretrained weights to the images and classes of a run; see `adapt` for the result."""
    if isinstance(source, TimmSource):  # fitted to the images when the run was checked
        return keep_head(source, classes)
    patch_size = model.patch_size or PATCH_SIZE
    return adapt(source, patch_size, preprocess.image_size, preprocess.channels, classes)


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
