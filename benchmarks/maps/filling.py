"""Fillings: what hidden patches are replaced with when the faithfulness of a map is measured.

A model has never seen an image with holes, so a score depends on what the holes are filled with. A
filling is a function of normalized images, (B, channels, H, W), and hidden pixels, (B, 1, H, W)
bool, that returns the images with new values at the hidden pixels and nowhere else:

    mean     the mean colour of the training images
    blur     the image itself, strongly blurred
    other    another image at the same place
    linear   interpolated from the visible pixels, with a little noise

Shapes: B images, H x W pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.explain.references import mean_colour
from vit.reporting.faithfulness import Filling
from vit.seeding import generator

FILLINGS = {
    "mean": "mean colour",
    "blur": "blurred image",
    "other": "another image",
    "linear": "linear imputation",
}
NOISE = 0.01  # standard deviation of the noise of linear imputation, as in arXiv 2202.00449
BLUR = 1 / 8  # standard deviation of the blur, as a fraction of each side
PART = 64  # images whose pixels are imputed together, so that they stay in the cache


def make_filling(name: str, images: Tensor, seed: int = 0) -> Filling:
    """Prepare a filling for images; it is called with the same images and any hidden pixels.

    Args:
        name: Key of `FILLINGS`.
        images: (B, channels, H, W), normalized: 0 is the mean colour.
        seed: Seed of the other image of each image, and of the noise.

    Raises:
        ValueError: There is no other image.
    """
    if name == "mean":
        return mean_colour
    if name == "linear":
        noise = NOISE * torch.randn(images.shape, generator=generator(seed, "imputation"))
        noise = noise.to(images.device)
        return lambda images, hidden: impute(images, hidden) + noise * hidden
    if name == "other" and len(images) == 1:
        raise ValueError("filling: 'other' takes patches of other images; use two or more")
    others = blurred(images) if name == "blur" else images[derangement(len(images), seed)]
    return lambda images, hidden: torch.where(hidden, others, images)


def blurred(images: Tensor) -> Tensor:
    """Blur images (B, channels, H, W) by a Gaussian with a deviation of an eighth of each side."""
    from torchvision.transforms.functional import gaussian_blur  # late because it is slow

    sigmas = [BLUR * side for side in images.shape[:-3:-1]]  # torchvision takes x before y
    return gaussian_blur(images, [2 * round(3 * sigma) + 1 for sigma in sigmas], sigmas)


def derangement(count: int, seed: int) -> Tensor:
    """Return a random permutation (count,) that leaves no place as it was: one cycle of all."""
    cycle = torch.randperm(count, generator=generator(seed, "derangement"))
    other = torch.empty_like(cycle)
    other[cycle] = cycle.roll(1)
    return other


def impute(images: Tensor, hidden: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Interpolate hidden pixels linearly from visible ones (ROAD, arXiv 2202.00449).

    Every hidden pixel is the weighted mean of its neighbours, hidden or not: direct neighbours have
    weight 1/6 and diagonal ones 1/12, and at the border those that exist are scaled to sum to 1. If
    all pixels of an image are hidden, they get the mean colour.

    Args:
        images: (B, channels, H, W), normalized.
        hidden: (B, 1, H, W) bool.
        tolerance: Norm of the residual, relative to that of the right-hand side, at which to stop.

    Returns:
        Images of the same shape; visible pixels are unchanged.
    """
    parts = zip(images.split(PART), hidden.split(PART), strict=True)
    return torch.cat([_impute(part, mask, tolerance) for part, mask in parts])


def _impute(images: Tensor, hidden: Tensor, tolerance: float) -> Tensor:
    """Solve the linear system of `impute` by conjugate gradients, for all images at once.

    It is D x = N x at hidden pixels, with N the sum over neighbours and D the sum of their weights.
    D - N is symmetric and positive definite there, and D serves as preconditioner.
    """
    kernel = torch.tensor([[[[1, 2, 1], [2, 0, 2], [1, 2, 1]]]]).to(images) / 12

    def neighbours(x: Tensor) -> Tensor:
        return F.conv2d(x.flatten(0, 1)[:, None], kernel, padding=1).view(x.shape)

    def dot(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(dim=(-2, -1), keepdim=True)

    weights = neighbours(torch.ones_like(images[:1, :1]))
    known = images.masked_fill(hidden, 0.0)
    residual = neighbours(known) * hidden  # of the solution 0
    solution = torch.zeros_like(images)
    direction = residual / weights
    error = dot(residual, direction)
    goal = tolerance**2 * error
    while (error > goal).any():
        change = (weights * direction - neighbours(direction)) * hidden
        length = error / dot(direction, change).clamp(min=1e-30)
        solution += length * direction
        residual -= length * change
        scaled = residual / weights
        previous, error = error, dot(residual, scaled)
        direction = scaled + error / previous.clamp(min=1e-30) * direction
    return known + solution
