"""What training prints when it starts and ends."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vit.console import counted, program
from vit.data.config import DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.sampling import describe_counts
from vit.data.stream import ImageFiles
from vit.hardware import describe
from vit.model.attention_model import attention_model, no_maps_text
from vit.model.config import ModelConfig
from vit.run.folder import EVAL_FOLDER, MODEL_FILE, PREDICTIONS_FILE, REPORT_FILE
from vit.training.config import Config
from vit.training.state import TrainState
from vit.training.step import TrainingStep

MANY_TOKENS = 1024  # of an image, for a CPU
FEW_STEPS = 200  # to train from scratch
BALANCE_TEXTS = {
    "none": "",
    "sampler": "; every class is drawn equally often",
    "loss": "; the loss weights classes by their inverse frequency",
}


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
    processes = f"{step.world.size} processes, each on " if step.world.size > 1 else ""
    variant = config.model.attention
    attention = "" if variant == "dot" else f", {variant} attention"
    structure = attention_model(state.structure())
    maps, tokens = f"maps     {no_maps_text(state.model)}\n", ""
    if structure is not None:
        count = structure.num_prefix_tokens + math.prod(structure.patch_embed.grid(rows, columns))
        maps, tokens = "", f", {counted(count, 'token', ',')}"
        if count > MANY_TOKENS and device.type == "cpu" and config.model.name == "vit":
            tokens += " (slow on a CPU: a larger --model.patch_size makes fewer)"
    return (
        f"data     {config.data.name}: {_data_text(config.data, images, held_out)}"
        f"{BALANCE_TEXTS[config.data.balance]}\n"
        f"model    {describe_model(config.model)}, {rows} x {columns} pixels{tokens}: "
        f"{parameters:,} parameters, {forward_flops(step) / 1e9:.3f} GFLOPs per forward pass"
        f"{trained}\n"
        f"{maps}"
        f"device   {processes}{describe(device)}, {str(step.precision).removeprefix('torch.')}"
        f"{attention}, {'' if step.compiled else 'not '}compiled\n"
        f"steps    {_steps_text(config, step, len(images))}\n"
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


def _data_text(data: DataConfig, images: ImageSet, held_out: ImageSet) -> str:
    """Count the images of each part; published data sets need no count of their test images."""
    text = f"{len(images):,} training images ({_counts(images.classes, images.labels)}), "
    if len(held_out):
        text += f"{len(held_out):,} held out ({_counts(held_out.classes, held_out.labels)})"
    else:
        text += "none held out, so there are no validation curves"
    if not data.spec.own_files or data.on_bad_image == "skip":  # some may not be readable
        text += "; the test images are used once, at the end"
    else:
        test = open_images(data, train=False)
        counts = _counts(test.classes, test.labels)
        text += f"; the {len(test):,} test images ({counts}) are used once, at the end"
    if data.spec.own_files and data.image_size is None:
        rows, columns = data.spec.image_size
        text += f"; resized to {rows} x {columns} pixels, use --data.image_size for more detail"
    if isinstance(images.images, ImageFiles):
        gigabytes, workers = images.images.nbytes / 1e9, images.images.num_workers
        how = f"by {counted(workers, 'worker')}" if workers else "in this process"
        text += f"; {gigabytes:.3g} GB, more than data.memory_gb, so files are decoded {how}"
    return text


def _counts(classes: Sequence[str], labels: Tensor) -> str:
    return describe_counts(classes, torch.bincount(labels, minlength=len(classes)).tolist())


def _steps_text(config: Config, step: TrainingStep, num_images: int) -> str:
    """Describe the length of a run: steps, images in each, and epochs."""
    schedule, state, minutes = step.schedule, step.state, config.train.budget_minutes
    batch = f"{schedule.batch_size} images each"
    if schedule.batch_size < config.train.batch_size and config.data.balance != "sampler":
        again = schedule.batch_size * schedule.steps_per_epoch - num_images
        twice = f", {again} of them twice" if again else ""
        batch = f"{schedule.batch_size} images so that an epoch uses all {num_images:,}{twice}"
    epochs = counted(schedule.total_steps / schedule.steps_per_epoch, "epoch", ".4g")
    text = f"{schedule.total_steps:,} with {batch}, {epochs}"
    if minutes is not None:
        text += f", to fit into {counted(minutes, 'minute', 'g')}"
        if state.step == 0 and state.seconds > 60 * minutes:
            text += " (timing a few steps took longer)"
    if schedule.total_steps < FEW_STEPS and config.model.pretrained is None and not state.frozen:
        key = "epochs" if minutes is None else "budget_minutes"
        text += f"; too few to train from scratch: raise --train.{key}"
    return f"{text}; resuming after step {state.step:,}" if state.step else text


def end_text(
    run: Path, result: dict[str, Any], seconds: float, has_maps: bool, variant: str
) -> str:
    """Summarize the result, list what was written, and suggest what to do next."""
    flag = f" --model.attention {variant}" if ".py:" in variant else ""
    low, high = result["accuracy_95"]
    attention = f"         {program('eval')} {run} maps{flag}\n" if has_maps else ""
    equal = len({values["n"] for values in result["per_class"].values()}) == 1
    balanced = "" if equal else f"balanced accuracy {result['balanced_accuracy']:.2%}, "
    return (
        f"\ntest     {result['accuracy']:.2%} accuracy on {result['n']:,} images "
        f"(95% interval {low:.2%} to {high:.2%}), "
        f"{balanced}loss {result['loss']:.4f}\n"
        f"time     {clock(seconds)} of training\n"
        f"wrote    {run / MODEL_FILE}, {run / EVAL_FOLDER / REPORT_FILE}, "
        f"{run / EVAL_FOLDER / PREDICTIONS_FILE}, {run / EVAL_FOLDER}/*.png\n"
        f"next     {program('eval')} {run}{flag}\n"
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
