"""Optimizers and their parameter groups."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# Coefficients of x, x³ and x⁵ in an iteration that moves values between 0 and 1 close to 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    """Set every group's learning rate to a fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


class Muon(Optimizer):
    """Muon: momentum orthogonalized by Newton-Schulz (https://kellerjordan.github.io/posts/muon).

    Computes the same updates as torch.optim.Muon, up to rounding. Torch's version handles one
    matrix at a time, which takes twice as long for small matrices as handling all matrices of one
    shape together. It also accepts only parameters stored as matrices, whereas here a convolution
    kernel is a matrix with one row per output channel, and a fused projection is a stack of
    matrices that are orthogonalized separately.

    Args:
        parameters: Matrices (D, E) and channels-last kernels (D, C, h, w), each with the number of
            stacked matrices it consists of; each of them has D / number rows.
        lr: Learning rate; multiplied by √(rows / columns) for matrices with more rows than columns.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        momentum: Decay of the moving average of gradients, 0 to 1.
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
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for (rows, columns), parts in self._by_shape(group["params"]).items():
                matrices, gradients, averages = zip(*parts, strict=True)
                torch._foreach_lerp_(averages, gradients, 1 - momentum)
                ahead = torch._foreach_lerp(gradients, averages, momentum)  # Nesterov momentum
                updates = orthogonalize(torch.stack(ahead))
                torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
                rate = lr * max(1, rows / columns) ** 0.5
                torch._foreach_add_(matrices, updates.unbind(), alpha=-rate)

    def _by_shape(
        self, parameters: list[nn.Parameter]
    ) -> dict[torch.Size, list[tuple[Tensor, Tensor, Tensor]]]:
        """Group matrices, their gradients and averages of gradients by shape."""
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
    """Bring the singular values of matrices close to 1 by Newton-Schulz iteration.

    Args:
        matrices: (K, m, n).
        steps: Number of iterations; after five, singular values are between 0.7 and 1.2.
        eps: Lower bound on the norm by which a matrix is divided.

    Returns:
        (K, m, n) bfloat16.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # so that the Gram matrix is the smaller one
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, odd, x, beta=a)
    return x.mT if tall else x


def _as_matrix(tensor: Tensor) -> Tensor:
    """View (D, E), or (D, C, h, w) in channels-last format, as a matrix with D rows."""
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
    """Build the optimizers of a VisionTransformer or of a model of timm.

    Norms, biases, tokens, position embeddings and what a model of timm exempts itself have no
    weight decay. With "muon", `Muon` updates
    the weight matrices of the encoder blocks (queries, keys and values as separate matrices) and
    the kernels of the stem. AdamW (arXiv 1711.05101) updates everything else, including depthwise
    kernels and the head; with "adamw" it updates all parameters.

    Returns:
        One or two optimizers; each group keeps its peak learning rate as "initial_lr".
    """
    exempt = {"cls_token", "reg_token", "pos_embed"} | getattr(model, "no_weight_decay", set)()
    matrices: list[tuple[nn.Parameter, int]] = []
    decayed, plain = [], []
    for key, parameter in model.named_parameters():
        if parameter.ndim < 2 or key in exempt:
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
