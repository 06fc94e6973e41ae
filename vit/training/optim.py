"""Optimizers and their parameter groups."""

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vit.config import OPTIMIZERS, OptimConfig
from vit.training.muon import Muon


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    """Set every group's learning rate to a fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


def build_optimizers(
    model: nn.Module, settings: OptimConfig, precision: torch.dtype = torch.bfloat16
) -> list[Optimizer]:
    """Build the optimizers of a VisionTransformer or of a model of timm.

    Norms, biases, tokens, position embeddings and what a model of timm exempts itself have no
    weight decay. With "muon", `Muon` updates the weight matrices of the encoder blocks (queries,
    keys and values as separate matrices) and the kernels of the stem, and AdamW (arXiv 1711.05101)
    everything else, including depthwise kernels and the head. Without, one optimizer, see
    `vit.config.OPTIMIZERS`, updates all parameters. Parameters that need no gradient are left
    out. With layer_decay, each optimizer has groups for each layer, see `lr_scales`.

    Returns:
        One or two optimizers; each group keeps its peak learning rate as "initial_lr". The first
        group of each optimizer has the highest.
    """
    name, layer_decay = settings.name, settings.layer_decay
    scales = {} if layer_decay is None else lr_scales(model, layer_decay)
    exempt = {"cls_token", "reg_token", "pos_embed"} | getattr(model, "no_weight_decay", set)()
    matrices: dict[float, list[nn.Parameter]] = defaultdict(list)  # of Muon, by scale
    numbers: dict[nn.Parameter, int] = {}
    others: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)  # by scale and decay
    for key, parameter in model.named_parameters():
        scale = scales.get(parameter, 1.0)
        if not parameter.requires_grad:
            continue
        # A vector may have the shape that it broadcasts in, as a temperature (H, 1, 1) per head.
        is_vector = parameter.ndim != 2 and parameter.numel() == max(parameter.shape, default=1)
        if is_vector or key in exempt:
            others[scale, False].append(parameter)
        elif OPTIMIZERS[name].muon and (
            key.startswith("patch_embed.") or (key.startswith("blocks.") and parameter.ndim == 2)
        ):
            matrices[scale].append(parameter)
            numbers[parameter] = 3 if key.endswith("attn.qkv.weight") else 1
        else:
            others[scale, True].append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": others[scale, decays],
            "weight_decay": settings.weight_decay if decays else 0.0,
            "initial_lr": scale * settings.lr,
        }
        for scale, decays in sorted(others, reverse=True)
    ]
    make = getattr(torch.optim, OPTIMIZERS[name].name)
    optimizers: list[Optimizer] = [make(groups, lr=settings.lr, **OPTIMIZERS[name].arguments)]
    if matrices:
        groups = [
            {"params": matrices[scale], "initial_lr": scale * settings.muon_lr}
            for scale in sorted(matrices, reverse=True)
        ]
        rates = (settings.muon_lr, settings.muon_weight_decay, settings.muon_momentum)
        optimizers.append(Muon(groups, numbers, *rates, precision))
    return optimizers


def lr_scales(model: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """Return the learning rate of each parameter relative to the head's (BEiT, arXiv 2106.08254).

    The head has 1, the last block layer_decay, the block before it layer_decay², and so on; the
    patch embedding, tokens and positions come before the first block.
    """
    # Imported here, because importing timm takes seconds.
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]

    groups = param_groups_layer_decay(model, layer_decay=layer_decay)
    return {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}
