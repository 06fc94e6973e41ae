"""What training prints when it starts and ends."""

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vit.checkpoint import checkpoint_steps
from vit.config import Config
from vit.data.datasets import ImageSet, describe_counts
from vit.data.specs import OWN_FILES
from vit.hardware import describe
from vit.model.attention import uses_fused_kernel
from vit.run_folder import EVAL_FOLDER, MODEL_FILE, REPORT_FILE
from vit.training.state import TrainState
from vit.training.step import TrainingStep


def start_text(config: Config, step: TrainingStep, held_out: ImageSet) -> str:
    """Describe the run that is about to start: data, model, device, length, folder.

    Args:
        config: The run.
        step: The training step, with state, schedule and training images.
        held_out: The held-out images.
    """
    state, schedule, images = step.state, step.schedule, step.images
    device = images.images.device
    rows, columns = schedule.full_size
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        state.evaluated()(torch.zeros(1, step.preprocess.channels, rows, columns, device=device))
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    fused = uses_fused_kernel(config.model.attn_kernel, device, step.precision)
    budget, processes = config.train.budget_minutes, step.world.size
    resized = config.data.name in OWN_FILES and config.data.image_size is None
    hint = f"; resized to {rows} x {columns} pixels, use --data.image_size for more detail"
    return (
        f"data     {config.data.name}: {len(images):,} training images "
        f"({describe_counts(images.classes, images.class_counts())}), {len(held_out):,} held out; "
        f"the test images are used once, at the end{hint if resized else ''}\n"
        f"model    ViT, depth {config.model.depth}, width {config.model.embed_dim}, "
        f"{config.model.num_heads} heads, {rows} x {columns} pixels: {parameters:,} parameters, "
        f"{counter.get_total_flops() / 1e9:.3f} GFLOPs per forward pass\n"
        f"device   {f'{processes} processes, each on ' if processes > 1 else ''}"
        f"{describe(device)}, {str(step.precision).removeprefix('torch.')}, "
        f"{'fused' if fused else 'math'} attention"
        f"{', compiled' if config.train.compile else ''}\n"
        f"steps    {schedule.total_steps:,} with {config.train.batch_size} images each, "
        f"{schedule.total_steps / schedule.steps_per_epoch:.4g} epochs"
        f"{'' if budget is None else f', to fit into {budget:g} minutes'}"
        f"{f'; resuming after step {state.step:,}' if state.step else ''}\n"
        f"run      {config.out}; watch it with: {tensorboard_command(Path(config.out))}"
    )


def end_text(run: Path, result: dict[str, Any], seconds: float) -> str:
    """Summarize the result, list what was written, and suggest what to do next."""
    low, high = result["accuracy_95"]
    return (
        f"\ntest     {result['accuracy']:.2%} accuracy on {result['n']:,} images "
        f"(95% interval {low:.2%} to {high:.2%}), loss {result['loss']:.4f}\n"
        f"time     {clock(seconds)} of training\n"
        f"wrote    {run / MODEL_FILE}, {run / EVAL_FOLDER / REPORT_FILE}, "
        f"{run / EVAL_FOLDER}/*.png\n"
        f"next     python eval.py {run}\n"
        f"         python eval.py {run} --attention\n"
        f"         {tensorboard_command(run)}"
    )


def stopped_text(run: Path, number: int) -> str:
    """Describe how to resume a run that was stopped by a signal."""
    saved = checkpoint_steps(run)
    name = signal.Signals(number).name
    if not saved:
        return f"stopped by {name}; nothing was saved yet; rerun the command to start over"
    return f"stopped by {name}: rerun the command to resume after step {saved[-1]:,}"


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
