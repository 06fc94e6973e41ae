"""What training says on the terminal at its start and at its end."""

import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vit.checkpoint import MODEL_FILE, checkpoint_steps
from vit.config import IMAGE_SIZE, Config
from vit.hardware import describe
from vit.model.attention import uses_fused_kernel
from vit.run_folder import EVAL_FOLDER, REPORT_FILE
from vit.training.plan import Plan
from vit.training.state import TrainState


def start_text(
    config: Config,
    state: TrainState,
    plan: Plan,
    num_training: int,
    num_held_out: int,
    device: torch.device,
    precision: torch.dtype,
    processes: int,
) -> str:
    """Say what is going to happen, with what and where.

    Args:
        config: The run.
        state: Where it stands.
        plan: How long it is.
        num_training: Images to train on.
        num_held_out: Images held out.
        device: Where it computes.
        precision: Of matrix products.
        processes: How many train together.
    """
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        state.evaluated()(torch.zeros(1, 3, IMAGE_SIZE, IMAGE_SIZE, device=device))
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    fused = uses_fused_kernel(config.model.attn_kernel, device, precision)
    budget = config.train.budget_minutes
    return (
        f"data     {config.data.name}: {num_training:,} images to train on, "
        f"{num_held_out:,} held out; the test images are used once, at the end\n"
        f"model    ViT, depth {config.model.depth}, width {config.model.embed_dim}, "
        f"heads {config.model.num_heads}: {parameters:,} parameters, "
        f"{counter.get_total_flops() / 1e9:.3f} GFLOPs per image forward\n"
        f"device   {f'{processes} processes, each on ' if processes > 1 else ''}"
        f"{describe(device)}, {str(precision)[6:]}, "
        f"{'fused' if fused else 'math'} attention"
        f"{', compiled' if config.train.compile else ''}\n"
        f"steps    {plan.total_steps:,}, of {config.train.batch_size} images each; "
        f"epochs: {plan.total_steps / plan.steps_per_epoch:.4g}"
        f"{'' if budget is None else f', to fit into {budget:g} minutes'}"
        f"{f', resumed after {state.step:,}' if state.step else ''}\n"
        f"run      {config.out}; follow it with: {tensorboard_command(Path(config.out))}"
    )


def end_text(run: Path, result: dict[str, Any], seconds: float) -> str:
    """Say how good the model is, what was written where, and what to do next."""
    low, high = result["accuracy_95"]
    return (
        f"\ntest     {result['accuracy']:.2%} of {result['n']:,} images right "
        f"(95 % interval {low:.2%} to {high:.2%}), loss {result['loss']:.4f}\n"
        f"time     {clock(seconds)} of training\n"
        f"wrote    {run / MODEL_FILE}, {run / EVAL_FOLDER / REPORT_FILE}, "
        f"{run / EVAL_FOLDER}/*.png\n"
        f"next     python eval.py {run}\n"
        f"         python eval.py {run} --attention\n"
        f"         {tensorboard_command(run)}"
    )


def stopped_text(run: Path, number: int) -> str:
    """Say how a run that a signal has stopped goes on."""
    saved = checkpoint_steps(run)
    name = signal.Signals(number).name
    if not saved:
        return f"stopped by {name}; nothing was saved yet, so the same command starts anew"
    return f"stopped by {name}: the same command goes on after step {saved[-1]}"


def diverged_text(state: TrainState, what: str, losses: Iterable[float]) -> str:
    """Say that what was computed is not finite, and what came before.

    Args:
        state: Where the run stands.
        what: "loss or gradient", or "weights".
        losses: Of the last steps; NaN for one that was skipped.
    """
    rates = ", ".join(f"{optimizer.param_groups[0]['lr']:.3g}" for optimizer in state.optimizers)
    shown = " ".join(f"{loss:.4g}" for loss in losses)
    return (
        f"training diverged: {what} not finite at step {state.step:,}, after "
        f"{state.skipped_in_a_row} skipped steps in a row (learning rate {rates}; last losses, "
        f"nan for a skipped step: {shown}); nothing of that is saved. Lower --optim.lr and "
        f"--optim.muon_lr or set --optim.clip_grad, and start anew with --overwrite"
    )


def tensorboard_command(run: Path) -> str:
    """Return the command that shows a run beside its neighbours, with every picture kept."""
    return f"tensorboard --logdir {run.parent} --samples_per_plugin images=1000"


def clock(seconds: float) -> str:
    """Write a duration as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
