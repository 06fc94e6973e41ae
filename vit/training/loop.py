"""The training loop: epochs and steps, with logging, evaluation and checkpoints in between."""

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.console import say, warn
from vit.data.images import ImageSet
from vit.data.sampling import balanced_batches, epoch_batches
from vit.distributed.stop import Diverged, Stopped, StopRequest
from vit.evaluation import Evaluator
from vit.hardware import cores_of_all_processes
from vit.run.saver import Saver
from vit.run.tracker import Tracker
from vit.training.compile import eagerly
from vit.training.messages import clock, diverged_text
from vit.training.step import TrainingStep

LOSSES = 30  # number of recent losses shown when a run diverges


@dataclass
class Loop:
    """Trains to the end of the schedule, logging, evaluating and saving on the way.

    Attributes:
        step: The training step, with the state and the schedule.
        training: The training images; in memory, they are on the device.
        evaluators: What to measure and draw; each knows the steps after which it runs.
        tracker: Logs numbers, pictures and summaries; None in all processes but the main one.
        saver: Writes a checkpoint after each epoch and when stopping.
        stop: Asked after each step whether a signal has arrived.
        log_every: Steps between two points of the training curves.
        max_skipped: Consecutive skipped steps after which the run gives up.
        balanced: Whether every class is drawn equally often.
        save_error: Why the latest checkpoint could not be written, or None.
    """

    step: TrainingStep
    training: ImageSet
    evaluators: Sequence[Evaluator]
    tracker: Tracker | None
    saver: Saver
    stop: StopRequest
    log_every: int
    max_skipped: int
    balanced: bool = False
    save_error: OSError | None = None
    _losses: deque[Tensor] = field(default_factory=lambda: deque(maxlen=LOSSES))
    _since: float = 0.0  # time up to which state.seconds has counted
    _began: tuple[float, float] = (0.0, 0.0)  # seconds and work of the run at the first step here
    _spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # in seconds

    def run(self) -> None:
        """Train to the end, saving a checkpoint after each epoch.

        Raises:
            Stopped: A signal asked the run to stop; everything is saved.
            Diverged: Too many consecutive steps were skipped, or weights are not finite.
        """
        state, schedule, world = self.step.state, self.step.schedule, self.step.world
        start = time.perf_counter()
        if state.step == 0:
            self.evaluate()
        self._since = time.perf_counter()
        self._began = state.seconds, schedule.work(state.step)
        try:
            with tqdm(
                total=schedule.total_steps, initial=state.step, unit="step", dynamic_ncols=True,
                disable=self.tracker is None or not sys.stderr.isatty(),
                # Without tqdm's rate, which counts evaluation and logging as training.
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            ) as bar, self.stop.deferred():  # fmt: skip
                while state.step < schedule.total_steps:
                    before = state.step
                    with world.activity.doing("computing"):
                        measured = self._train_epoch(bar)
                    images = schedule.batch_size * (state.step - before)
                    speed = images / world.activity.training_seconds()
                    self._save()
                    if self.tracker is not None:
                        say(self._epoch_text(measured.get("val/accuracy"), speed))
                    if self.stop.agreed(world):
                        raise Stopped
                if state.skipped == state.step:  # no step counted, of fewer than max_skipped
                    raise self._diverged("loss or gradient")
        finally:
            self._write(self.saver.wait)
        if self.tracker is not None and self._spent:
            parts = ", ".join(f"{name} took {took:.1f} s" for name, took in self._spent.items())
            say(f"{parts} of {time.perf_counter() - start:.1f} s")

    def classifier(self) -> Classifier:
        """Return the current model (its moving average, if enabled) as a Classifier.

        If the model is sharded, all processes have to call this, and only the first one can use it.
        """
        step, device = self.step, self.training.device
        model = step.state.evaluated().to(device)
        return Classifier(model, step.preprocess, step.classes, device, step.precision)

    def _train_epoch(self, bar: "tqdm[NoReturn]") -> dict[str, float]:
        """Train to the end of the epoch or of the run.

        Returns:
            Numbers that the evaluators measured after the last step, by tag.
        """
        state, schedule, world = self.step.state, self.step.schedule, self.step.world
        activity = world.activity
        epoch, done = divmod(state.step, schedule.steps_per_epoch)
        training, seed = self.training, self.step.seed
        shape = schedule.steps_per_epoch, schedule.batch_size
        if self.balanced:
            batches = balanced_batches(training.labels, shape, seed, epoch)
        else:
            batches = epoch_batches(len(training), shape, seed, epoch)
        batches = batches[: schedule.total_steps - epoch * schedule.steps_per_epoch]
        if done == 0 or len(state.points) != done:  # a new epoch, or the batch size has changed
            state.points.clear()
        logged, since = done, 0.0
        measured: dict[str, float] = {}
        activity.start()
        activity.step = state.step
        parts = self.step.inputs(training).batches(world.part(batches[done:].T).T)
        for number, (images, labels) in enumerate(activity.reading(parts), start=done + 1):
            point = self.step(images, labels)
            activity.step = state.step
            state.points.append(point)
            self._losses.append(point[0])
            if state.skipped_in_a_row >= self.max_skipped:
                raise self._diverged("loss or gradient")
            bar.update()
            last = number == len(batches)
            with activity.doing("not training"):
                if number % self.log_every == 0 or last:
                    seconds = activity.training_seconds()
                    self._log(bar, schedule.batch_size * (number - logged) / (seconds - since))
                    logged, since = number, seconds
                measured = self.evaluate()
            if not last and self.stop.agreed(world):
                self._save()
                raise Stopped
        return measured

    def _log(self, bar: "tqdm[NoReturn]", speed: float) -> None:
        """Log the means over the steps since the last point of the training curves."""
        if self.tracker is None:
            return
        state = self.step.state
        start = (len(state.points) - 1) // self.log_every * self.log_every
        loss, accuracy = _mean(state.points[start:])
        rate = state.optimizers[0].param_groups[0]["lr"]
        values = {"train/loss": loss, "train/accuracy": accuracy, "train/lr": rate}
        if state.skipped:
            values["train/skipped_steps"] = state.skipped
        values = {tag: value for tag, value in values.items() if math.isfinite(value)}
        self.tracker.scalars(state.step, values)
        self.tracker.scalars(state.step, {"train/images_per_second": speed}, tensorboard_only=True)
        bar.set_postfix_str(
            f"loss {loss:.3f}  acc {accuracy:.1%}  lr {rate:.2g}  {speed:,.0f} images/s"
        )

    def evaluate(self) -> dict[str, float]:
        """Run the evaluators that are due at this step; return the numbers they measured."""
        step, numbers = self.step.state.step, dict[str, float]()
        due = [evaluator for evaluator in self.evaluators if step in evaluator.steps]
        if not due:
            return {}
        classifier = self.classifier()
        if self.tracker is not None:
            with cores_of_all_processes(), eagerly():
                for evaluator in due:
                    numbers |= self._evaluated(self.tracker, evaluator, classifier)
            if numbers:
                self.tracker.scalars(step, numbers)
        self.step.world.agree(None)  # so that the others do not seem to compute while they wait
        return numbers

    def _evaluated(
        self, tracker: Tracker, evaluator: Evaluator, classifier: Classifier
    ) -> dict[str, float]:
        """Run an evaluator, log its pictures and summaries, and return its numbers."""
        step, start, numbers = self.step.state.step, time.perf_counter(), dict[str, float]()
        try:
            for tag, value in evaluator.run(classifier, step):
                if isinstance(value, Summary):
                    tracker.summary(step, value)
                elif isinstance(value, np.ndarray) and value.ndim == 3:
                    tracker.picture(step, tag, value)
                else:
                    numbers[tag] = float(value)
        except OSError as error:  # a full disk must not end the run
            warn(f"{evaluator.name} at step {step} is incomplete: {error}")
        self._spent[evaluator.name] += time.perf_counter() - start
        return numbers

    def _save(self) -> None:
        """Save a checkpoint; if that fails, training continues and the next save tries again."""
        state, now = self.step.state, time.perf_counter()
        state.seconds, self._since = state.seconds + now - self._since, now
        self._write(self.saver.wait)
        self.save_error = None
        if self.tracker is not None:
            # Before the checkpoint, which must never be ahead of the curves.
            self._write(self.tracker.flush, f"the curves up to step {state.step}")
        problems = torch.tensor([not state.is_finite(), self.save_error is not None]).float()
        diverged, failed = self.step.world.largest(problems).tolist()
        if diverged:
            raise self._diverged("weights")
        if not failed:
            self._write(self.saver.save)

    def _write(self, write: Callable[[], None], what: str = "") -> None:
        try:
            write()
        except OSError as error:
            self.save_error = error
            if self.tracker is not None:  # in the other processes, the error may be the same
                what = what or f"the checkpoint of step {self.saver.step}"
                warn(
                    f"could not write {what} ({error}); keeping the previous checkpoint and "
                    "continuing"
                )

    def _epoch_text(self, val_accuracy: float | None, speed: float) -> str:
        state, schedule = self.step.state, self.step.schedule
        loss, accuracy = _mean(state.points)
        work = schedule.work(state.step)
        pace = (state.seconds - self._began[0]) / (work - self._began[1])
        left = pace * (schedule.work(schedule.total_steps) - work)
        validation = "" if val_accuracy is None else f"   validation {val_accuracy:6.2%}"
        return (
            f"epoch {-(-state.step // schedule.steps_per_epoch):>3}/{schedule.epochs}   "
            f"loss {loss:.4f}   training {accuracy:6.2%}{validation}   {speed:,.0f} images/s   "
            f"{clock(state.seconds)}, {clock(left)} left"
        )

    def _diverged(self, what: str) -> Diverged:
        losses = [loss.item() for loss in self._losses]
        return Diverged(diverged_text(self.step.state, what, losses))


def _mean(points: list[Tensor]) -> tuple[float, float]:
    """Average loss and accuracy over the steps that were not skipped; NaN if there are none."""
    loss, accuracy = torch.stack(points).nanmean(dim=0).tolist()
    return loss, accuracy
