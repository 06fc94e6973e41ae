"""The order of the training images: a pure function of seed and epoch."""

import math

import torch
from torch import Tensor

from vit.seeding import generator

LARGE = 50  # batches in a set; whole batches leave out less than 2% of it
COMMON = 8  # images; with a multiple of them, 1, 2 or 4 processes train on the same batches


def divide_epoch(
    num_images: int, batch_size: int, parts: int = 1, steps: int | None = None
) -> tuple[int, int]:
    """Choose the number of steps in an epoch and of images in each.

    In a set of at least 50 batches, an epoch leaves out the rest. In a smaller one, batches have
    fewer images if necessary, so that an epoch uses all of them.

    Args:
        num_images: Number of training images.
        batch_size: Largest number of images per step, a multiple of `parts`.
        parts: Number of equal parts that a batch is divided into.
        steps: The number of steps that a run began with; None chooses it.

    Returns:
        Steps, and images per step: a multiple of `parts`, and of twice as many if `batch_size` is.
    """
    if steps is None:
        large = num_images >= LARGE * batch_size
        steps = num_images // batch_size if large else -(-num_images // batch_size)
    if steps * batch_size <= num_images:
        return steps, batch_size
    unit = math.lcm(math.gcd(batch_size, COMMON), parts * math.gcd(batch_size // parts, 2))
    return steps, unit * -(-num_images // (steps * unit))


def epoch_batches(num_images: int, shape: tuple[int, int], seed: int, epoch: int) -> Tensor:
    """Shuffle the indices of all images and divide them into batches.

    Where these have room for more images, the last one is filled up with images of the first.

    Returns:
        int64 indices of the given shape: steps, and images per step, see `divide_epoch`.
    """
    order = torch.randperm(num_images, generator=generator(seed, "epoch", epoch))
    return order[torch.arange(math.prod(shape)) % num_images].view(shape)
