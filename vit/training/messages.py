"""What training prints when it starts and ends."""

import math
from pathlib import Path
from typing import Any

from vit.config import Config
from vit.console import argument, counted, installed, printable, program, sides
from vit.data.config import DataConfig
from vit.data.images import ImageSet
from vit.data.sampling import describe_counts
from vit.data.stream import ImageFiles
from vit.hardware import describe
from vit.model.attention_model import attention_model, no_maps_text
from vit.model.config import ModelConfig
from vit.model.definitions import is_in_file
from vit.run.folder import EVAL_FOLDER, MODEL_FILE, PREDICTIONS_FILE, REPORT_FILE
from vit.training.state import TrainState
from vit.training.step import TrainingStep

FEW_STEPS = 200  # to train from scratch
ATTENTION_TAB = "http://localhost:6006/#attention"  # of TensorBoard
LOSSES = 30  # number of recent losses shown when a run diverges


def start_text(config: Config, step: TrainingStep, images: ImageSet, held_out: ImageSet) -> str:
    """Describe the run that is about to start: data, model, device, length, folder."""
    processes = f"{step.world.size} processes, each on " if step.world.size > 1 else ""
    precision = str(step.precision).removeprefix("torch.")
    variant, teacher = config.model.attention, ""
    attention = "" if variant == "dot" else f", {variant} attention"
    if step.teacher is not None:
        teacher = f"teacher  {step.teacher.name}, {step.teacher.fraction:.0%} of the target\n"
    return (
        f"data     {config.data.name}: {_data_text(config.data, images, held_out)}\n"
        f"model    {_model_text(config.model, step)}\n"
        f"device   {processes}{describe(images.device)}, {precision}{attention}, "
        f"{'' if step.compiled else 'not '}compiled\n{teacher}"
        f"steps    {_steps_text(config, step, len(images))}\n"
        f"run      {printable(config.out)}; watch it with: {tensorboard_command(Path(config.out))}"
    )


def _data_text(data: DataConfig, images: ImageSet, held_out: ImageSet) -> str:
    text = f"{len(images):,} training images ({_counts(images)}), "
    if len(held_out):
        text += f"{len(held_out):,} held out ({_counts(held_out)})"
    else:
        text += "none held out, so there are no validation curves"
    text += "; the test images are used once, at the end"
    if data.balance != "none":
        text += f"; classes are balanced by data.balance={data.balance}"
    if data.spec.own_files and data.image_size is None:
        pixels = f"{sides(data.spec.image_size)} pixels"
        text += f"; resized to {pixels}, use --data.image_size for more detail"
    if isinstance(images.images, ImageFiles):
        gigabytes, workers = images.images.nbytes / 1e9, images.images.num_workers
        where = f"by {counted(workers, 'worker')}" if workers else "in this process"
        text += f"; {gigabytes:.3g} GB, more than data.memory_gb, so files are decoded {where}"
    return text


def _counts(images: ImageSet) -> str:
    return describe_counts(images.classes, images.class_counts())


def _model_text(model: ModelConfig, step: TrainingStep) -> str:
    """Describe the model: the settings that matter most, its tokens and its parameters."""
    state, size = step.state, step.schedule.full_size
    text = model.name
    if text == "vit":
        text = f"ViT, depth {model.depth}, width {model.embed_dim}, {model.num_heads} heads"
    text += f", {sides(size)} pixels"
    structure = attention_model(state.structure())
    if structure is not None:
        count = structure.num_prefix_tokens + math.prod(structure.patch_embed.grid(*size))
        text += f", {counted(count, 'token', ',')}"
    text += f": {sum(p.numel() for p in state.model.parameters()):,} parameters"
    if state.frozen:
        number = sum(p.numel() for p in state.model.parameters() if p.requires_grad)
        when = "at every step" if step.features is None else "once"
        text += f"; {number:,} are trained, the classifier's, on features computed {when}"
    return text if structure is not None else f"{text}\nmaps     {no_maps_text(state.model)}"


def _steps_text(config: Config, step: TrainingStep, num_images: int) -> str:
    """Describe the length of a run: steps, images in each, and epochs."""
    schedule, state, minutes = step.schedule, step.state, config.train.budget_minutes
    batch = f"{counted(schedule.batch_size, 'image')} each"
    if schedule.batch_size < config.train.batch_size and config.data.balance != "sampler":
        again = schedule.batch_size * schedule.steps_per_epoch - num_images
        twice = f", {again} of them twice" if again else ""
        batch = f"{schedule.batch_size} images so that an epoch uses all {num_images:,}{twice}"
    epochs = counted(schedule.total_steps / schedule.steps_per_epoch, "epoch", ".4g")
    text = f"{schedule.total_steps:,} with {batch}, {epochs}"
    if schedule.small_fraction and schedule.small_size != schedule.full_size:
        first = f"{schedule.small_fraction * schedule.total_steps / schedule.steps_per_epoch:.3g}"
        text += f", the first {first} at {sides(schedule.small_size)} pixels"
    scratch = config.model.pretrained is None and not state.frozen
    if not scratch and not schedule.small_fraction:
        text += ", all at full size (train.small_share)"
    if minutes is not None:
        text += f", to fit into {counted(minutes, 'minute', 'g')}"
    if schedule.total_steps < FEW_STEPS and scratch:
        key = "epochs" if minutes is None else "budget_minutes"
        text += f"; few for training from scratch: raise --train.{key} if accuracy is low"
    return f"{text}; resuming after step {state.step:,}" if state.step else text


def end_text(run: Path, result: dict[str, Any], has_maps: bool, variant: str) -> str:
    """Summarize the result, list what was written, and suggest what to do next."""
    flag = f" --model.attention {argument(variant)}" if is_in_file(variant) else ""
    command = f"{program('eval')} {argument(run)}"
    low, high = result["accuracy_95"]
    trained = result["training"]
    compute = ""
    if trained["pflop"] is not None:
        pflop, ratio = trained["pflop"], trained["of_products"]
        amount = f"{pflop:.3g} PFLOP" if pflop >= 0.01 else f"{1000 * pflop:.3g} TFLOP"
        compute = f", {amount} at {ratio:.0%} of the speed of large matrix products"
    page = f" export html{flag}  # attention as a page" if has_maps else flag
    equal = len({values["n"] for values in result["per_class"].values()}) == 1
    balanced = "" if equal else f"balanced accuracy {result['balanced_accuracy']:.2%}, "
    return (
        f"\ntest     {result['accuracy']:.2%} accuracy on {result['n']:,} images "
        f"(95% interval {low:.2%} to {high:.2%}), {balanced}loss {result['loss']:.4f}\n"
        f"time     {clock(trained['seconds'])} of training{compute}\n"
        f"wrote    {printable(run / MODEL_FILE)}, {printable(run / EVAL_FOLDER / REPORT_FILE)}, "
        f"{printable(run / EVAL_FOLDER / PREDICTIONS_FILE)}, {printable(run / EVAL_FOLDER)}/*.png\n"
        f"next     {command}{page}\n"
        f"         {tensorboard_command(run)}  # then open {ATTENTION_TAB}"
    )


def diverged_text(state: TrainState, numbers: str) -> str:
    """Describe which numbers are not finite ("loss or gradient" or "weights"), and what to try."""
    problem, kept = "training diverged", "; this state was not saved"
    advice = "Lower --optim.lr and --optim.muon_lr or set --optim.clip_grad"
    if state.skipped == state.step:  # no weight has changed
        problem, kept = "the model is not finite before training", ""
        advice = "Check pretrained weights, and attention that you have edited or named"
    rates = ", ".join(f"{optimizer.param_groups[0]['lr']:.3g}" for optimizer in state.optimizers)
    losses = " ".join(f"{point[0].item():.4g}" for point in state.points[-LOSSES:])
    return (
        f"{problem}: {numbers} not finite at step {state.step:,}, after "
        f"{state.skipped_in_a_row} skipped steps in a row (learning rate {rates}; last losses, "
        f"nan for a skipped step: {losses}){kept}. {advice}, and start over with --overwrite"
    )


def tensorboard_command(run: Path) -> str:
    """Return the command that shows a run and its neighbours with all their images."""
    program = installed("tensorboard")
    return f"{program} --logdir {argument(run.parent)} --samples_per_plugin images=1000"


def clock(seconds: float) -> str:
    """Format a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
