"""The order of the training images: a pure function of seed and epoch."""

import torch
from torch import Tensor

from vit.seeding import generator


def steps_per_epoch(num_images: int, batch_size: int) -> int:
    """Return the number of full batches in an epoch; the remaining images are left out.

    Raises:
        ValueError: A batch is larger than the training set.
    """
    if batch_size > num_images:
        several = 2 ** max(num_images // 4, 1).bit_length() // 2  # a power of two, in four steps
        raise ValueError(
            f"train.batch_size: {batch_size} is more than the {num_images} training images; use "
            f"--train.batch_size {several}"
        )
    return num_images // batch_size


def epoch_batches(num_images: int, batch_size: int, seed: int, epoch: int) -> Tensor:
    """Shuffle the indices of all images and divide them into batches.

    Returns:
        (steps, batch_size) int64 indices without repetition.
    """
    steps = steps_per_epoch(num_images, batch_size)
    order = torch.randperm(num_images, generator=generator(seed, "epoch", epoch))
    return order[: steps * batch_size].view(steps, batch_size)
