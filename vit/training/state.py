"""What a run carries from step to step, and the step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.config import Config
from vit.model.vit import VisionTransformer
from vit.seeding import fold_in
from vit.training.checkpoint import build_model
from vit.training.hardware import autocast
from vit.training.optim import build_optimizers


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
    """

    model: VisionTransformer
    optimizers: list[Optimizer]
    ema: Any = None
    step: int = 0
    seconds: float = 0.0
    total_steps: int = 0

    def evaluated(self) -> VisionTransformer:
        """Return the model to evaluate, in evaluation mode: the average where there is one."""
        return (self.model if self.ema is None else self.ema.module).eval()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "total_steps": self.total_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.total_steps = state["total_steps"]


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
        model, optim.name, optim.lr, optim.weight_decay, optim.muon_lr, optim.muon_weight_decay
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
) -> tuple[Tensor, Tensor]:
    """Update the weights once.

    Args:
        state: Is changed in place.
        forward: The model, possibly compiled.
        images: (B, 3, H, W) float32, normalised.
        targets: (B, C) float32, probabilities.
        precision: Of matrix products.
        label_smoothing: 0 to 1.
        clip_grad: Largest norm of the gradient, or None.
        accumulate: Equal parts the batch is computed in; divides B. Batch norm sees one part
            at a time.

    Returns:
        The mean loss and the share of images classified right, 0-d, still on the device.
    """
    state.model.train()
    loss_sum = torch.zeros((), device=images.device)
    hits = torch.zeros((), device=images.device)
    for part, target in zip(images.chunk(accumulate), targets.chunk(accumulate), strict=True):
        with autocast(images.device, precision):
            logits = forward(part)
        loss = F.cross_entropy(logits.float(), target, label_smoothing=label_smoothing)
        (loss / accumulate).backward()
        loss_sum += loss.detach() / accumulate
        hits += (logits.argmax(dim=1) == target.argmax(dim=1)).sum()
    if clip_grad is not None:
        nn.utils.clip_grad_norm_(state.model.parameters(), clip_grad)
    for optimizer in state.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    state.step += 1
    if state.ema is not None:
        state.ema.update(state.model, state.step)
    return loss_sum, hits / len(images)
