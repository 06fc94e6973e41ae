"""Optimizers, their parameter groups, and the learning rate as a function of the step."""

import math
from collections import defaultdict
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


NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)  # of x, x³ and x⁵, after which values of 0 to 1 are near 1


class Muon(Optimizer):
    """Momentum made orthogonal, for matrices (https://kellerjordan.github.io/posts/muon).

    The numbers are those of torch.optim.Muon, to rounding. That goes matrix by matrix, which for
    the small ones here takes twice as long as all of one shape at once; and it takes only what is
    stored as a matrix, whereas a convolution's kernel is one with a row for each output channel,
    and a fused projection is several below each other, to be made orthogonal one by one.

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
        self.numbers = dict(parameters)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([parameter for parameter, _ in parameters], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters by their gradients."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for (rows, columns), parts in self._by_shape(group["params"]).items():
                matrices, gradients, averages = zip(*parts, strict=True)
                torch._foreach_lerp_(averages, gradients, 1 - momentum)
                ahead = torch._foreach_lerp(gradients, averages, momentum)  # Nesterov's
                updates = orthogonalize(torch.stack(ahead))
                torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
                rate = lr * max(1, rows / columns) ** 0.5
                torch._foreach_add_(matrices, updates.unbind(), alpha=-rate)

    def _by_shape(
        self, parameters: list[nn.Parameter]
    ) -> dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]]:
        """Sort matrices, gradients and averages of gradients by their shape."""
        by_shape = defaultdict(list)
        for parameter in parameters:
            assert parameter.grad is not None
            whole, gradient = _as_matrix(parameter), _as_matrix(parameter.grad)
            assert whole.data_ptr() == parameter.data_ptr(), "a kernel is not channels last"
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(whole)
            wholes = (whole, gradient, state["momentum_buffer"])
            for parts in zip(*(w.chunk(self.numbers[parameter]) for w in wholes), strict=True):
                by_shape[parts[0].shape].append(parts)
        return by_shape


def orthogonalize(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Bring the singular values of matrices near 1, by Newton and Schulz's iteration.

    Args:
        matrices: (K, m, n).
        steps: Of the iteration; after five values are 0.7 to 1.2.
        eps: Least norm that a matrix is divided by.

    Returns:
        (K, m, n) bfloat16.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # the smaller product of the two
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, odd, x, beta=a)
    return x.mT if tall else x


def _as_matrix(tensor: Tensor) -> Tensor:
    """See (D, E), or (D, C, h, w) with channels last, as a matrix of D rows."""
    return tensor.permute(0, 2, 3, 1).flatten(1) if tensor.ndim == 4 else tensor


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
