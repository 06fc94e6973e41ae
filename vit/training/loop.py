"""The training loop: epochs and steps, with logging, evaluation and checkpoints in between."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.console import note, say, warn
from vit.data.images import ImageSet
from vit.distributed.world import Diverged, Stopped, StopRequest
from vit.evaluation import Evaluator
from vit.hardware import local_processes, on_cores
from vit.run.tracker import Tracker
from vit.training.messages import clock, diverged_text
from vit.training.step import TrainingStep

MOST_STEPS = 10**9  # that a run with a time budget may still have to make


@contextlib.contextmanager
def evaluating() -> Iterator[None]:
    """Evaluate on the cores of all processes, while the others wait, and compile nothing."""
    cores = torch.get_num_threads() * local_processes()
    # Batches of evaluators have other sizes, and torch gives up compiling after a few.
    with on_cores(cores), torch.compiler.set_stance("force_eager"):
        yield


@dataclass
class Loop:
    """Trains to the end of the schedule, logging, evaluating and saving on the way."""

    step: TrainingStep  # with the state and the schedule
    training: ImageSet  # in memory, they are on the device
    evaluators: Sequence[Evaluator]  # each knows the steps after which it runs
    tracker: Tracker | None  # None in all processes but the main one
    write_checkpoint: Callable[[], None]  # called after each epoch and when stopping
    stop: StopRequest  # asked after each step whether a signal has arrived
    draw: Callable[[tuple[int, int], int, int], Tensor]  # draws an epoch, as `epoch_batches` does
    log_every: int  # steps between two points of the training curves
    max_skipped: int  # consecutive skipped steps after which the run gives up
    deadline: float | None = None  # seconds of training by which to end; None without a budget
    # Seconds of the latest run of each evaluator, or what is expected of the first.
    latest: dict[str, float] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by evaluator
    _since: float = 0.0  # time up to which state.seconds has counted
    # Step and seconds at which the length of the run was chosen last. A resumed run compiles first,
    # so its next tenth says nothing.
    _chosen: tuple[int, float] | None = None

    def run(self) -> None:
        """Train to the end, saving a checkpoint after each epoch.

        Raises:
            Stopped: A signal asked the run to stop; everything is saved.
            Diverged: Too many consecutive steps were skipped, or weights are not finite.
        """
        state, schedule, world = self.step.state, self.step.schedule, self.step.world
        self._since, first = time.perf_counter(), state.step
        if first == 0:
            self.evaluate()
            self._chosen = 0, self._seconds()
        before = self._seconds()
        with tqdm(
            total=schedule.total_steps, initial=first, unit="step", dynamic_ncols=True,
            disable=True if self.tracker is None else None,  # None shows the bar on terminals only
            # Without tqdm's rate, which counts evaluation and logging as training.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        ) as bar, self.stop.deferred():  # fmt: skip
            if state.unevaluated:
                self.evaluate()
                self._save()
                if self.stop.agreed(world):
                    raise Stopped
            while state.step < schedule.total_steps:
                text = self._train_epoch(bar)
                if state.step:
                    self._save()
                if text and self.tracker is not None:
                    pace = (state.seconds - before) / (state.step - first)
                    left = clock(pace * (schedule.total_steps - state.step))
                    say(f"{text}   {clock(state.seconds)}, {left} left")
                if self.stop.agreed(world):
                    raise Stopped
            if state.skipped == state.step:  # no step counted, of fewer than max_skipped
                raise Diverged(diverged_text(state, "loss or gradient"))
        if self._spent:  # in the main process
            say(", ".join(f"{name} took {spent:.1f} s" for name, spent in self._spent.items()))

    def classifier(self) -> Classifier:
        """Return the current model, or its moving average; called by all processes if sharded."""
        step, device = self.step, self.training.device
        model = step.state.evaluated().to(device)
        return Classifier(model, step.preprocess, step.classes, device, step.precision)

    def _train_epoch(self, bar: "tqdm[NoReturn]") -> str:
        """Train to the end of the epoch or of the run; return what to print, "" if interrupted."""
        state, schedule, world = self.step.state, self.step.schedule, self.step.world
        epoch, first = divmod(state.step, schedule.steps_per_epoch)
        shape = schedule.steps_per_epoch, schedule.batch_size
        batches = self.draw(shape, self.step.seed, epoch)[: schedule.steps_in(epoch)]
        if first == 0:  # a new epoch
            state.points.clear()
        number, logged, busy_before = first, first, 0.0
        busy, resumed = 0.0, time.perf_counter()  # seconds without logging and evaluation
        parts = self.step.batches(self.training, batches[first:])
        for number, batch in enumerate(self.stop.until(parts, world), start=first + 1):
            state.points.append(self.step(*batch))
            if state.skipped_in_a_row >= self.max_skipped:
                raise Diverged(diverged_text(state, "loss or gradient"))
            bar.update()
            paused = time.perf_counter()
            busy += paused - resumed
            if number % self.log_every == 0 or number == len(batches):
                self._log(bar, schedule.batch_size * (number - logged) / (busy - busy_before))
                logged, busy_before = number, busy
            measured = self.evaluate()
            self._keep_budget(bar)
            if number < len(batches) != schedule.steps_in(epoch):
                break  # the run ends elsewhere in this epoch, which goes on with other batches
            resumed = time.perf_counter()
        if number < len(batches) or state.unevaluated:
            return ""
        loss, accuracy = torch.stack(state.points).nanmean(dim=0).tolist()  # of steps not skipped
        speed = schedule.batch_size * (len(batches) - first) / busy
        text = f"loss {loss:.4f}   training {accuracy:6.2%}"
        if "val/accuracy" in measured:
            text += f"   validation {measured['val/accuracy']:6.2%}"
        return f"epoch {epoch + 1:>3}/{schedule.epochs}   {text}   {speed:,.0f} images/s"

    def _seconds(self) -> float:
        """Return the seconds of training until now."""
        return self.step.state.seconds + time.perf_counter() - self._since

    def _keep_budget(self, bar: "tqdm[NoReturn]") -> None:
        """After a tenth of the run, choose its length again, from the time that the tenth took."""
        step, length = self.step.state.step, self.step.state.length
        done, before = length.done(step), length.done(step - 1)
        if self.deadline is None or not length.costs or step >= length.total_steps:
            return
        if int(10 * done) == int(10 * before):
            return
        now, chosen = self._seconds(), self._chosen
        self._chosen = step, now
        if chosen is None:
            return
        first, began = chosen
        expected = (step - first) * length.seconds(length.done(first), done)
        left = self.deadline - now - sum(self.latest.values())  # all run again after the last step
        left = left / length.seconds(done, 1) * expected / (now - began)
        length.change(step, self.step.world.agree(step + int(min(max(1, left), MOST_STEPS))))
        bar.total = length.total_steps

    def _log(self, bar: "tqdm[NoReturn]", speed: float) -> None:
        """Log the means over the steps since the last point of the training curves."""
        if self.tracker is None:
            return
        state = self.step.state
        start = (len(state.points) - 1) // self.log_every * self.log_every
        loss, accuracy = torch.stack(state.points[start:]).nanmean(dim=0).tolist()
        rate = state.optimizers[0].param_groups[0]["lr"]
        values = {"train/loss": loss, "train/accuracy": accuracy, "train/lr": rate}
        if state.skipped:
            values["train/skipped_steps"] = state.skipped
        self.tracker.scalars(state.step, {k: v for k, v in values.items() if math.isfinite(v)})
        self.tracker.scalars(state.step, {"train/images_per_second": speed}, tensorboard_only=True)
        text = f"loss {loss:.3f}  acc {accuracy:.1%}  lr {rate:.2g}  {speed:,.0f} images/s"
        bar.set_postfix_str(text)

    def evaluate(self) -> dict[str, float]:
        """Run the evaluators that are due at this step; return the numbers they measured.

        A signal interrupts it, because its sender may not wait; the resumed run repeats it. So
        evaluators must not change the model, even for a moment.
        """
        state, numbers = self.step.state, dict[str, float]()
        state.unevaluated = False
        due = [evaluator for evaluator in self.evaluators if state.step in evaluator.steps]
        if not due:
            return {}
        classifier = self.classifier()  # in all processes
        if self.tracker is None:
            return {}
        try:
            with evaluating(), self.stop.immediate():
                for evaluator in due:
                    numbers |= self._measure(evaluator, classifier, self.tracker)
        except Stopped:
            if not state.step:  # there is nothing to save
                raise
            note("evaluation interrupted; it will be repeated when the run is resumed")
            state.unevaluated = True
            return {}
        if numbers:
            self.tracker.scalars(state.step, numbers)
        return numbers

    def _measure(
        self, evaluator: Evaluator, classifier: Classifier, tracker: Tracker
    ) -> dict[str, float]:
        """Run an evaluator, log what it draws, and return the numbers."""
        step, begin, numbers = self.step.state.step, time.perf_counter(), dict[str, float]()
        try:
            for tag, value in evaluator.run(classifier, step):
                if isinstance(value, Summary) or np.ndim(value) == 3:
                    tracker.show(step, tag, value)
                else:
                    numbers[tag] = float(value)
        except OSError as error:  # a full disk must not end the run
            warn(f"{evaluator.name} at step {step} is incomplete: {error}")
        self.latest[evaluator.name] = time.perf_counter() - begin
        self._spent[evaluator.name] += self.latest[evaluator.name]
        return numbers

    def _save(self) -> None:
        """Save curves and a checkpoint; a failure becomes a warning, and the next call retries."""
        state, now = self.step.state, time.perf_counter()
        state.seconds, self._since = state.seconds + now - self._since, now
        # Curves come first: a checkpoint must never be ahead of them.
        failed = self.tracker is not None and not self._write("the curves", self.tracker.flush)
        problems = torch.tensor([not state.is_finite(), failed]).float()
        diverged, failed = map(bool, self.step.world.largest(problems))
        if diverged:
            raise Diverged(diverged_text(state, "weights"))
        if not failed:
            self._write("the checkpoint", self.write_checkpoint)

    def _write(self, name: str, write: Callable[[], None]) -> bool:
        """Write something; return whether that succeeded."""
        try:
            write()
        except OSError as error:
            at = f"{name} of step {self.step.state.step} ({error})"
            warn(f"could not write {at}; keeping the previous checkpoint and continuing")
            return False
        return True
