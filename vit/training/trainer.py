"""Training: from a config to a finished run folder.

A run is a pure function of its config: every random draw is made from the seed and the step, so a
run that is interrupted and resumed is the run that was not.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from vit.config import IMAGE_SIZE, Config, to_dict
from vit.data.augment import augment
from vit.data.batches import epoch_batches, steps_per_epoch
from vit.data.datasets import ImageSet, hold_out, load
from vit.evaluation import evaluate
from vit.reporting import REPORT_FILE, choose_probes, normalization, probe_pictures, write_report
from vit.seeding import fold_in, generator
from vit.tracking import ROLLOUT_TAG, Tracker, milestones
from vit.training.checkpoint import MODEL_FILE, save_checkpoint, save_model
from vit.training.hardware import choose_device, choose_precision, describe
from vit.training.optim import lr_at, set_lr
from vit.training.run import EVAL_FOLDER, check_run, prepare_run
from vit.training.state import TrainState, build_state, train_step


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
    everything = load(
        config.data.name, config.data.root, train=True, download=config.data.download,
        count=config.data.train_size and config.data.train_size + config.data.val_size,
    )  # fmt: skip
    training, held_out = hold_out(everything, config.data.val_size, config.train.seed)
    if config.data.train_size is not None:
        training = training.select(torch.arange(min(config.data.train_size, len(training))))
    total = config.train.epochs * steps_per_epoch(len(training), config.train.batch_size)
    state = build_state(config, len(training.classes), device)
    if checkpoint is not None:
        state.load_state_dict(checkpoint)
    run = prepare_run(config, resume=checkpoint is not None)
    _print_start(config, state, training, held_out, total, device, precision)
    tracker = Tracker(run, state.step)
    try:
        Trainer(config, state, tracker, training.to(device), held_out, device, precision).fit()
    except KeyboardInterrupt:
        print("\ninterrupted: the same command resumes", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        tracker.close()
    test = load(config.data.name, config.data.root, train=False, download=False)
    result = write_report(
        state.evaluated(), test, config.data.name, run / EVAL_FOLDER, step=total, device=device,
        precision=precision, probes=config.track.probes,
    )  # fmt: skip
    save_model(run / MODEL_FILE, state.evaluated(), config, training.classes, total)
    _print_end(run, result, state.seconds)
    return result


class Trainer:
    """Takes a state through the epochs that are left, writing curves, pictures and checkpoints.

    Args:
        config: The run.
        state: Where it stands; is changed in place.
        tracker: Where curves and pictures go.
        training: Images to train on, on the device.
        held_out: Images for the curves; may be empty.
        device: Where to compute.
        precision: Of matrix products.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        tracker: Tracker,
        training: ImageSet,
        held_out: ImageSet,
        device: torch.device,
        precision: torch.dtype,
    ) -> None:
        self.config, self.state, self.tracker = config, state, tracker
        self.training, self.held_out = training, held_out.to(device)
        self.device, self.precision = device, precision
        self.steps_per_epoch = steps_per_epoch(len(training), config.train.batch_size)
        self.total_steps = config.train.epochs * self.steps_per_epoch
        self.mean, self.std = normalization(config.data.name, device)
        self.forward = torch.compile(state.model) if config.train.compile else state.model
        self.probes = choose_probes(
            held_out if len(held_out) else training, config.track.probes, config.train.seed
        )
        self.milestones = milestones(self.total_steps)

    def fit(self) -> None:
        """Train to the end; a checkpoint is written after each epoch."""
        if self.state.step == 0:
            self._draw_attention()
        done_before, start = self.state.seconds, time.perf_counter()
        first = self.state.step // self.steps_per_epoch
        with tqdm(
            total=self.total_steps, initial=self.state.step, unit="step", dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        ) as bar:  # fmt: skip
            for epoch in range(first, self.config.train.epochs):
                begin = time.perf_counter()
                loss, accuracy = self._train_epoch(epoch, bar)
                images = self.steps_per_epoch * self.config.train.batch_size
                speed = images / (time.perf_counter() - begin)
                validation = self._validate()
                self.state.seconds = done_before + time.perf_counter() - start
                left = self.config.train.epochs - epoch - 1
                bar.write(
                    f"epoch {epoch + 1:>3}/{self.config.train.epochs}   loss {loss:.4f}   "
                    f"training {accuracy:6.2%}   held out {validation}   {speed:,.0f} images/s   "
                    f"{clock(self.state.seconds)}, "
                    f"{clock(self.state.seconds / (epoch + 1) * left)} left"
                )
                self._save()

    def _train_epoch(self, epoch: int, bar: tqdm) -> tuple[float, float]:
        """Train on every image once; return mean loss and accuracy."""
        config, state = self.config, self.state
        batches = epoch_batches(
            len(self.training), config.train.batch_size, config.train.seed, epoch
        ).to(self.device)
        losses: list[Tensor] = []
        accuracies: list[Tensor] = []
        logged, since = 0, time.perf_counter()
        for number, batch in enumerate(batches, start=1):
            share = lr_at(
                state.step, self.total_steps, int(config.optim.warmup * self.total_steps),
                config.optim.schedule,
            )  # fmt: skip
            loss, accuracy = self._train_batch(batch, share)
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
                self.tracker.scalars(state.step, values)
                bar.set_postfix_str(
                    "loss {:.3f}  acc {:.1%}  lr {:.2g}  {:,.0f} images/s".format(*values.values())
                )
                logged, since = number, time.perf_counter()
            if state.step in self.milestones:
                self._draw_attention()
        return torch.stack(losses).mean().item(), torch.stack(accuracies).mean().item()

    def _train_batch(self, batch: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Gather, augment and learn the images at `batch` (B,) with a share of the peak rates."""
        config, state = self.config, self.state
        targets = F.one_hot(self.training.labels[batch], len(self.training.classes)).float()
        images, targets = augment(
            self.training.images[batch], targets, self.mean, self.std,
            generator(config.train.seed, "augment", state.step, device=self.device),
            **vars(config.augment),
        )  # fmt: skip
        torch.manual_seed(fold_in(config.train.seed, "dropout", state.step))
        set_lr(state.optimizers, share)
        return train_step(
            state, self.forward, images, targets, precision=self.precision,
            label_smoothing=config.optim.label_smoothing, clip_grad=config.optim.clip_grad,
            accumulate=config.train.accumulate,
        )  # fmt: skip

    def _validate(self) -> str:
        """Evaluate on the held-out images; return their accuracy as text."""
        if len(self.held_out) == 0:
            return "none"
        held = self.held_out
        result = evaluate(
            self.state.evaluated(), held.images, held.labels, held.classes, self.mean, self.std,
            self.precision,
        )  # fmt: skip
        values = {"val/loss": result["loss"], "val/accuracy": result["accuracy"]}
        self.tracker.scalars(self.state.step, values)
        return f"{result['accuracy']:6.2%}"

    def _draw_attention(self) -> None:
        pictures = probe_pictures(self.state.evaluated(), self.probes, self.mean, self.std)
        for number, picture in enumerate(pictures):
            self.tracker.picture(self.state.step, ROLLOUT_TAG.format(number), picture)

    def _save(self) -> None:
        self.tracker.flush()
        state = self.state.state_dict()
        state |= {"config": to_dict(self.config), "classes": list(self.training.classes)}
        save_checkpoint(Path(self.config.out), self.state.step, state)


def clock(seconds: float) -> str:
    """Write a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _print_start(
    config: Config,
    state: TrainState,
    training: ImageSet,
    held_out: ImageSet,
    total: int,
    device: torch.device,
    precision: torch.dtype,
) -> None:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        state.evaluated()(torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE, device=device))
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    model, train = config.model, config.train
    kernel = {"auto": "fused" if device.type == "cuda" else "math"}.get(
        model.attn_kernel, model.attn_kernel
    )
    print(
        f"data     {config.data.name}: {len(training):,} images to train on, {len(held_out):,} "
        f"held out; the test images are used once, at the end\n"
        f"model    ViT, depth {model.depth}, width {model.embed_dim}, heads {model.num_heads}: "
        f"{parameters:,} parameters, "
        f"{counter.get_total_flops() / 1e9:.3f} GFLOPs per image forward\n"
        f"device   {describe(device)}, {str(precision)[6:]}, "
        f"{kernel} attention{', compiled' if train.compile else ''}\n"
        f"steps    {total:,} of {train.batch_size} images ({train.epochs} epochs)"
        + (f", resumed after {state.step:,}" if state.step else "")
        + f"\nrun      {config.out}; follow it with: {tensorboard_command(Path(config.out))}",
        flush=True,
    )


def _print_end(run: Path, result: dict[str, Any], seconds: float) -> None:
    low, high = result["accuracy_95"]
    print(
        f"\ntest     {result['accuracy']:.2%} of {result['n']:,} images right "
        f"(95 % interval {low:.2%} to {high:.2%}), loss {result['loss']:.4f}\n"
        f"time     {clock(seconds)} of training\n"
        f"wrote    {run / MODEL_FILE}, {run / EVAL_FOLDER / REPORT_FILE}, "
        f"{run / EVAL_FOLDER / 'attention'}/\n"
        f"next     python eval.py {run}\n"
        f"         {tensorboard_command(run)}"
    )


def tensorboard_command(run: Path) -> str:
    """Return the command that shows a run beside its neighbours, with every picture kept."""
    return f"tensorboard --logdir {run.parent} --samples_per_plugin images=1000"
