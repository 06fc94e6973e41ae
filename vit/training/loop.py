"""The loop: epochs and steps, what is written on the way, and when it stops."""

import copy
import dataclasses
import math
import sys
import time
from collections import deque
from pathlib import Path

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from vit.checkpoint import save_checkpoint
from vit.config import Config, to_dict
from vit.console import say, warn
from vit.data.augment import augment, shrink
from vit.data.batches import epoch_batches, steps_per_epoch
from vit.data.datasets import ImageSet, normalization
from vit.evaluation import evaluate
from vit.reporting.attention_logging import Follower
from vit.seeding import fold_in, generator
from vit.tracking import Tracker, milestones
from vit.training.distributed import World
from vit.training.memory import measure_step
from vit.training.messages import clock, diverged_text
from vit.training.optim import set_lr
from vit.training.plan import make_plan
from vit.training.state import TrainState, train_step
from vit.training.stopping import Stopped, StopRequest

BUDGET_SHARE = 0.96  # of a time budget that is for steps; the rest is for looking
LOSSES = 30  # of the last steps, to be shown when a run diverges
WARM_STEPS, TRIAL_STEPS = 10, 20  # by which the length of a run is set to its budget


class Diverged(Exception):
    """Training has come to numbers that are not finite, and would not come back."""


class Loop:
    """Takes a state through the epochs that are left, writing curves, pictures and checkpoints.

    Args:
        config: The run.
        state: Where it stands; is changed in place.
        training: Images to train on.
        held_out: Images for the curves; may be empty.
        device: Where to compute; the images are moved there.
        precision: Of matrix products.
        world: The processes that train together, each on its part of every batch.

    Attributes:
        save_error: Why the last checkpoint could not be written; None where it was.

    Raises:
        ValueError: There are fewer images than a batch has, a batch cannot be shared out, or needs
            more memory than is free.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        training: ImageSet,
        held_out: ImageSet,
        device: torch.device,
        precision: torch.dtype,
        world: World = World(),  # noqa: B008
    ) -> None:
        parts = config.train.accumulate * world.size  # of a batch, that are computed on their own
        if config.train.batch_size % parts:
            raise ValueError(
                f"train.batch_size: {config.train.batch_size} cannot be shared by {world.size} "
                f"processes with train.accumulate={config.train.accumulate}; "
                f"it must be a multiple of {parts}"
            )
        if config.model.stem == "conv" and config.train.batch_size == parts:
            raise ValueError(
                f"train.batch_size: {config.train.batch_size} in {parts} parts (train.accumulate, "
                "processes) is one image at a time; the batch norm of model.stem=conv needs two"
            )
        self.config, self.state, self.world = config, state, world
        images = config.train.batch_size // parts
        self.memory = measure_step(state.model, images, device, precision)
        self.memory.require()
        self.training, self.held_out = training.to(device), held_out.to(device)
        self.one_hot = torch.eye(len(training.classes), device=device)
        self.device, self.precision = device, precision
        self.mean, self.std = normalization(config.data.name, device)
        self.plan = make_plan(config, 0, steps_per_epoch(len(training), config.train.batch_size))
        self.milestones: list[int] = []
        self.save_error: OSError | None = None
        self._losses: deque[Tensor] = deque(maxlen=LOSSES)
        self._since = 0.0  # the time up to which state.seconds has counted
        # Each process draws for itself; the first as it would alone.
        seed = config.train.seed
        self.draws = fold_in(seed, "rank", world.rank) if world.rank else seed
        # Both image sizes are compiled on their own, so that the grid is a plain number.
        compile_ = config.train.compile
        self.forward = torch.compile(state.model, dynamic=False) if compile_ else state.model
        self.follower = Follower(
            Path(config.out), held_out if len(held_out) else training, config.track.probes,
            self.mean, self.std, precision, seed,
        )  # fmt: skip

    def count_steps(self) -> None:
        """Fix the length of the run, unless a time budget fixed it before the run was resumed.

        With a time budget trial steps are timed and undone; they count as training time.

        Raises:
            ValueError: A resumed run has made more steps already.
        """
        state, train = self.state, self.config.train
        if train.budget_minutes is None:
            state.total_steps = train.epochs * self.plan.steps_per_epoch
        elif state.total_steps == 0:
            self._fit_into(60 * train.budget_minutes)
        if state.step > state.total_steps:
            raise ValueError(
                f"train.epochs: {train.epochs} are {state.total_steps:,} steps, and the run in "
                f"{self.config.out} has made {state.step:,} already; it must be more"
            )
        self.plan = dataclasses.replace(self.plan, total_steps=state.total_steps)
        self.milestones = milestones(state.total_steps)

    def _fit_into(self, budget: float) -> None:
        """Count the steps that fit into a budget of seconds."""
        start = time.perf_counter()
        fresh = copy.deepcopy(self.state.state_dict())
        seconds_per_step = self.world.agree(self._time_steps())
        self.state.load_state_dict(fresh)
        self.state.seconds = self.world.agree(time.perf_counter() - start)
        left = BUDGET_SHARE * budget - self.state.seconds
        self.state.total_steps = max(1, int(left / seconds_per_step))

    def _time_steps(self) -> float:
        """Train for some steps of each image size and return the mean seconds of a run's step."""
        count, train = len(self.training), self.config.train
        draw = generator(train.seed, "trial")
        seconds = 0.0
        for size, share in self.plan.stages():
            for steps in (WARM_STEPS, TRIAL_STEPS):
                begin = time.perf_counter()
                for _ in range(steps):
                    batch = torch.randint(count, (train.batch_size,), generator=draw)
                    self._train_batch(batch.to(self.device), 0.1, size)[0].item()
            seconds += share * (time.perf_counter() - begin) / TRIAL_STEPS
        return seconds

    def run(self, tracker: Tracker | None, stop: StopRequest) -> None:
        """Train to the end; a checkpoint is written after each epoch.

        Args:
            tracker: Where curves and pictures go; None in all processes but the main one.
            stop: Is asked after each step.

        Raises:
            Stopped: It was asked to stop; what is there is saved.
            Diverged: Loss or gradient were not finite for too many steps, or weights are not.
        """
        state, plan = self.state, self.plan
        if tracker is not None and state.step == 0:
            tracker.text("config", f"```yaml\n{yaml.safe_dump(to_dict(self.config))}```")
            tracker.text("model", f"```\n{state.model}\n```")
            self._look(tracker)
        self._since = time.perf_counter()
        with tqdm(
            total=plan.total_steps, initial=state.step, unit="step", dynamic_ncols=True,
            disable=tracker is None or not sys.stderr.isatty(),
        ) as bar, stop.deferred():  # fmt: skip
            while state.step < plan.total_steps:
                begin, first = time.perf_counter(), state.step
                self._train_epoch(tracker, bar, stop)
                images = (state.step - first) * self.config.train.batch_size
                speed = images / (time.perf_counter() - begin)
                if tracker is not None:
                    self._end_epoch(tracker, bar, speed)
                if stop.agreed(self.world):
                    raise Stopped

    def _train_epoch(self, tracker: Tracker | None, bar: tqdm, stop: StopRequest) -> None:
        """Train on every image once, or on those that are left of an epoch, or of the run."""
        config, state, plan = self.config, self.state, self.plan
        epoch, done = divmod(state.step, plan.steps_per_epoch)
        batches = epoch_batches(
            len(self.training), config.train.batch_size, config.train.seed, epoch
        ).to(self.device)
        batches = batches[: plan.total_steps - epoch * plan.steps_per_epoch]
        if done == 0 or len(state.points) != done:  # a new epoch, or a batch of another size
            state.points.clear()
        logged, since = done, time.perf_counter()
        for number, batch in enumerate(batches[done:], start=done + 1):
            step = state.step
            point = self._train_batch(batch, plan.lr_share(step), plan.image_size(step))
            state.points.append(point)
            self._losses.append(point[0])
            if state.skipped_in_a_row >= config.train.max_skipped:
                raise self._diverged("loss or gradient")
            bar.update()
            last = number == len(batches)
            if tracker is not None:
                if number % config.track.every == 0 or last:
                    images = config.train.batch_size * (number - logged)
                    self._log(tracker, bar, images / (time.perf_counter() - since))
                    logged, since = number, time.perf_counter()
                if state.step in self.milestones:
                    pause = time.perf_counter()
                    self._look(tracker)
                    since += time.perf_counter() - pause
            if not last and stop.agreed(self.world):
                self._save(tracker)
                raise Stopped

    def _log(self, tracker: Tracker, bar: tqdm, speed: float) -> None:
        """Write the means over the steps since the last point of the curves."""
        state = self.state
        every = self.config.track.every
        start = (len(state.points) - 1) // every * every
        loss, accuracy = _mean(state.points[start:])
        rate = state.optimizers[0].param_groups[0]["lr"]
        values = {"train/loss": loss, "train/accuracy": accuracy, "train/lr": rate}
        if state.skipped:
            values["train/skipped_steps"] = state.skipped
        values = {tag: value for tag, value in values.items() if math.isfinite(value)}
        tracker.scalars(state.step, values)
        tracker.aside(state.step, {"train/images_per_second": speed})
        bar.set_postfix_str(
            f"loss {loss:.3f}  acc {accuracy:.1%}  lr {rate:.2g}  {speed:,.0f} images/s"
        )

    def _end_epoch(self, tracker: Tracker, bar: tqdm, speed: float) -> None:
        """Evaluate on the held-out images, say how it goes, and save."""
        state, plan = self.state, self.plan
        validation = self._validate(tracker)
        self._save(tracker)
        loss, accuracy = _mean(state.points)
        left = state.seconds * (plan.work(plan.total_steps) / plan.work(state.step) - 1)
        say(
            f"epoch {-(-state.step // plan.steps_per_epoch):>3}/{plan.epochs}   loss {loss:.4f}   "
            f"training {accuracy:6.2%}   held out {validation}   {speed:,.0f} images/s   "
            f"{clock(state.seconds)}, {clock(left)} left"
        )

    def _train_batch(self, batch: Tensor, share: float, size: int) -> Tensor:
        """Learn the images at `batch` (B,), of a size, with a share of the peak rates."""
        config, state = self.config, self.state
        images, targets = self._augmented(self.world.part(batch), size)
        torch.manual_seed(fold_in(self.draws, "dropout", state.step))
        set_lr(state.optimizers, share)
        with self.memory.explained():
            return train_step(
                state, self.forward, images, targets, precision=self.precision,
                label_smoothing=config.optim.label_smoothing, clip_grad=config.optim.clip_grad,
                accumulate=config.train.accumulate, world=self.world,
            )  # fmt: skip

    def _augmented(self, batch: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Gather the images at `batch` (B,), and their classes one-hot; augment, shrink them."""
        settings = {k: v for k, v in vars(self.config.augment).items() if k != "mix_share"}
        if not self.plan.mixes(self.state.step):
            settings |= {"mixup": 0.0, "cutmix": 0.0}
        images, targets = augment(
            self.training.images[batch], self.one_hot[self.training.labels[batch]],
            self.mean, self.std,
            generator(self.draws, "augment", self.state.step, device=self.device),
            **settings,
        )  # fmt: skip
        return shrink(images, size), targets

    def _validate(self, tracker: Tracker) -> str:
        """Evaluate on the held-out images; return their accuracy as text."""
        if len(self.held_out) == 0:
            return "none"
        held = self.held_out
        result, _ = evaluate(
            self.state.evaluated(), held.images, held.labels, held.classes, self.mean, self.std,
            self.precision,
        )  # fmt: skip
        values = {"val/loss": result["loss"], "val/accuracy": result["accuracy"]}
        tracker.scalars(self.state.step, values)
        return f"{result['accuracy']:6.2%}"

    def _look(self, tracker: Tracker) -> None:
        """Look at the attention; a full disk is no reason to lose the run."""
        try:
            self.follower.look(self.state.evaluated(), tracker, self.state.step)
        except OSError as error:
            warn(f"the maps of step {self.state.step} are not kept: {error}")

    def _save(self, tracker: Tracker | None) -> None:
        """Write a checkpoint; if that fails the run goes on, and tries again at the next."""
        state, now = self.state, time.perf_counter()
        state.seconds, self._since = state.seconds + now - self._since, now
        if not state.is_finite():
            raise self._diverged("weights")
        if tracker is None:
            return
        content = state.state_dict()
        content |= {
            "config": to_dict(self.config), "classes": list(self.training.classes),
            "num_images": len(self.training), "processes": self.world.size,
            "device": self.device.type, "precision": str(self.precision),
        }  # fmt: skip
        try:
            tracker.flush()  # first, so that a checkpoint is never ahead of the curves
            save_checkpoint(Path(self.config.out), state.step, content)
            self.save_error = None
        except OSError as error:
            self.save_error = error
            warn(
                f"the checkpoint of step {state.step} could not be written ({error}); "
                "the one before is kept, and training goes on"
            )

    def _diverged(self, what: str) -> Diverged:
        losses = [loss.item() for loss in self._losses]
        return Diverged(diverged_text(self.state, what, losses))


def _mean(points: list[Tensor]) -> tuple[float, float]:
    """Average loss and accuracy over the steps that were not skipped; NaN if there is none."""
    loss, accuracy = torch.stack(points).nanmean(dim=0).tolist()
    return loss, accuracy
