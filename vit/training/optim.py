"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def lr_at(step: int, total_steps: int, warmup_steps: int, schedule: str) -> float:
    """Return the learning rate of a step as a share of its peak.

    It rises linearly over the warm-up and falls to zero, which the step after the last would have.

    Args:
        step: 0 to total_steps.
        total_steps: Steps in the whole run.
        warmup_steps: Steps until the peak, less than total_steps.
        schedule: "linear" or "cosine", the shape of the fall.

    Returns:
        0 to 1.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / (total_steps - warmup_steps)
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


def set_lr(optimizers: list[Optimizer], share: float) -> None:
    """Set every group's learning rate to a share of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * share


def build_optimizers(
    model: nn.Module,
    name: str,
    lr: float,
    weight_decay: float,
    muon_lr: float,
    muon_weight_decay: float,
) -> list[Optimizer]:
    """Make the optimizers of a VisionTransformer.

    Norms, biases, tokens and positions are not decayed. With "muon" the weight matrices of the
    encoder blocks go to Muon (https://kellerjordan.github.io/posts/muon, arXiv 2502.16982) and
    everything else, depthwise kernels too, to AdamW (arXiv 1711.05101); with "adamw" all go there.

    Returns:
        One or two optimizers; each group keeps its peak learning rate as "initial_lr".
    """
    matrices, decayed, plain = [], [], []
    for key, parameter in model.named_parameters():
        if parameter.ndim < 2 or key in ("cls_token", "reg_token", "pos_embed"):
            plain.append(parameter)
        elif name == "muon" and parameter.ndim == 2 and key.startswith("blocks."):
            matrices.append(parameter)
        else:
            decayed.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "initial_lr": lr},
        {"params": plain, "weight_decay": 0.0, "initial_lr": lr},
    ]
    optimizers: list[Optimizer] = [torch.optim.AdamW(groups, lr=lr, fused=True)]
    if matrices:
        muon = {"params": matrices, "initial_lr": muon_lr}
        optimizers.append(torch.optim.Muon([muon], lr=muon_lr, weight_decay=muon_weight_decay))
    return optimizers
