"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

import math
from typing import Any

import torch
from torch import Tensor, nn
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


class Muon(torch.optim.Muon):
    """torch's Muon, which updates matrices, also for what is stored in another shape.

    A convolution's kernel is a matrix with a row for each output channel; a fused projection is
    several matrices below each other, which are to be made orthogonal one by one. See
    https://kellerjordan.github.io/posts/muon and arXiv 2502.16982.

    Args:
        parameters: Matrices (D, E) and channels-last kernels (D, C, h, w), each with the number of
            matrices of D / number rows that it is made of.
        lr: Learning rate; a matrix of more rows than columns takes it times √(rows / columns).
        weight_decay: Share of a weight that goes, times the learning rate.
        momentum: Share of the average of past gradients that each step keeps.
    """

    def __init__(
        self,
        parameters: list[tuple[nn.Parameter, int]],
        lr: float,
        weight_decay: float,
        momentum: float,
    ) -> None:
        self.parameters = parameters
        # They share their memory with the parameters, so that updating them updates those.
        self.matrices = [
            [nn.Parameter(matrix) for matrix in _matrices_of(parameter.detach(), number)]
            for parameter, number in parameters
        ]
        for (parameter, _), (first, *_) in zip(parameters, self.matrices, strict=True):
            assert first.data_ptr() == parameter.data_ptr(), "a kernel is not channels last"
        super().__init__(
            [matrix for matrices in self.matrices for matrix in matrices],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters by their gradients."""
        for (parameter, number), matrices in zip(self.parameters, self.matrices, strict=True):
            assert parameter.grad is not None
            gradients = _matrices_of(parameter.grad, number)
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient
        super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the parameters' gradients."""
        super().zero_grad(set_to_none)
        for parameter, _ in self.parameters:
            parameter.grad = None


def _matrices_of(tensor: Tensor, number: int) -> tuple[Tensor, ...]:
    """See (D, E), or (D, C, h, w) with channels last, as matrices of D / number rows."""
    if tensor.ndim == 4:
        tensor = tensor.permute(0, 2, 3, 1).flatten(1)
    return tensor.chunk(number)


def build_optimizers(
    model: nn.Module,
    name: str,
    lr: float,
    weight_decay: float,
    muon_lr: float,
    muon_weight_decay: float,
    muon_momentum: float,
) -> list[Optimizer]:
    """Make the optimizers of a VisionTransformer.

    Norms, biases, tokens and positions are not decayed. With "muon" the weight matrices of the
    encoder blocks, queries, keys and values each on their own, and the stem's kernels go to `Muon`;
    everything else, depthwise kernels and the head too, goes to AdamW (arXiv 1711.05101), as
    everything does with "adamw".

    Returns:
        One or two optimizers; each group keeps its peak learning rate as "initial_lr".
    """
    matrices: list[tuple[nn.Parameter, int]] = []
    decayed, plain = [], []
    for key, parameter in model.named_parameters():
        if parameter.ndim < 2 or key in ("cls_token", "reg_token", "pos_embed"):
            plain.append(parameter)
        elif name == "muon" and (
            key.startswith("patch_embed.") or (key.startswith("blocks.") and parameter.ndim == 2)
        ):
            matrices.append((parameter, 3 if key.endswith("attn.qkv.weight") else 1))
        else:
            decayed.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay, "initial_lr": lr},
        {"params": plain, "weight_decay": 0.0, "initial_lr": lr},
    ]
    optimizers: list[Optimizer] = [torch.optim.AdamW(groups, lr=lr, fused=True)]
    if matrices:
        muon = Muon(matrices, muon_lr, muon_weight_decay, muon_momentum)
        muon.param_groups[0]["initial_lr"] = muon_lr
        optimizers.append(muon)
    return optimizers
