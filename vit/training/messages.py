"""What training prints when it starts and ends."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit.console import counted
from vit.data.config import DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.sampling import describe_counts
from vit.hardware import describe
from vit.model.attention_model import attention_model, no_maps_text
from vit.model.config import ModelConfig
from vit.run.folder import EVAL_FOLDER, MODEL_FILE, PREDICTIONS_FILE, REPORT_FILE
from vit.training.config import Config
from vit.training.schedule import Schedule
from vit.training.state import TrainState
from vit.training.step import TrainingStep

BALANCE_TEXTS = {
    "none": "",
    "sampler": "; every class is drawn equally often",
    "loss": "; the loss weights classes by their inverse frequency",
}
FEW_HELD_OUT = 200  # held-out images below which validation accuracy is coarse
MANY_TOKENS, FEWER = 1024, range(16, 257)  # on a CPU, and how many patches to suggest instead
FEW_STEPS, ENOUGH_STEPS = 100, 1000  # from scratch


def start_text(config: Config, step: TrainingStep, images: ImageSet, held_out: ImageSet) -> str:
    """Describe the run that is about to start: data, model, device, length, folder.

    Args:
        config: The run.
        step: The training step, with state and schedule.
        images: The training images.
        held_out: The held-out images.
    """
    state, schedule, device = step.state, step.schedule, images.device
    rows, columns = schedule.full_size
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    trained = ""
    if state.frozen:
        number = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
        when = "at every step" if step.features is None else "once"
        trained = f"; {number:,} parameters are trained, the head's, on features computed {when}"
    processes = step.world.size
    resized = config.data.spec.own_files and config.data.image_size is None
    hint = f"; resized to {rows} x {columns} pixels, use --data.image_size for more detail"
    variant = config.model.attention
    attention = "" if variant == "dot" else f", {variant} attention"
    has_maps = attention_model(state.model) is not None
    maps = "" if has_maps else f"maps     {no_maps_text(state.model)}\n"
    return (
        f"data     {config.data.name}: {_data_text(config.data, images, held_out)}"
        f"{hint if resized else ''}"
        f"{BALANCE_TEXTS[config.data.balance]}{_streaming_text(images)}\n"
        f"model    {describe_model(config.model)}, {rows} x {columns} pixels"
        f"{tokens_text(config.model, step, device)}: {parameters:,} parameters, "
        f"{forward_flops(step) / 1e9:.3f} GFLOPs per forward pass{trained}\n"
        f"{maps}"
        f"device   {f'{processes} processes, each on ' if processes > 1 else ''}"
        f"{describe(device)}, {str(step.precision).removeprefix('torch.')}{attention}"
        f", {step.compilation.describe()}\n"
        f"steps    {schedule.total_steps:,} with {_batch_text(config, schedule, len(images))}, "
        f"{counted(schedule.total_steps / schedule.steps_per_epoch, 'epoch', '.4g')}"
        f"{_budget_text(config.train.budget_minutes, state)}"
        f"{restarts_text(schedule)}"
        f"{f'; resuming after step {state.step:,}' if state.step else ''}"
        f"{_short_text(config, step)}\n"
        f"run      {config.out}; watch it with: {tensorboard_command(Path(config.out))}"
    )


def forward_flops(step: TrainingStep) -> int:
    """Count the FLOPs of the forward pass of one image of full size."""
    model = step.state.structure()
    device = next(model.parameters()).device
    image = torch.zeros(1, step.preprocess.channels, *step.schedule.full_size, device=device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image)
    return counter.get_total_flops()


def tokens_text(model: ModelConfig, step: TrainingStep, device: torch.device) -> str:
    """Count the tokens of an image; if they are many for a CPU, suggest larger patches."""
    size, readable = step.schedule.full_size, attention_model(step.state.structure())
    if readable is None:
        return ""
    tokens = readable.num_prefix_tokens + math.prod(readable.patch_embed.grid(*size))
    text = f", {counted(tokens, 'token', ',')}"
    if tokens <= MANY_TOKENS or device.type != "cpu" or model.name != "vit" or step.state.step:
        return text
    for side in range(1, math.gcd(*size) + 1):
        fits = math.gcd(*size) % side == 0 and (model.stem == "linear" or side.bit_count() == 1)
        patches = math.prod(size) // side**2
        if fits and patches in FEWER:
            return f"{text} (slow on a CPU: --model.patch_size {side} makes {patches})"
    return text


def _budget_text(minutes: float | None, state: TrainState) -> str:
    if minutes is None:
        return ""
    over = state.step == 0 and state.seconds > 60 * minutes
    late = " (timing a few steps took longer)" if over else ""
    return f", to fit into {counted(minutes, 'minute', 'g')}{late}"


def restarts_text(schedule: Schedule) -> str:
    """Name the steps after which the schedule starts over, if there are any."""
    steps = ", ".join(f"{step:,}" for step in schedule.restarts)
    return f"; the schedule starts over after step {steps}" if steps else ""


def _data_text(data: DataConfig, images: ImageSet, held_out: ImageSet) -> str:
    """Count the images of each part; published data sets need no count of their test images."""
    parts = f"{len(images):,} training images ({_counts(images.classes, images.labels)})"
    parts += f", {_held_out_text(held_out)}"
    if not data.spec.own_files or data.on_bad_image == "skip":  # some may not be readable
        return f"{parts}; the test images are used once, at the end"
    test = open_images(data, train=False)
    counts = _counts(test.classes, test.labels)
    return f"{parts}; the {len(test):,} test images ({counts}) are used once, at the end"


def _counts(classes: Sequence[str], labels: Tensor) -> str:
    return describe_counts(classes, torch.bincount(labels, minlength=len(classes)).tolist())


def _held_out_text(held_out: ImageSet) -> str:
    count = len(held_out)
    if count == 0:
        return "none held out, so there are no validation curves"
    coarse = f"; each is {100 / count:.2g}% of validation accuracy" if count < FEW_HELD_OUT else ""
    return f"{count:,} held out ({_counts(held_out.classes, held_out.labels)}{coarse})"


def _batch_text(config: Config, schedule: Schedule, images: int) -> str:
    fewer = schedule.batch_size < config.train.batch_size and config.data.balance != "sampler"
    if not fewer:
        return f"{schedule.batch_size} images each"
    again = schedule.batch_size * schedule.steps_per_epoch - images
    twice = f", {again} of them twice" if again else ""
    return f"{schedule.batch_size} images so that an epoch uses all {images:,}{twice}"


def _short_text(config: Config, step: TrainingStep) -> str:
    """Say that a run from scratch is short."""
    schedule = step.schedule
    from_scratch = config.model.pretrained is None and not step.state.frozen
    if from_scratch and config.train.budget_minutes is None and schedule.total_steps < FEW_STEPS:
        epochs = -(-ENOUGH_STEPS // schedule.steps_per_epoch)
        return f"; few for training from scratch: --train.epochs {epochs} makes {ENOUGH_STEPS:,}"
    return ""


def _streaming_text(images: ImageSet) -> str:
    if isinstance(images.images, Tensor):
        return ""
    gigabytes, workers = images.images.nbytes / 1e9, images.images.num_workers
    how = f"by {counted(workers, 'worker')}" if workers else "in this process"
    return f"; {gigabytes:.3g} GB, more than data.memory_gb, so files are decoded {how}"


def end_text(
    run: Path, result: dict[str, Any], seconds: float, has_maps: bool, variant: str
) -> str:
    """Summarize the result, list what was written, and suggest what to do next."""
    flag = f" --model.attention {variant}" if ".py:" in variant else ""
    low, high = result["accuracy_95"]
    attention = f"         python eval.py {run} maps{flag}\n" if has_maps else ""
    equal = len({values["n"] for values in result["per_class"].values()}) == 1
    balanced = "" if equal else f"balanced accuracy {result['balanced_accuracy']:.2%}, "
    return (
        f"\ntest     {result['accuracy']:.2%} accuracy on {result['n']:,} images "
        f"(95% interval {low:.2%} to {high:.2%}), "
        f"{balanced}loss {result['loss']:.4f}\n"
        f"time     {clock(seconds)} of training\n"
        f"wrote    {run / MODEL_FILE}, {run / EVAL_FOLDER / REPORT_FILE}, "
        f"{run / EVAL_FOLDER / PREDICTIONS_FILE}, {run / EVAL_FOLDER}/*.png\n"
        f"next     python eval.py {run}{flag}\n"
        f"{attention}"
        f"         {tensorboard_command(run)}"
    )


def diverged_text(state: TrainState, what: str, losses: Iterable[float]) -> str:
    """Describe what is not finite, when it happened, and what to try.

    Args:
        state: The state of the run.
        what: "loss or gradient", or "weights".
        losses: Losses of the latest steps; NaN for skipped steps.
    """
    rates = ", ".join(f"{optimizer.param_groups[0]['lr']:.3g}" for optimizer in state.optimizers)
    shown = " ".join(f"{loss:.4g}" for loss in losses)
    return (
        f"training diverged: {what} not finite at step {state.step:,}, after "
        f"{state.skipped_in_a_row} skipped steps in a row (learning rate {rates}; last losses, "
        f"nan for a skipped step: {shown}); this state was not saved. Lower --optim.lr and "
        f"--optim.muon_lr or set --optim.clip_grad, and start over with --overwrite"
    )


def tensorboard_command(run: Path) -> str:
    """Return the command that shows a run and its neighbours with all their images."""
    return f"tensorboard --logdir {run.parent} --samples_per_plugin images=1000"


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def describe_model(model: ModelConfig) -> str:
    """Name a model with the settings that matter most."""
    if model.name != "vit":
        given = ", ".join(f"{key} {value}" for key, value in (model.timm_args or {}).items())
        return f"{model.name}, {given}" if given else model.name
    return f"ViT, depth {model.depth}, width {model.embed_dim}, {model.num_heads} heads"
