"""Training: from a config to a finished run folder.

A run is a function of its config: every random draw is made from the seed and the step. On a CPU,
with the same number of processes and threads, a run that is interrupted and resumed is bit for bit
the run that was not; on a GPU up to the order in which its kernels add.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch

from vit.checkpoint import MODEL_FILE, save_model
from vit.config import Config, flatten, to_dict
from vit.console import rank, say
from vit.data.augment import normalize
from vit.data.datasets import ImageSet, load, load_training, normalization
from vit.hardware import choose_device, choose_precision
from vit.reporting.report import write_report
from vit.run_folder import EVAL_FOLDER, check_run, lock_run, prepare_run
from vit.tracking import Tracker
from vit.training.distributed import World, join_world
from vit.training.loop import Diverged, Loop
from vit.training.messages import end_text, start_text, stopped_text
from vit.training.state import build_state
from vit.training.stopping import Stopped, StopRequest, stop_on_signals

WHITENED = 500  # training images by whose patches the stem is whitened


def train(
    config: Config, overwrite: bool = False, allow_changes: bool = False
) -> dict[str, Any] | None:
    """Train, evaluate and explain a model; leave everything in the run folder `config.out`.

    An unfinished run with the same config is resumed. With torchrun the processes share every
    batch; the first of them writes.

    Args:
        config: The run.
        overwrite: Whether a run that is in the folder already may be deleted.
        allow_changes: Whether an unfinished run may be resumed with other rates, epochs, batch,
            augmentation, device or number of processes; data and model stay.

    Returns:
        The report on the test images, see `vit.evaluation.report`; None in all processes but the
        first.

    Raises:
        ValueError: Something in the config, the data or the run folder does not allow the run.
        SystemExit: With 128 + its number after a signal, with 3 when training diverged, with 1
            when the last checkpoint could not be written.
    """
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not
    torch.use_deterministic_algorithms(config.deterministic)
    device = choose_device(config.train.device)
    with stop_on_signals() as stop:
        try:
            with join_world(device) as world:
                return _train_alone(config, overwrite, allow_changes, device, world, stop)
        except Stopped:
            if rank() == 0:
                say(stopped_text(Path(config.out), stop.signal), sys.stderr)
            raise SystemExit(128 + stop.signal) from None
        except Diverged as error:  # all have, with the same numbers
            if rank() == 0:
                say(f"error: {error}", sys.stderr)
            raise SystemExit(3) from None


def _train_alone(
    config: Config,
    overwrite: bool,
    allow_changes: bool,
    device: torch.device,
    world: World,
    stop: StopRequest,
) -> dict[str, Any] | None:
    """Train in a run folder that nobody else writes into; the rest is as for `train`."""
    precision = choose_precision(config.train.precision, device)
    how = {"processes": world.size, "device": device.type, "precision": str(precision)}
    with contextlib.ExitStack() as stack:
        with world.main_first():
            if world.main:
                stack.enter_context(lock_run(Path(config.out)))
            checkpoint = check_run(config, overwrite, how, allow_changes)
        return _train(config, checkpoint, device, precision, world, stop)


def _train(
    config: Config,
    checkpoint: dict[str, Any] | None,
    device: torch.device,
    precision: torch.dtype,
    world: World,
    stop: StopRequest,
) -> dict[str, Any] | None:
    """Train from a checkpoint or anew, evaluate and explain; returns what `train` does."""
    with world.main_first():
        training, held_out = _load_training(config, checkpoint)
    sample = None
    if config.train.whiten and checkpoint is None:  # a checkpoint has its own kernels
        sample = training.images[:WHITENED]
        sample = normalize(sample, *normalization(config.data.name, sample.device))
    state = build_state(config, len(training.classes), device, sample)
    loop = Loop(config, state, training, held_out, device, precision, world)
    if checkpoint is not None:
        state.load_state_dict(checkpoint)
    loop.count_steps()
    if not world.main:
        loop.run(None, stop)
        return None
    run = prepare_run(config, resume=checkpoint is not None)
    say(
        start_text(
            config, state, loop.plan, len(training), len(held_out), device, precision, world.size
        )
    )
    with contextlib.closing(Tracker(run, state.step)) as tracker:
        loop.run(tracker, stop)
        save_error, data = loop.save_error, config.data
        del loop, training, held_out  # the images to train on are not needed beside those to test
        test = load(
            data.name, data.root, train=False, download=False, on_bad_image=data.on_bad_image
        )
        result = write_report(
            state.evaluated(), test, data.name, run / EVAL_FOLDER, step=state.step,
            device=device, precision=precision, probes=config.track.probes,
        )  # fmt: skip
        write_hyperparameters(tracker, config, state.step, result)
        tracker.flush()
    save_model(run / MODEL_FILE, state.evaluated(), config, test.classes, state.step)
    say(end_text(run, result, state.seconds))
    if save_error is not None:
        say(f"error: the last checkpoint is missing: {save_error}", sys.stderr)
        raise SystemExit(1)
    return result


def _load_training(config: Config, checkpoint: dict[str, Any] | None) -> tuple[ImageSet, ImageSet]:
    """Load what a run trains on and what it holds out.

    Raises:
        ValueError: It is not there, or is not what the run was started with.
    """
    data = config.data
    training, held_out = load_training(
        data.name, data.root, data.download, data.train_size, data.val_size,
        config.train.seed, data.on_bad_image,
    )  # fmt: skip
    started = checkpoint or {"classes": training.classes, "num_images": len(training)}
    if (*started["classes"], started["num_images"]) != (*training.classes, len(training)):
        raise ValueError(
            f"data.root: {data.root} does not have the {started['num_images']:,} training images "
            f"of the classes {', '.join(started['classes'])} that {config.out} was started with; "
            f"name the folder that has, or train elsewhere with --out"
        )
    return training, held_out


def write_hyperparameters(
    tracker: Tracker, config: Config, step: int, result: dict[str, Any]
) -> None:
    """Enter a finished run into TensorBoard's HParams table."""
    values = {f"test/{key}": result[key] for key in ("accuracy", "loss")}
    tracker.aside(step + 1, values)  # beyond the last step: a run killed here does it again
    metrics = [*values, *(["val/accuracy"] if config.data.val_size else [])]
    settings = flatten(to_dict(config))
    places = ("out", "data.root", "data.download")
    tracker.hyperparameters({k: v for k, v in settings.items() if k not in places}, metrics)
