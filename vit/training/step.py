"""The training step: augment a batch and update the weights.

Shapes: B batch, C classes, H height, W width.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit.data.augment import augment, shrink
from vit.data.config import AugmentConfig
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.distributed.shard import averages_gradients, synchronize, to_full
from vit.distributed.world import World
from vit.hardware import autocast
from vit.model.dropout import image_keys, keyed_dropout
from vit.seeding import Draws, fold_in
from vit.training.optim import set_lr
from vit.training.schedule import Schedule
from vit.training.state import TrainState
from vit.training.teacher import Teacher


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step; the training loop, the time budget and the benchmarks all call it.

    Each process of the world computes an equal part of the batch. Every random number is a function
    of the seed, the step and the position of an image in the whole batch, whatever the number of
    processes. Only dropout of timm models and whole attention modules depends on the process.
    """

    state: TrainState  # changed in place
    forward: nn.Module  # the model, possibly compiled and replicated; with features, its head
    preprocess: Preprocess
    classes: tuple[str, ...]
    schedule: Schedule
    augmentation: AugmentConfig
    label_smoothing: float  # probability mass spread over all classes, 0 to 1
    clip_grad: float | None  # maximum norm of the gradient; None disables clipping
    accumulate: int  # micro-batches of a process's part of a batch; batch norm sees one at a time
    precision: torch.dtype  # of matrix products
    seed: int
    world: World = World()  # noqa: RUF009
    teacher: Teacher | None = None
    class_weights: Tensor | None = None  # (C,), in the loss, see `vit.data.sampling`
    # What the head of a frozen model gets for each image, (N, D) float32; None if this changes.
    features: Tensor | None = None
    compiled: bool = False  # whether `forward` is
    # FLOP of a step by image size, in the main process, where they could be counted.
    flop: dict[tuple[int, int], float] = field(default_factory=dict)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        """Train on a process's images (B, channels, H, W) uint8 and labels (B,) int64 of a batch.

        Returns:
            (2,): mean loss and accuracy over all processes, on the device; NaN if the step was
            skipped because loss or gradient was not finite.
        """
        step = self.state.step
        inputs, targets = self.prepare(images, labels)
        set_lr(self.state.optimizers, self.schedule.lr_factor(step))
        if self.state.flop is not None:
            flop = self.flop.get(self.schedule.image_size(step))
            self.state.flop = None if flop is None else self.state.flop + flop
        # For dropout in a timm model. The first process has the seed of a single-process run.
        seed = fold_in(self.seed, "rank", self.world.rank) if self.world.rank else self.seed
        torch.manual_seed(fold_in(seed, "dropout", step))
        return self.update(inputs, targets)

    def batches(self, training: ImageSet, indices: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's images, or their features, and labels for indices (steps, B)."""
        if self.features is not None:
            training = replace(training, images=self.features)
        return training.batches(self.world.part(indices.T).T)

    def prepare(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Augment images (B, channels, H, W) uint8, shrink them, and ask the teacher if any.

        Returns:
            Images (B, channels, H, W) float32, normalized, or features (B, D) as they are; and
            targets (B, C), probabilities.
        """
        step, device = self.state.step, images.device
        targets = F.one_hot(labels, len(self.classes)).float()
        if self.features is not None:
            return images, targets
        count, first = len(images), self.world.rank * len(images)
        seed = fold_in(self.seed, "augment", self.state.step)
        draws = Draws(seed, self.world.size * count, slice(first, first + count), device)
        settings, mixes = self.augmentation, self.schedule.mixes(step)
        images, targets = augment(images, targets, self.preprocess, draws, settings, mixes)
        images = shrink(images, self.schedule.image_size(step))
        return images, targets if self.teacher is None else self.teacher.mix(images, targets)

    def update(self, images: Tensor, targets: Tensor) -> Tensor:
        """Update the weights with what `prepare` returned; return the same as `__call__`.

        A step whose loss or gradient is not finite changes nothing but the step counts.
        """
        state = self.state
        buffers = [(buffer, buffer.clone()) for buffer in state.model.buffers()]
        result = self.backward(images, targets)
        gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
        self.world.average([result, *([] if averages_gradients(self.forward) else gradients)])
        norm = to_full(nn.utils.get_total_norm(gradients))
        state.step += 1
        if not torch.isfinite(result[0] + norm):
            for buffer, old in buffers:  # undo the update of batch-norm statistics
                buffer.copy_(old)
            state.model.zero_grad(set_to_none=True)
            state.skipped += 1
            state.skipped_in_a_row += 1
            return torch.full_like(result, torch.nan)
        state.skipped_in_a_row = 0
        if self.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(state.model.parameters(), self.clip_grad, norm)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if state.ema is not None:
            state.ema.update(state.model, state.step)
        return result

    def _soft(self, targets: Tensor) -> Tensor:
        """Weigh and smooth targets (B, C); the mass spread over all classes has the label's weight.

        So a rare class does not attract the images of others, which happens if targets are smoothed
        first, as torch does.
        """
        if self.class_weights is not None:
            targets = targets * self.class_weights
        return torch.lerp(targets, targets.mean(dim=1, keepdim=True), self.label_smoothing)

    def backward(self, images: Tensor, targets: Tensor) -> Tensor:
        """Accumulate the gradient over the micro-batches; return mean loss and accuracy, (2,).

        If `forward` averages gradients over the processes, it does so in the last micro-batch.
        """
        self.state.model.train(not self.state.frozen)
        result = torch.zeros(2, device=images.device)
        seed, count = fold_in(self.seed, "dropout", self.state.step), len(images)
        batch = (images, targets, image_keys(seed, self.world.rank * count, count, images.device))
        parts = zip(*(tensor.chunk(self.accumulate) for tensor in batch), strict=True)
        for number, (part, target, keys) in enumerate(parts, start=1):
            synchronize(self.forward, number == self.accumulate)
            with keyed_dropout(self.state.model, keys):
                with autocast(images.device, self.precision):
                    logits = self.forward(part)
                loss = F.cross_entropy(logits.float(), self._soft(target))
                (loss / self.accumulate).backward()
            hits = (logits.argmax(dim=1) == target.argmax(dim=1)).float().mean()
            result += torch.stack((loss.detach(), hits)) / self.accumulate
        return result
