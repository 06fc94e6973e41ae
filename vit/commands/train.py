"""Training: from a config to a finished run folder.

A run is a function of its config: all random numbers are derived from the seed and the step. On a
CPU, with the same number of processes and threads, a run that is interrupted and resumed is bit for
bit identical to an uninterrupted one; on a GPU, up to the order in which kernels add. With a time
budget, the clock decides how many steps follow.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor

from vit.calibration import Calibration
from vit.classifier import Classifier
from vit.commands.check import check
from vit.config import Config, Plans, to_dict
from vit.console import argument, note, program, say
from vit.data.datasets import load_test_images, load_training
from vit.data.images import ImageSet
from vit.data.layout import join
from vit.data.sampling import balanced_batches, epoch_batches
from vit.distributed.world import World
from vit.evaluation import Evaluator, Setup, Validation
from vit.model.config import ModelConfig
from vit.model.variants import attention_of, is_edited, load_attention
from vit.model_file import save_model
from vit.pretrained.sources import resolve_pretrained
from vit.reporting.attention_logging import attention_logging
from vit.reporting.report import write_report
from vit.run.checkpoint import save_state
from vit.run.folder import EVAL_FOLDER, MODEL_FILE, prepare_run, unfinished_config, write_split
from vit.run.length import EpochEnds
from vit.run.tracker import Tracker
from vit.settings import changed_keys, flatten
from vit.training.build import build_step, deadline
from vit.training.flop import account
from vit.training.loop import Loop, evaluating
from vit.training.messages import end_text, start_text
from vit.training.start import Run, check_config, start_run
from vit.training.state import TrainState
from vit.training.step import TrainingStep

# What is measured and drawn during training: functions of a `Setup` that return an `Evaluator`, or
# None where there is nothing to do.
EVALUATORS: tuple[Callable[[Setup], Evaluator | None], ...] = (
    Validation,
    attention_logging,
)


RUNNING = threading.Lock()  # torch's random numbers and threads are those of the process


@torch.inference_mode(False)  # also turns gradients on, which a notebook may have turned off
def train(
    config: Config, overwrite: bool = False, allow_changes: bool = False, plans: Plans | None = None
) -> dict[str, Any] | None:
    """Train and evaluate a model, and write everything to the run folder `config.out`.

    An unfinished run with the same config is resumed. Under torchrun, the processes divide every
    batch among them and the first one writes. Otherwise there is one process; train.py starts one
    for each core of a CPU.

    Args:
        config: The run.
        overwrite: Whether to delete an existing run in the folder.
        allow_changes: Whether to resume an unfinished run with other learning rates, epochs,
            augmentation, device or number of processes; data and model must be the same.
        plans: Configs that take its place with `train.budget_minutes`, see `build_step`.

    Returns:
        The report on the test images, see `vit.evaluation.report`; None in all processes but the
        first.

    Raises:
        ValueError: The config or the data is invalid, the run folder is in use or holds something
            that must not be overwritten, another thread trains, or memory ran out.
        SystemExit: With code 128 + N after signal N, 3 if training diverged.
    """
    if overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        note("restarted by torchrun: going on without --overwrite")  # this run, from before
        overwrite = False
    stored = None if overwrite else unfinished_config(config)
    # Executes a file if the caller names one. A name in a run or a model file is only looked up
    # among the variants that were loaded.
    for each in (config, *(plans or {}).values()):
        load_attention(each.model.attention)
    config, source = resolve_pretrained(config, stored)
    plans = {n: replace(plan, train=config.train) for n, plan in (plans or {}).items()}
    # An unfinished run may follow a plan.
    before = to_dict(stored or config)
    config = min((config, *plans.values()), key=lambda c: len(changed_keys(before, to_dict(c))))
    for plan in plans.values():
        check_config(plan)
    with _alone(), start_run(config, source, overwrite, allow_changes) as run:
        training, held_out = load_data(run)
        run, step = build_step(run, training, source, len(held_out), plans)
        del source  # its weights are in the model
        if run.world.main:
            say(start_text(run.config, step, training, held_out))
            say_what_fails(run.config.model)
        with open_tracker(run, step.state) as tracker:
            if tracker is not None and run.checkpoint is None and training.fingerprint:
                write_split(run.config, training, held_out)
            loop = build_loop(run, step, training, held_out, tracker)
            loop.run()
            # In bfloat16, thresholds and results would differ from those of exports.
            classifier = replace(loop.classifier(), precision=torch.float32)
            if tracker is None:
                return None
            with evaluating():
                classifier = calibrate(classifier, held_out)
                return finish_run(run, classifier, step, tracker, training.fingerprint)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse to train while another thread does."""
    if not RUNNING.acquire(blocking=False):
        raise ValueError(
            "another thread of this process is training, and its random numbers would differ; "
            "train one run after the other, or in processes of their own"
        )
    try:
        yield
    finally:
        RUNNING.release()


def say_what_fails(model: ModelConfig) -> None:
    """Print which checks the attention fails, unless it is one that this package releases."""
    if model.name != "vit" or not is_edited(model.attention):
        return
    rows = check(attention_of(model.attention), with_cost=False)
    called = "can be called"  # which it can, as the run has called it
    failed = [r.property for r in rows if r.result == "failed" and r.property != called]
    if failed:
        hint = f"{program('eval')} {argument(model.attention)} check"
        say(f"attention fails: {', '.join(failed)}; see {hint}")


def load_data(run: Run) -> tuple[ImageSet, ImageSet]:
    """Load the training images and the held-out images, and move them to the device.

    ValueError if images are missing, or differ from those the run was started with.
    """
    config, checkpoint, world = run.config, run.checkpoint, run.world
    data = config.data
    sets: Sequence[ImageSet] = ()
    with world.main_first():
        if world.main:
            sets = load_training(
                data, config.train.seed, run.preprocess,
                run.preprocess.stored() if config.augment.crop == "resized" else None,
                check=checkpoint is None,  # once a run
                device=run.device,
            )  # fmt: skip
    training, held_out = share(sets, world)
    if checkpoint is not None:
        started = (*checkpoint.classes, checkpoint.num_images)
        same_files = checkpoint.fingerprint in ("", training.fingerprint)  # "" in old checkpoints
        if started != (*training.classes, len(training)) or not same_files:
            change = "files were added, deleted or renamed"
            if same_files and data.on_bad_image == "skip":
                change = "files that could be read then cannot be read now, or vice versa"
            raise ValueError(
                f"data.root: {data.root} does not contain the {checkpoint.num_images:,} training "
                f"images of the classes {join(checkpoint.classes)} with which the run in "
                f"{config.out} was started: {change}; restore them, point --data.root at "
                "them, or train in another folder with --out"
            )
    return training.to(run.device), held_out.to(run.device)


def share(sets: Sequence[ImageSet], world: World) -> Iterator[ImageSet]:
    """Yield the main process's sets in all processes, so that each file is decoded once."""
    # Pixels are not pickled, which would take several times their memory.
    shapes = [replace(images, images=images.images.to(torch.device("meta"))) for images in sets]
    for number, images in enumerate(world.agree(shapes)):
        pixels: Any = images.images
        if isinstance(pixels, Tensor):
            pixels = sets[number].images if world.main else torch.empty_like(pixels, device="cpu")
            pixels = world.share(pixels)
        yield replace(images, images=pixels)


@contextlib.contextmanager
def open_tracker(run: Run, state: TrainState) -> Iterator[Tracker | None]:
    """Prepare the folder and open the logs; yields None in all processes but the first."""
    if not run.world.main:
        yield None
        return
    folder = prepare_run(run.config, run.checkpoint is not None, state.step)
    with contextlib.closing(Tracker(folder, state.step)) as tracker:
        if state.step == 0:
            tracker.text("config", f"```yaml\n{yaml.safe_dump(to_dict(run.config))}```")
            tracker.text("model", f"```\n{state.model}\n```")
        yield tracker


def build_loop(
    run: Run, step: TrainingStep, training: ImageSet, held_out: ImageSet, tracker: Tracker | None
) -> Loop:
    """Build the loop: the step with evaluators, logging and checkpoints."""
    config, schedule = run.config, step.schedule
    setup = Setup(
        config, step.state.structure(), run.preprocess, training, held_out,
        EpochEnds(step.state.length, schedule.steps_per_epoch), step.state.length,
        schedule.image_size,
    )  # fmt: skip
    evaluators = [evaluator for make in EVALUATORS if (evaluator := make(setup)) is not None]
    began: dict[str, Any] = {
        "compiled": step.compiled, "steps_per_epoch": schedule.steps_per_epoch,
    }  # fmt: skip
    if step.teacher is not None:
        began["teacher"] = step.teacher.digest
    about: dict[str, Any] = {
        "config": to_dict(config), "preprocess": to_dict(step.preprocess),
        "classes": list(step.classes), "num_images": len(training),
        "fingerprint": training.fingerprint, "environment": {**run.environment(), **began},
    }  # fmt: skip
    # Expected until it is measured: classifying an image takes a third of training on it.
    seconds = step.state.length.seconds(0, 1) if step.state.length.costs else 0.0
    latest = {Validation.name: seconds / schedule.batch_size * len(held_out) / 3}
    draw = partial(epoch_batches, len(training))
    if config.data.balance == "sampler":
        draw = partial(balanced_batches, training.labels)
    return Loop(
        step, training, evaluators, tracker, draw=draw,
        write_checkpoint=partial(save_state, run.folder, step.state, about, run.world),
        stop=run.stop, log_every=config.track.every, max_skipped=config.train.max_skipped,
        deadline=deadline(config), latest=latest,
    )  # fmt: skip


def calibrate(classifier: Classifier, held_out: ImageSet) -> Classifier:
    """Return a classifier with its calibration on the held-out images, if there are any."""
    if not len(held_out):
        return classifier
    logits = classifier.logits(held_out).cpu()
    return replace(classifier, calibration=Calibration.fit(logits, held_out.labels.cpu()))


def finish_run(
    run: Run, classifier: Classifier, step: TrainingStep, tracker: Tracker, fingerprint: str
) -> dict[str, Any]:
    """Evaluate the finished model on the test images, and write the report and the model file."""
    config, folder, state = run.config, run.folder, step.state
    test = load_test_images(replace(config.data, download=False), classifier.preprocess)
    if test.classes != classifier.classes or (test.split and test.fingerprint != fingerprint):
        raise ValueError(
            f"data.root: files in {config.data.root} were added, deleted or renamed during "
            "training, so test images may have been trained on; restore them and rerun the command"
        )
    source = {"data": config.data.name, "root": config.data.root, "own": True}
    result = write_report(
        classifier, test, folder / EVAL_FOLDER, step=state.step, source=source,
        training=account(step, config.train.budget_minutes),
    )  # fmt: skip
    values = {f"test/{key}": result[key] for key in ("accuracy", "loss")}
    # A run killed here writes them again, as the same point.
    tracker.scalars(state.step, values, tensorboard_only=True)
    places = ("out", "data.root", "data.download", "data.memory_gb", "data.workers")
    settings = flatten(to_dict(config)).items()
    tracker.hyperparameters({key: value for key, value in settings if key not in places})
    tracker.flush()
    save_model(folder / MODEL_FILE, classifier, config, state.step, fingerprint)
    say(end_text(folder, result, classifier.has_maps, config.model.attention))
    return result
