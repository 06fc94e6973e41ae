"""References for attention maps: what calling a model many times tells about an image.

None reads attention. They take from 16 to thousands of passes and show what a map could achieve.
Hidden patches have the mean colour of the training images, which is 0 after normalization.

Each takes a function from normalized images to logits (B, C), images (B, channels, height, width),
the grid (rows, columns) of patches, and the explained classes (B,) int64.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor, nn

from vit.seeding import generator

Classify = Callable[[Tensor], Tensor]


def to_pixels(patches: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge values of patches (B, rows, columns) to a height and width: (B, 1, H, W)."""
    tall = patches.repeat_interleave(size[0] // patches.shape[1], dim=1)
    return tall.repeat_interleave(size[1] // patches.shape[2], dim=2)[:, None]


def to_patches(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """Average maps of pixels (B, height, width) over each patch; leave (B, rows, columns) as is."""
    return nn.functional.adaptive_avg_pool2d(maps[:, None], grid)[:, 0]


def mean_colour(images: Tensor, hidden: Tensor) -> Tensor:
    """Replace hidden pixels by the mean colour of the training images."""
    return images.masked_fill(hidden, 0.0)


@torch.no_grad()
def occlusion(classify: Classify, images: Tensor, grid: tuple[int, int], target: Tensor) -> Tensor:
    """Measure by how much a class's logit falls when a single patch is hidden (arXiv 1311.2901).

    Maps (B, rows, columns) are in units of the logit, and negative where the class gains.
    """
    before = _of_class(classify(images), target)
    patches = torch.eye(grid[0] * grid[1], device=images.device).bool().unflatten(1, grid)
    falls = [
        before - _of_class(classify(mean_colour(images, part)), target)
        for part in to_pixels(patches, images.shape[-2:])
    ]
    return torch.stack(falls, dim=1).unflatten(1, grid)


@torch.enable_grad()
def integrated_gradients(
    classify: Classify, images: Tensor, target: Tensor, steps: int = 16
) -> Tensor:
    """Compute integrated gradients from the mean colour to the image (arXiv 1703.01365).

    The gradients are taken in the middle of equally long steps. With many, the values of an image,
    (channels, height, width), add up to the difference between its logit and the mean colour's.
    """
    total = torch.zeros_like(images)
    for step in range(steps):
        inputs = (images.detach() * ((step + 0.5) / steps)).requires_grad_()
        (gradient,) = torch.autograd.grad(_of_class(classify(inputs), target).sum(), inputs)
        total += gradient
    return images.detach() * total / steps


def integrated_gradients_of_patches(
    classify: Classify, images: Tensor, grid: tuple[int, int], target: Tensor
) -> Tensor:
    """Average `integrated_gradients` over each patch: (B, rows, columns)."""
    return to_patches(integrated_gradients(classify, images, target).sum(dim=1), grid)


@torch.no_grad()
def rise(
    classify: Classify,
    images: Tensor,
    grid: tuple[int, int],
    target: Tensor,
    num_masks: int = 1000,
    random: Generator | None = None,
) -> Tensor:
    """Estimate how much a patch raises a class's probability if others are hidden at random.

    Each mask hides every patch with probability 1/2. Maps (B, rows, columns), -1 to 1, are the mean
    probability of the class where a patch is shown, minus that where it is hidden. This orders
    patches like RISE (arXiv 1806.07421), which is the first of the two means, but with less noise;
    its expected value is the patch's Banzhaf value (arXiv 2205.15466). Masks are the same for all
    images and, without random, in every call. They come in pairs, one the inverse of the other.
    """
    random = random or generator(0, "rise")
    total = torch.zeros(len(images), *grid, device=images.device)
    for _ in range(num_masks // 2):
        hidden = (torch.rand(1, *grid, generator=random) < 0.5).to(images.device)
        part = to_pixels(hidden, images.shape[-2:])
        shown, inverse = (
            _of_class(classify(mean_colour(images, mask)).softmax(dim=1), target)
            for mask in (part, ~part)
        )
        total += (shown - inverse)[:, None, None] * (1 - 2 * hidden.float())
    return total * 2 / num_masks


def _of_class(values: Tensor, target: Tensor) -> Tensor:
    """Return the value of the target class, (B,) float32."""
    return values.float().gather(1, target[:, None])[:, 0]
