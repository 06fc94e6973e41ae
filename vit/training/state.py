"""What a run carries from step to step, and the step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.checkpoint import build_model
from vit.config import Config
from vit.hardware import autocast
from vit.model.vit import VisionTransformer
from vit.seeding import fold_in
from vit.training.distributed import World
from vit.training.optim import build_optimizers

COUNTS = ("step", "seconds", "total_steps", "skipped", "skipped_in_a_row")  # of a TrainState


@dataclass
class TrainState:
    """What a run carries from step to step, and all that a checkpoint holds.

    Attributes:
        model: What is trained.
        optimizers: They update it.
        ema: Moving average of the weights (timm's ModelEmaV3), or None.
        step: Optimizer steps done.
        seconds: Time spent training, over all processes that worked on the run.
        total_steps: Steps in the whole run; 0 until they are counted.
        skipped: Steps whose loss or gradient was not finite.
        skipped_in_a_row: How many of them were the last ones.
        points: Loss and accuracy, (2,), of each step of the epoch so far.
    """

    model: VisionTransformer
    optimizers: list[Optimizer]
    ema: Any = None
    step: int = 0
    seconds: float = 0.0
    total_steps: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    points: list[Tensor] = field(default_factory=list)

    def evaluated(self) -> VisionTransformer:
        """Return the model to evaluate, in evaluation mode: the average where there is one."""
        return (self.model if self.ema is None else self.ema.module).eval()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "points": torch.stack(self.points) if self.points else torch.empty(0, 2),
            **{name: getattr(self, name) for name in COUNTS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; rates and decays stay those of the config."""
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            groups = [
                {key: value for key, value in group.items() if key not in ("params", "lr")}
                for group in optimizer.param_groups
            ]
            optimizer.load_state_dict(values)
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.update(own)
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"] or state["model"])
        self.points = list(state["points"].to(self.model.head.weight.device))
        for name in COUNTS:
            setattr(self, name, state[name])

    def is_finite(self) -> bool:
        """Tell whether all weights and averages are finite, so that they are worth keeping."""
        modules = [self.model] if self.ema is None else [self.model, self.ema.module]
        tensors = [tensor for module in modules for tensor in module.state_dict().values()]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)


def build_state(
    config: Config, num_classes: int, device: torch.device, sample: Tensor | None = None
) -> TrainState:
    """Make the untrained state of a run; the same seed and sample give the same weights.

    Args:
        config: The run.
        num_classes: Of the data.
        device: Where the model is to be.
        sample: Training images (B, 3, H, W), normalised, by which the stem is whitened; None
            leaves it at random.
    """
    torch.manual_seed(fold_in(config.train.seed, "init"))
    model = build_model(config, num_classes)
    if sample is not None:
        model.patch_embed.whiten(sample)
    model.to(device)
    optim = config.optim
    optimizers = build_optimizers(
        model,
        optim.name,
        optim.lr,
        optim.weight_decay,
        optim.muon_lr,
        optim.muon_weight_decay,
        optim.muon_momentum,
    )
    if optim.ema_decay is None:
        return TrainState(model, optimizers)
    from timm.utils import ModelEmaV3  # late: importing timm takes seconds

    return TrainState(model, optimizers, ModelEmaV3(model, optim.ema_decay, use_warmup=True))


def train_step(
    state: TrainState,
    forward: Callable[[Tensor], Tensor],
    images: Tensor,
    targets: Tensor,
    *,
    precision: torch.dtype = torch.float32,
    label_smoothing: float = 0.0,
    clip_grad: float | None = None,
    accumulate: int = 1,
    world: World = World(),  # noqa: B008
) -> Tensor:
    """Update the weights once, or, where loss or gradient is not finite, skip the step.

    A skipped step changes nothing but the counts of steps.

    Args:
        state: Is changed in place.
        forward: The model, possibly compiled.
        images: (B, 3, H, W) float32, normalised; this process's part of the batch.
        targets: (B, C) float32, probabilities.
        precision: Of matrix products.
        label_smoothing: 0 to 1.
        clip_grad: Largest norm of the gradient, or None.
        accumulate: Equal parts the batch is computed in; divides B. Batch norm sees one part
            at a time.
        world: The processes that train together.

    Returns:
        (2,): the mean loss and the share of images classified right, over all processes, still on
        the device; NaN if the step was skipped.
    """
    state.model.train()
    buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
    result = torch.zeros(2, device=images.device)
    for part, target in zip(images.chunk(accumulate), targets.chunk(accumulate), strict=True):
        with autocast(images.device, precision):
            logits = forward(part)
        loss = F.cross_entropy(logits.float(), target, label_smoothing=label_smoothing)
        (loss / accumulate).backward()
        hits = (logits.argmax(dim=1) == target.argmax(dim=1)).float().mean()
        result += torch.stack((loss.detach(), hits)) / accumulate
    result = world.mean(result)
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    world.average(gradients)
    norm = nn.utils.get_total_norm(gradients)
    state.step += 1
    if not torch.isfinite(result[0] + norm):
        for buffer, old in buffers:  # batch norm has seen what must not be kept
            buffer.copy_(old)
        state.model.zero_grad(set_to_none=True)
        state.skipped += 1
        state.skipped_in_a_row += 1
        return torch.full_like(result, torch.nan)
    state.skipped_in_a_row = 0
    if clip_grad is not None:
        nn.utils.clip_grads_with_norm_(state.model.parameters(), clip_grad, norm)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if state.ema is not None:
        state.ema.update(state.model, state.step)
    return result
