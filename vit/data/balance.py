"""Classes of different sizes: balanced batches, and weights of the loss."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vit.seeding import generator


def balanced_batches(labels: Tensor, shape: tuple[int, int], seed: int, epoch: int) -> Tensor:
    """Draw an epoch in which every class is equally frequent, and divide it into batches.

    The epoch is as long as one of `vit.data.batches.epoch_batches`. It is a sequence of rounds,
    each with one image of every class in random order, so every batch is balanced too, up to two
    images per class. A class takes its images in random order, and starts again in another order
    when all have been taken: small classes are repeated, large ones are not seen completely.

    Args:
        labels: (N,) int64, on any device.
        shape: Steps and images per step, see `vit.data.batches.divide_epoch`.
        seed: Seed of the run.
        epoch: Number of the epoch; the result is a function of it and the seed.

    Returns:
        Indices into labels of the given shape, int64, on the CPU.
    """
    draw = generator(seed, "balanced epoch", epoch)
    labels = labels.cpu()
    counts = labels.bincount()
    members = labels.argsort(stable=True).split(counts[counts > 0].tolist())
    rounds = -(-math.prod(shape) // len(members))
    columns = []
    for images in members:
        repeats = -(-rounds // len(images))
        order = torch.rand(repeats, len(images), generator=draw).argsort(dim=1)
        columns.append(images[order.flatten()[:rounds]])
    chosen = torch.stack(columns, dim=1)  # (rounds, classes)
    shuffled = chosen.gather(1, torch.rand(chosen.shape, generator=draw).argsort(dim=1))
    return shuffled.flatten()[: math.prod(shape)].view(shape)


def class_weights(counts: Sequence[int]) -> Tensor:
    """Weigh classes by their inverse frequency, as scikit-learn's class_weight="balanced" does.

    With N images, C classes and n_c images of class c, its weight is N / (C n_c). Its mean over the
    training images is 1, so the loss keeps its scale. Given to
    `torch.nn.functional.cross_entropy` with probabilities q as targets, the loss of B images is

        -1/B Σ_b Σ_c weight_c q_bc log p_bc.

    It is divided by the number of images, not by the sum of their weights, so the mean over
    micro-batches or processes is that of the whole batch. With mixup, cutmix and label smoothing,
    the weights apply to each class's part of a target.

    Args:
        counts: Number of training images of each of the C classes, at least 1.

    Returns:
        (C,) float32.
    """
    images = torch.tensor(counts, dtype=torch.float32)
    return images.sum() / (len(counts) * images)
