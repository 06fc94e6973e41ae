"""Training: from a config to a finished run folder.

A run is a function of its config: all random numbers are derived from the seed and the step. On a
CPU, with the same number of processes and threads, a run that is interrupted and resumed is bit for
bit identical to an uninterrupted one; on a GPU, up to the order in which kernels add.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from vit.checkpoint import Checkpoint
from vit.classifier import Classifier
from vit.config import Config, flatten, to_dict
from vit.console import say
from vit.data.datasets import ImageSet, choose_probes, load_test_images, load_training
from vit.data.preprocess import Preprocess
from vit.data.stream import Decoder, ImageFiles
from vit.evaluation import Evaluator, Validation
from vit.explain.canvas import report_boxes
from vit.hardware import cores_of_all_processes
from vit.model.attention_model import attention_model
from vit.model.pretrained import Source
from vit.model.timm_weights import TimmSource
from vit.model_file import save_model
from vit.reporting.attention_logging import AttentionLogging
from vit.reporting.report import write_report
from vit.run_folder import EVAL_FOLDER, MAPS_FOLDER, MODEL_FILE, finish_extension, prepare_run
from vit.tracking import Tracker, milestones
from vit.training.build import build_step
from vit.training.compile import eagerly
from vit.training.environment import Environment, claim_run, start_environment
from vit.training.loop import Loop
from vit.training.messages import end_text, start_text
from vit.training.pretrained import resolve_pretrained, with_statistics
from vit.training.rules import check_out, check_sizes
from vit.training.saving import FileSaver, ShardedSaver
from vit.training.sharding import is_sharded
from vit.training.split import write_split
from vit.training.state import TrainState
from vit.training.step import TrainingStep


def train(
    config: Config, overwrite: bool = False, allow_changes: bool = False, extend: bool = False
) -> dict[str, Any] | None:
    """Train and evaluate a model, and write everything to the run folder `config.out`.

    An unfinished run with the same config is resumed. Under torchrun, the processes divide every
    batch among them and the first one writes.

    Args:
        config: The run.
        overwrite: Whether to delete an existing run in the folder.
        allow_changes: Whether to resume an unfinished run with other learning rates, epochs, batch
            size, augmentation, device or number of processes; data and model must be the same.
        extend: Whether to extend the finished run in the folder to `train.epochs`: a new schedule
            for the added epochs starts from its last weights and optimizer state. Until the
            extension is finished, the finished run's model, report and config stay.

    Returns:
        The report on the test images, see `vit.evaluation.report`; None in all processes but the
        first.

    Raises:
        ValueError: The config or the data is invalid, the run folder is in use or holds something
            that must not be overwritten, or memory ran out.
        SystemExit: With code 128 + N after signal N, 3 if training diverged, 1 if the last
            checkpoint could not be written.
    """
    config, source = prepare(config, overwrite)
    return train_prepared(config, source, overwrite, allow_changes, extend)


def prepare(config: Config, overwrite: bool = False) -> tuple[Config, Source | TimmSource | None]:
    """Find the pretrained weights of a run, and check what needs neither data nor run folder.

    Args:
        config: The run.
        overwrite: Whether an earlier run in the folder is going to be deleted.

    Returns:
        The config, with the architecture of the weights; and the weights, or None.

    Raises:
        ValueError: The config is invalid, or the weights cannot be used.
    """
    config, source = resolve_pretrained(config, overwrite)
    check_sizes(config)
    check_out(config)
    return config, source


def train_prepared(
    config: Config,
    source: Source | TimmSource | None,
    overwrite: bool = False,
    allow_changes: bool = False,
    extend: bool = False,
) -> dict[str, Any] | None:
    """Do what `train` does after `prepare`, whose results config and source are."""
    with (
        start_environment(config) as env,
        claim_run(config, env, overwrite, allow_changes, extend) as (config, checkpoint),
    ):
        training, held_out = load_data(config, checkpoint, env, source)
        step = build_step(config, checkpoint, training, env, source)
        del source  # its weights are in the model
        if env.world.main:
            say(start_text(config, step, training, held_out))
        with open_tracker(config, step.state, checkpoint is not None, env) as tracker:
            if tracker is not None and checkpoint is None and training.fingerprint:
                write_split(config, training, held_out)
            loop = build_loop(config, step, training, held_out, tracker, env)
            loop.run()
            classifier, state, save_error = loop.classifier(), step.state, loop.save_error
            fingerprint = training.fingerprint
            del loop, step, training, held_out  # make room for the test images
            if tracker is None:
                return None
            with cores_of_all_processes(), eagerly():
                return finish_run(
                    config, classifier, state, tracker, save_error, env.decoder, fingerprint
                )


def load_data(
    config: Config,
    checkpoint: Checkpoint | None,
    env: Environment,
    source: Source | TimmSource | None = None,
) -> tuple[ImageSet, ImageSet]:
    """Load the training images and the held-out images, and move them to the device.

    Args:
        config: The run.
        checkpoint: The state to resume from, if any.
        env: The environment of the run.
        source: The pretrained weights to start from, if any; their mean pads images.

    Raises:
        ValueError: Images are missing, or differ from those the run was started with.
    """
    data = config.data
    preprocess = with_statistics(Preprocess.from_config(data), source, checkpoint)
    with env.world.main_first() as told:

        def find_unreadable(files: ImageFiles) -> list[int]:
            if env.world.main:  # one process looks, so that all leave out the same images
                told["unreadable"] = files.unreadable()
            found: list[int] = told["unreadable"]
            return found

        training, held_out = load_training(
            data, config.train.seed, preprocess,
            preprocess.stored() if config.augment.crop == "resized" else None,
            env.decoder, check=env.world.main and checkpoint is None,  # once a run
            find_unreadable=find_unreadable,
        )  # fmt: skip
    if checkpoint is not None:
        started = (*checkpoint.classes, checkpoint.num_images)
        same_files = checkpoint.fingerprint in ("", training.fingerprint)  # "" in old checkpoints
        if started != (*training.classes, len(training)) or not same_files:
            raise ValueError(
                f"data.root: {data.root} does not contain the {checkpoint.num_images:,} training "
                f"images of the classes {', '.join(checkpoint.classes)} with which the run in "
                f"{config.out} was started: files were added, deleted or renamed; restore them, "
                "point --data.root at them, or train in another folder with --out"
            )
    return training.to(env.device), held_out.to(env.device)


@contextlib.contextmanager
def open_tracker(
    config: Config, state: TrainState, resume: bool, env: Environment
) -> Iterator[Tracker | None]:
    """Prepare the run folder and open the logs; yields None in all processes but the main one."""
    if not env.world.main:
        yield None
        return
    run = prepare_run(config, resume, state.step)
    with contextlib.closing(Tracker(run, state.step)) as tracker:
        if state.step == 0:
            tracker.text("config", f"```yaml\n{yaml.safe_dump(to_dict(config))}```")
            tracker.text("model", f"```\n{state.model}\n```")
        yield tracker


def build_loop(
    config: Config,
    step: TrainingStep,
    training: ImageSet,
    held_out: ImageSet,
    tracker: Tracker | None,
    env: Environment,
) -> Loop:
    """Build the loop: the step with evaluators, logging and checkpoints."""
    run, seed, schedule = Path(config.out), config.train.seed, step.schedule
    looked_at = held_out if len(held_out) else training
    epochs = {schedule.steps_per_epoch * (epoch + 1) for epoch in range(schedule.epochs - 1)}
    validated = epochs | {schedule.total_steps}
    evaluators: list[Evaluator] = [Validation(held_out, validated, step.state.frozen)]
    if config.track.probes and attention_model(step.state.model) is not None:
        # Training images may be stored larger than the model takes them.
        probes = choose_probes(looked_at, config.track.probes, seed).resized(step.preprocess)
        steps = milestones(schedule.total_steps, config.track.milestones)
        evaluators.append(AttentionLogging(run / MAPS_FOLDER, probes, steps, seed))
    about: dict[str, Any] = {
        "config": to_dict(config),
        "preprocess": step.preprocess.to_dict(),
        "classes": list(step.classes),
        "num_images": len(training),
        "fingerprint": training.fingerprint,
        "environment": {
            **env.describe(),
            "threads": torch.get_num_threads(),
            "compiled": step.compilation.used,
            "steps_per_epoch": schedule.steps_per_epoch,
        },
    }

    kind = ShardedSaver if is_sharded(step.state.model) else FileSaver
    saver = kind(run, step.state, about, env.world)
    return Loop(
        step, training, evaluators, tracker, saver, env.stop, config.track.every,
        config.train.max_skipped, config.data.balance == "sampler",
    )  # fmt: skip


def finish_run(
    config: Config,
    classifier: Classifier,
    state: TrainState,
    tracker: Tracker,
    save_error: OSError | None,
    decoder: Decoder,
    fingerprint: str,
) -> dict[str, Any]:
    """Evaluate the finished model on the test images, and write the report and the model file.

    Raises:
        SystemExit: With 1 if the last checkpoint could not be written.
    """
    run, data = Path(config.out), config.data
    test = load_test_images(
        dataclasses.replace(data, download=False), classifier.preprocess, decoder
    )
    result = write_report(
        classifier, test, run / EVAL_FOLDER, step=state.step, probes=config.track.probes
    )
    write_hyperparameters(tracker, config, state.step, result)
    tracker.flush()
    save_model(run / MODEL_FILE, classifier, config, state.step, fingerprint)
    finish_extension(run)
    report_boxes()
    variant = config.model.attention
    say(end_text(run, result, state.seconds, classifier.has_maps, variant))
    if save_error is not None:
        say(f"error: the last checkpoint is missing: {save_error}", sys.stderr)
        raise SystemExit(1)
    return result


def write_hyperparameters(
    tracker: Tracker, config: Config, step: int, result: dict[str, Any]
) -> None:
    """Add a finished run to TensorBoard's HParams table."""
    values = {f"test/{key}": result[key] for key in ("accuracy", "loss")}
    # A run killed here writes them again, as the same point.
    tracker.scalars(step, values, tensorboard_only=True)
    settings = flatten(to_dict(config))
    places = ("out", "data.root", "data.download", "data.memory_gb", "data.workers")
    tracker.hyperparameters({k: v for k, v in settings.items() if k not in places})
