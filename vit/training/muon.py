"""Muon, the optimizer of weight matrices."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.distributed.shard import to_full, to_local

# Coefficients of x, x³ and x⁵ in an iteration that moves values between 0 and 1 close to 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Muon: momentum orthogonalized by Newton-Schulz (https://kellerjordan.github.io/posts/muon).

    Computes the same updates as torch.optim.Muon, up to rounding. Torch's version handles one
    matrix at a time, which takes twice as long for small matrices as handling all matrices of one
    shape together. It also accepts only parameters stored as matrices, whereas here a convolution
    kernel is a matrix with one row per output channel, and a fused projection is a stack of
    matrices that are orthogonalized separately.

    Args:
        groups: Parameter groups, which may differ in learning rate and weight decay. The parameters
            are matrices (D, E) and kernels (D, C, h, w), whole or sharded along D.
        numbers: Number of stacked matrices that a parameter consists of; each of them has
            D / number rows.
        lr: Learning rate; multiplied by √(rows / columns) for matrices with more rows than columns.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        momentum: Decay of the moving average of gradients, 0 to 1.
        precision: In which matrices are orthogonalized.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        numbers: dict[nn.Parameter, int],
        lr: float,
        weight_decay: float,
        momentum: float,
        precision: torch.dtype = torch.bfloat16,
    ) -> None:
        self.numbers, self.precision = numbers, precision
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, dict[str, Any]]]]
        by_shape = defaultdict(list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:  # the loss does not depend on it
                    continue
                rows = parameter.shape[0] // self.numbers[parameter]
                columns = parameter.numel() // parameter.shape[0]
                by_shape[rows, columns].append((parameter, group))
        for (rows, columns), some in by_shape.items():
            ahead = self._ahead([parameter for parameter, _ in some])
            updates = orthogonalize(ahead).split([self.numbers[parameter] for parameter, _ in some])
            for (parameter, group), matrices in zip(some, updates, strict=True):
                weight = to_local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                weight.add_(_as_parameter(matrices.flatten(0, 1), parameter), alpha=-rate)

    def _ahead(self, parameters: list[nn.Parameter]) -> Tensor:
        """Average gradients and look ahead (Nesterov momentum): K matrices (m, n) of one shape.

        They are in `precision`, and whole also where the parameters are sharded.
        """
        gradients, averages = [], []
        for parameter in parameters:
            gradient = _as_matrix(to_local(parameter.grad))
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = _as_part(torch.zeros_like(gradient), parameter)
            gradients.append(gradient)
            averages.append(to_local(state["momentum_buffer"]))
        momentum = self.param_groups[0]["momentum"]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, averages, momentum)
        matrices: list[Tensor] = []
        for part, parameter in zip(ahead, parameters, strict=True):
            whole = to_full(_as_part(part.to(self.precision), parameter))
            matrices += whole.chunk(self.numbers[parameter])
        return torch.stack(matrices)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring the singular values of matrices (K, m, n) close to 1 by Newton-Schulz iteration.

    The results are between 0.7 and 1.2; bfloat16 is precise enough.
    """
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # so that the Gram matrix is the smaller one
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, odd, x, beta=a)
    return x.mT if tall else x


def _as_matrix(tensor: Tensor) -> Tensor:
    """Return (D, E), or kernels (D, C, h, w), as a matrix with D rows; channels vary fastest."""
    return tensor.permute(0, 2, 3, 1).flatten(1) if tensor.ndim == 4 else tensor


def _as_part(matrix: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this process's rows of a matrix as what they are: a part, if `parameter` is one."""
    if to_local(parameter) is parameter:
        return matrix
    from torch.distributed.tensor import DTensor  # late, as in vit.distributed.shard

    sharded: Any = parameter
    columns = matrix.shape[1]
    return DTensor.from_local(
        matrix, sharded.device_mesh, sharded.placements, run_check=False,
        shape=torch.Size((parameter.shape[0], columns)), stride=(columns, 1),
    )  # fmt: skip


def _as_parameter(matrix: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this process's part of a whole matrix, in the shape of its part of a parameter."""
    if to_local(parameter) is not parameter:
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = parameter
        parts = distribute_tensor(
            matrix, sharded.device_mesh, sharded.placements, src_data_rank=None
        )
        matrix = to_local(parts)
    if parameter.ndim == 2:
        return matrix
    _, channels, height, width = parameter.shape
    return matrix.unflatten(1, (height, width, channels)).permute(0, 3, 1, 2)
