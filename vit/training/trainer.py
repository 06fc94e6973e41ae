"""Training: from a config to a finished run folder.

A run is a function of its config: every random draw is made from the seed and the step. On a CPU,
with the same number of threads, a run that is interrupted and resumed is bit for bit the run that
was not; on a GPU up to the order in which its kernels add.
"""

import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from tqdm import tqdm

from vit.config import IMAGE_SIZE, Config, flatten, to_dict
from vit.data.augment import augment, normalize, shrink
from vit.data.batches import epoch_batches, steps_per_epoch
from vit.data.datasets import ImageSet, load, load_training, normalization
from vit.evaluation import evaluate
from vit.following import Follower
from vit.reporting.report import write_report
from vit.seeding import fold_in, generator
from vit.tracking import Tracker, milestones
from vit.training.checkpoint import MODEL_FILE, save_checkpoint, save_model
from vit.training.hardware import choose_device, choose_precision
from vit.training.messages import clock, end_text, start_text
from vit.training.optim import lr_at, set_lr
from vit.training.run import EVAL_FOLDER, check_run, prepare_run
from vit.training.state import TrainState, build_state, train_step

BUDGET_SHARE = 0.96  # of a time budget that is for steps; the rest is for looking
WHITENED = 500  # training images by whose patches the stem is whitened
WARM_STEPS, TRIAL_STEPS = 10, 20  # by which the length of a run is set to its budget


def train(config: Config, overwrite: bool = False) -> dict[str, Any]:
    """Train, evaluate and explain a model; leave everything in the run folder `config.out`.

    An unfinished run with the same config is resumed.

    Args:
        config: The run.
        overwrite: Whether a run that is in the folder already may be deleted.

    Returns:
        The report on the test images, see `vit.evaluation.report`.

    Raises:
        ValueError: Something in the config, the data or the run folder does not allow the run.
    """
    checkpoint = check_run(config, overwrite)
    device = choose_device(config.train.device)
    precision = choose_precision(config.train.precision, device)
    data = config.data
    training, held_out = load_training(
        data.name, data.root, data.download, data.train_size, data.val_size, config.train.seed
    )
    sample = None
    if config.train.whiten and checkpoint is None:  # a checkpoint has its own kernels
        sample = training.images[:WHITENED]
        sample = normalize(sample, *normalization(data.name, sample.device))
    state = build_state(config, len(training.classes), device, sample)
    trainer = Trainer(config, state, training, held_out, device, precision)
    if checkpoint is not None:
        state.load_state_dict(checkpoint)
    trainer.plan()
    run = prepare_run(config, resume=checkpoint is not None)
    print(
        start_text(
            config, state, len(training), len(held_out), trainer.steps_per_epoch, device, precision
        ),
        flush=True,
    )
    tracker = Tracker(run, state.step)
    try:
        trainer.fit(tracker)
        test = load(data.name, data.root, train=False, download=False)
        result = write_report(
            state.evaluated(), test, data.name, run / EVAL_FOLDER, step=state.step,
            device=device, precision=precision, probes=config.track.probes,
        )  # fmt: skip
        write_hyperparameters(tracker, config, state.step, result)
    except KeyboardInterrupt:
        done = state.step // trainer.steps_per_epoch
        print(f"\ninterrupted: the same command goes on after epoch {done}", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        tracker.close()
    save_model(run / MODEL_FILE, state.evaluated(), config, training.classes, state.step)
    print(end_text(run, result, state.seconds))
    return result


def write_hyperparameters(
    tracker: Tracker, config: Config, step: int, result: dict[str, Any]
) -> None:
    """Enter a finished run into TensorBoard's HParams table."""
    values = {f"test/{key}": result[key] for key in ("accuracy", "loss")}
    tracker.results(step, values)
    metrics = [*values, *(["val/accuracy"] if config.data.val_size else [])]
    settings = flatten(to_dict(config))
    places = ("out", "data.root", "data.download")
    tracker.hyperparameters({k: v for k, v in settings.items() if k not in places}, metrics)


class Trainer:
    """Takes a state through the epochs that are left, writing curves, pictures and checkpoints.

    Args:
        config: The run.
        state: Where it stands; is changed in place.
        training: Images to train on.
        held_out: Images for the curves; may be empty.
        device: Where to compute; the images are moved there.
        precision: Of matrix products.

    Raises:
        ValueError: There are fewer images than a batch has.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        training: ImageSet,
        held_out: ImageSet,
        device: torch.device,
        precision: torch.dtype,
    ) -> None:
        self.config, self.state = config, state
        self.training, self.held_out = training.to(device), held_out.to(device)
        self.one_hot = torch.eye(len(training.classes), device=device)
        self.device, self.precision = device, precision
        self.steps_per_epoch = steps_per_epoch(len(training), config.train.batch_size)
        self.mean, self.std = normalization(config.data.name, device)
        patch = config.model.patch_size
        self.small_size = patch * max(1, round(IMAGE_SIZE / patch * config.train.small_scale))
        # Both image sizes are compiled on their own, so that the grid is a plain number.
        compile_ = config.train.compile
        self.forward = torch.compile(state.model, dynamic=False) if compile_ else state.model
        self.follower = Follower(
            Path(config.out), held_out if len(held_out) else training, config.track.probes,
            self.mean, self.std, precision, config.train.seed,
        )  # fmt: skip

    def plan(self) -> None:
        """Count the steps of the run, unless it is resumed and they were counted before.

        With a time budget trial steps are timed and undone; they count as training time.
        """
        state, train = self.state, self.config.train
        if state.total_steps == 0:
            if train.budget_minutes is None:
                state.total_steps = train.epochs * self.steps_per_epoch
            else:
                self._fit_into(60 * train.budget_minutes)
        self.milestones = milestones(state.total_steps)

    def _fit_into(self, budget: float) -> None:
        """Count the steps that fit into a budget of seconds."""
        start = time.perf_counter()
        fresh = copy.deepcopy(self.state.state_dict())
        seconds_per_step = self._time_steps()
        self.state.load_state_dict(fresh)
        self.state.seconds = time.perf_counter() - start
        left = BUDGET_SHARE * budget - self.state.seconds
        self.state.total_steps = max(1, int(left / seconds_per_step))

    def _time_steps(self) -> float:
        """Train for some steps of each image size and return the mean seconds of a run's step."""
        count, train = len(self.training), self.config.train
        draw = generator(train.seed, "trial")
        stages = ((self.small_size, train.small_share), (IMAGE_SIZE, 1 - train.small_share))
        seconds = 0.0
        for size, share in stages:
            if share == 0:
                continue
            for steps in (WARM_STEPS, TRIAL_STEPS):
                begin = time.perf_counter()
                for _ in range(steps):
                    batch = torch.randint(count, (train.batch_size,), generator=draw)
                    loss, _ = self._train_batch(batch.to(self.device), 0.1, size)
                loss.item()  # waits for the device
            seconds += share * (time.perf_counter() - begin) / TRIAL_STEPS
        return seconds

    def fit(self, tracker: Tracker) -> None:
        """Train to the end; a checkpoint is written after each epoch.

        Args:
            tracker: Where curves and pictures go.
        """
        if self.state.step == 0:
            tracker.text("config", f"```yaml\n{yaml.safe_dump(to_dict(self.config))}```")
            tracker.text("model", f"```\n{self.state.model}\n```")
            self.follower.look(self.state.evaluated(), tracker, 0)
        state = self.state
        done_before, start = state.seconds, time.perf_counter()
        epochs = -(-state.total_steps // self.steps_per_epoch)
        with tqdm(
            total=state.total_steps, initial=state.step, unit="step", dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        ) as bar:  # fmt: skip
            while state.step < state.total_steps:
                begin, first = time.perf_counter(), state.step
                epoch = state.step // self.steps_per_epoch
                loss, accuracy = self._train_epoch(epoch, tracker, bar)
                images = (state.step - first) * self.config.train.batch_size
                speed = images / (time.perf_counter() - begin)
                validation = self._validate(tracker)
                state.seconds = done_before + time.perf_counter() - start
                left = state.seconds * (self._work(state.total_steps) / self._work(state.step) - 1)
                bar.write(
                    f"epoch {epoch + 1:>3}/{epochs}   loss {loss:.4f}   "
                    f"training {accuracy:6.2%}   held out {validation}   {speed:,.0f} images/s   "
                    f"{clock(state.seconds)}, {clock(left)} left"
                )
                sys.stdout.flush()  # tqdm does not, and a log file should show it
                tracker.flush()
                self._save()

    def _train_epoch(self, epoch: int, tracker: Tracker, bar: tqdm) -> tuple[float, float]:
        """Train on every image once, or till the run ends; return mean loss and accuracy."""
        config, state = self.config, self.state
        batches = epoch_batches(
            len(self.training), config.train.batch_size, config.train.seed, epoch
        ).to(self.device)
        batches = batches[: state.total_steps - epoch * self.steps_per_epoch]
        losses: list[Tensor] = []
        accuracies: list[Tensor] = []
        logged, since = 0, time.perf_counter()
        for number, batch in enumerate(batches, start=1):
            share = lr_at(
                state.step, state.total_steps, int(config.optim.warmup * state.total_steps),
                config.optim.schedule,
            )  # fmt: skip
            loss, accuracy = self._train_batch(batch, share, self._image_size())
            losses.append(loss)
            accuracies.append(accuracy)
            bar.update()
            if number % config.track.every == 0 or number == len(batches):
                window = slice(logged, number)
                speed = config.train.batch_size * (number - logged)
                values = {
                    "train/loss": torch.stack(losses[window]).mean().item(),
                    "train/accuracy": torch.stack(accuracies[window]).mean().item(),
                    "train/lr": state.optimizers[0].param_groups[0]["lr"],
                    "train/images_per_second": speed / (time.perf_counter() - since),
                }
                tracker.scalars(state.step, values)
                bar.set_postfix_str(
                    "loss {:.3f}  acc {:.1%}  lr {:.2g}  {:,.0f} images/s".format(*values.values())
                )
                logged, since = number, time.perf_counter()
            if state.step in self.milestones:
                pause = time.perf_counter()
                self.follower.look(state.evaluated(), tracker, state.step)
                since += time.perf_counter() - pause
        return torch.stack(losses).mean().item(), torch.stack(accuracies).mean().item()

    def _image_size(self) -> int:
        """Return the size of the next step's images: small ones first."""
        train = self.config.train
        early = self.state.step < train.small_share * self.state.total_steps
        return self.small_size if early else IMAGE_SIZE

    def _work(self, steps: int) -> float:
        """Return how long the first steps take, in units of a step with images of full size."""
        train = self.config.train
        small = min(steps, train.small_share * self.state.total_steps)
        return steps - small * (1 - (self.small_size / IMAGE_SIZE) ** 2)

    def _train_batch(self, batch: Tensor, share: float, size: int) -> tuple[Tensor, Tensor]:
        """Learn the images at `batch` (B,), of a size, with a share of the peak rates."""
        config, state = self.config, self.state
        images, targets = self._augmented(batch, size)
        torch.manual_seed(fold_in(config.train.seed, "dropout", state.step))
        set_lr(state.optimizers, share)
        return train_step(
            state, self.forward, images, targets, precision=self.precision,
            label_smoothing=config.optim.label_smoothing, clip_grad=config.optim.clip_grad,
            accumulate=config.train.accumulate,
        )  # fmt: skip

    def _augmented(self, batch: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Gather the images at `batch` (B,), and their classes one-hot; augment, shrink them."""
        images, targets = augment(
            self.training.images[batch], self.one_hot[self.training.labels[batch]],
            self.mean, self.std,
            generator(self.config.train.seed, "augment", self.state.step, device=self.device),
            **vars(self.config.augment),
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

    def _save(self) -> None:
        state = self.state.state_dict()
        state |= {"config": to_dict(self.config), "classes": list(self.training.classes)}
        save_checkpoint(Path(self.config.out), self.state.step, state)
