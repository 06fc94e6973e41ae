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
from torch import Tensor

from vit.explain.faithfulness import Filling, mean_colour
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
        ValueError: The name is unknown, or there is no other image.
    """
    if name not in FILLINGS:
        raise ValueError(f"filling: {name!r} is not allowed; it must be {', '.join(FILLINGS)}")
    if name == "mean":
        return mean_colour
    if name == "blur":
        return _from_images(blurred(images))
    if name == "other":
        if len(images) == 1:
            raise ValueError("filling: 'other' takes patches of other images; use two or more")
        return _from_images(images[derangement(len(images), seed).to(images.device)])
    noise = NOISE * torch.randn(images.shape, generator=generator(seed, "imputation"))
    noise = noise.to(images.device)
    return lambda images, hidden: impute(images, hidden) + noise * hidden


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
    weight 1/6 and diagonal ones 1/12, and at the border those that exist are scaled to sum to 1.
    This linear system is solved by conjugate gradients, for all images at once. If all pixels of an
    image are hidden, they get the mean colour.

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
    """Do the work of `impute`, without splitting.

    The system is D x = N x at hidden pixels, with N the sum over neighbours and D the sum of their
    weights. D - N is symmetric and positive definite there, and D serves as preconditioner.
    """
    down, across = (_neighbours(side, images) for side in images.shape[-2:])

    def neighbours(x: Tensor) -> Tensor:
        """Sum the neighbours: 1 2 1 down times 1 2 1 across, without the pixel in the middle."""
        return (down @ x @ across - 4 * x) / 12

    def dot(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum(dim=(-2, -1), keepdim=True)

    weights = neighbours(torch.ones_like(images[:1, :1]))
    known = images.masked_fill(hidden, 0.0)
    residual = neighbours(known) * hidden  # of the solution 0
    solution = torch.zeros_like(images)
    direction = residual / weights
    error = dot(residual, direction)
    goal = tolerance**2 * error
    for _ in range(images.shape[-2] * images.shape[-1]):  # more are not needed for any tolerance
        if not (error > goal).any():
            break
        change = (weights * direction - neighbours(direction)) * hidden
        length = error / dot(direction, change).clamp(min=1e-30)
        solution += length * direction
        residual -= length * change
        scaled = residual / weights
        previous, error = error, dot(residual, scaled)
        direction = scaled + error / previous.clamp(min=1e-30) * direction
    return known + solution


def _neighbours(side: int, like: Tensor) -> Tensor:
    """Return the matrix (side, side) that adds twice each value and its two neighbours."""
    ones = torch.ones(side, dtype=like.dtype, device=like.device)
    return 2 * ones.diag() + ones[1:].diag(1) + ones[1:].diag(-1)


def _from_images(others: Tensor) -> Filling:
    """Return the filling that takes hidden pixels from other images."""
    return lambda images, hidden: torch.where(hidden, others, images)
