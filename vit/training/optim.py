"""Optimizers: their parameter groups, and Muon, which updates weight matrices."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.config import OPTIMIZERS, OptimConfig
from vit.distributed.shard import to_full, to_local

# Coefficients of x, x³ and x⁵ in an iteration that moves values between 0 and 1 close to 1.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    """Set every group's learning rate to a fraction of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


def build_optimizers(
    model: nn.Module, settings: OptimConfig, precision: torch.dtype = torch.bfloat16
) -> list[Optimizer]:
    """Build the optimizers of a VisionTransformer or timm model.

    Norms, biases, tokens, position embeddings and what a timm model exempts have no weight decay.
    With "muon", `Muon` updates the weight matrices of the encoder blocks (queries, keys and values
    as separate matrices), their tables of relative positions, and the kernels of the stem, and
    AdamW (arXiv 1711.05101) everything else, including depthwise kernels and the head. Otherwise,
    the optimizer in `vit.config.OPTIMIZERS` updates all parameters that need a gradient. With
    layer_decay (BEiT, arXiv 2106.08254), each layer has its own groups; the patch embedding, tokens
    and positions come before the first block.

    Returns:
        One or two optimizers; each group keeps its peak learning rate as "initial_lr". The first
        group of each optimizer has the highest.
    """
    spec, layer_decay = OPTIMIZERS[settings.name], settings.layer_decay
    scales = {} if layer_decay is None else _lr_scales(model, layer_decay)
    no_decay = getattr(model, "no_weight_decay", tuple)  # timm's return sets, lists or dicts
    exempt = {"cls_token", "reg_token", "pos_embed"} | set(no_decay())
    matrices: dict[float, list[nn.Parameter]] = defaultdict(list)  # of Muon, by scale
    numbers: dict[nn.Parameter, int] = {}
    others: dict[tuple[float, bool], list[nn.Parameter]] = defaultdict(list)  # by scale and decay
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = scales.get(parameter, 1.0)
        # A vector may have the shape that it broadcasts in, as a temperature (H, 1, 1) per head.
        is_vector = parameter.ndim != 2 and parameter.numel() == max(parameter.shape, default=1)
        if is_vector or key in exempt:
            others[scale, False].append(parameter)
        elif spec.muon and (
            key.startswith("patch_embed.") or (key.startswith("blocks.") and parameter.ndim == 2)
        ):
            matrices[scale].append(parameter)
            is_fused = key.endswith((".qkv.weight", ".in_proj_weight"))  # also in a whole module
            numbers[parameter] = 3 if is_fused and len(parameter) % 3 == 0 else 1
        else:
            others[scale, True].append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": others[scale, decays], "initial_lr": scale * settings.lr,
         "weight_decay": settings.weight_decay if decays else 0.0}
        for scale, decays in sorted(others, reverse=True)
    ]  # fmt: skip
    make = getattr(torch.optim, spec.name)
    optimizers: list[Optimizer] = [make(groups, lr=settings.lr, **spec.arguments)]
    if matrices:
        groups = [
            {"params": matrices[scale], "initial_lr": scale * settings.muon_lr}
            for scale in sorted(matrices, reverse=True)
        ]
        rates = (settings.muon_lr, settings.muon_weight_decay, settings.muon_momentum)
        optimizers.append(Muon(groups, numbers, *rates, precision))
    return optimizers


def _lr_scales(model: nn.Module, layer_decay: float) -> dict[nn.Parameter, float]:
    """Return learning rates relative to the head's: the last block has layer_decay, and so on."""
    from timm.optim import param_groups_layer_decay  # type: ignore[attr-defined]  # takes seconds

    groups = param_groups_layer_decay(model, layer_decay=layer_decay)
    return {parameter: group["lr_scale"] for group in groups for parameter in group["params"]}


class Muon(Optimizer):
    """Muon: momentum orthogonalized by Newton-Schulz (https://kellerjordan.github.io/posts/muon).

    Computes the same updates as torch.optim.Muon, up to rounding. Torch's version handles one
    matrix at a time, which takes twice as long for small matrices, and accepts only matrices. Here,
    a convolution kernel is a matrix with one row per output channel, and a fused projection is a
    stack of matrices that are orthogonalized separately.

    Args:
        groups: Parameter groups, which may differ in learning rate and weight decay. The parameters
            are matrices (D, E) and kernels (D, C, h, w), whole or sharded along D.
        numbers: Number of matrices of D / number rows that are stacked in each parameter.
        lr: Learning rate; multiplied by √(rows / columns) for matrices with more rows than columns.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        momentum: Decay of the moving average of gradients, 0 to 1.
        precision: In which matrices are orthogonalized; bfloat16 is precise enough.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        numbers: dict[nn.Parameter, int],
        lr: float,
        weight_decay: float,
        momentum: float,
        precision: torch.dtype,
    ) -> None:
        self.numbers, self.precision = numbers, precision
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        by_shape = defaultdict[tuple[int, int], list[tuple[nn.Parameter, dict[str, Any]]]](list)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # the loss depends on it
                    rows = parameter.shape[0] // self.numbers[parameter]
                    columns = parameter.numel() // parameter.shape[0]
                    by_shape[rows, columns].append((parameter, group))
        for (rows, columns), pairs in by_shape.items():
            ahead = self._look_ahead([parameter for parameter, _ in pairs])
            numbers = [self.numbers[parameter] for parameter, _ in pairs]
            updates = orthogonalize(ahead).split(numbers)
            for (parameter, group), matrices in zip(pairs, updates, strict=True):
                weight = to_local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                weight.add_(_as_parameter(matrices.flatten(0, 1), parameter), alpha=-rate)

    def _look_ahead(self, parameters: list[nn.Parameter]) -> Tensor:
        """Return the Nesterov momentum of parameters: whole matrices (K, m, n) in `precision`."""
        gradients, averages = [], []
        for parameter in parameters:
            gradient, state = to_local(parameter.grad), self.state[parameter]
            if gradient.ndim == 4:  # kernels (D, C, h, w) are matrices whose channels vary fastest
                gradient = gradient.permute(0, 2, 3, 1).flatten(1)
            if not state:
                state["momentum_buffer"] = _as_part(torch.zeros_like(gradient), parameter)
            gradients.append(gradient)
            averages.append(to_local(state["momentum_buffer"]))
        momentum = self.param_groups[0]["momentum"]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, averages, momentum)
        matrices: list[Tensor] = []
        for part, parameter in zip(ahead, parameters, strict=True):
            stack = to_full(_as_part(part.to(self.precision), parameter))
            matrices += stack.chunk(self.numbers[parameter])
        return torch.stack(matrices)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Bring singular values of matrices (K, m, n) to between 0.7 and 1.2, by Newton-Schulz."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices  # so that the Gram matrix is the smaller one
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        odd = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, odd, x, beta=a)
    return x.mT if tall else x


def _as_part(matrix: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return this process's rows of a matrix as a tensor that is sharded like a parameter."""
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
        layout = sharded.device_mesh, sharded.placements
        matrix = to_local(distribute_tensor(matrix, *layout, src_data_rank=None))
    if parameter.ndim == 2:
        return matrix
    _, channels, height, width = parameter.shape
    return matrix.unflatten(1, (height, width, channels)).permute(0, 3, 1, 2)
