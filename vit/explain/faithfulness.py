"""Faithfulness of maps: how the prediction changes when important patches are hidden.

Hidden patches get the mean colour of the training images, which is 0 after normalization, or
another filling (`benchmarks/maps/filling.py` has some). Inserting the k most important patches into
an image that is filled everywhere is the same as deleting all others, so one set of forward passes
gives both the deletion and the insertion curve. Compare every map with the baselines `random_maps`
and `centred_map`: the object of a photo is usually in the middle.

Shapes: B images, K levels, P patches.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit.seeding import generator

Filling = Callable[[Tensor, Tensor], Tensor]  # images, hidden pixels (B, 1, H, W) -> images
LEVELS = tuple(percent / 100 for percent in range(10, 100, 10))  # fractions of hidden patches


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


def random_maps(count: int, grid_size: tuple[int, int], seed: int) -> Tensor:
    """Return random maps, a baseline: (count, rows, columns), 0 to 1."""
    return torch.rand(count, *grid_size, generator=generator(seed, "random maps"))


def centred_map(grid_size: tuple[int, int]) -> Tensor:
    """Return a centred Gaussian, a baseline: (rows, columns), 0 to 1.

    Its standard deviation is a quarter of each side.
    """
    down, across = (
        torch.exp(-0.5 * ((torch.arange(n) + 0.5 - n / 2) / (n / 4)) ** 2) for n in grid_size
    )
    return down[:, None] * across


@torch.no_grad()
def hiding_curves(
    classify: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: Tensor,
    target: Tensor,
    levels: Sequence[float] = LEVELS,
    batch_size: int = 500,
    fill: Filling = mean_colour,
) -> tuple[Tensor, Tensor]:
    """Measure the probability of a class while more and more patches are hidden.

    Args:
        classify: Maps normalized images to logits, such as `Classifier.forward`.
        images: (B, channels, H, W), normalized, on the classifier's device.
        maps: (B, rows, columns); patches with larger values are more important, and among equal
            values the first.
        target: (B,) int64, the class whose probability is measured.
        levels: K fractions of the patches to hide, 0 to 1.
        batch_size: Images per forward pass.
        fill: Replaces hidden pixels, such as `mean_colour`. It is called with all B images.

    Returns:
        The target's probability with the most important patches hidden first (MoRF), and with the
        least important hidden first (LeRF), each (K, B).
    """
    count = maps[0].numel()
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1).unflatten(1, maps.shape[1:]).to(images.device)
    rank = to_pixels(rank, images.shape[-2:])
    target = target.to(images.device)

    def probability(hidden: Tensor) -> Tensor:
        filled = fill(images, hidden).split(batch_size)
        parts = []
        for part, aim in zip(filled, target.split(batch_size), strict=True):
            parts.append(classify(part).softmax(dim=1).gather(1, aim[:, None])[:, 0])
        return torch.cat(parts)

    hidden = [round(level * count) for level in levels]
    morf = torch.stack([probability(rank < number) for number in hidden])
    lerf = torch.stack([probability(rank >= count - number) for number in hidden])
    return morf, lerf


def faithfulness(morf: Tensor, lerf: Tensor) -> dict[str, Tensor]:
    """Compute the faithfulness of each image's map from its curves.

    Args:
        morf: (K, B), probability of the target with the most important patches hidden first.
        lerf: (K, B), with the least important hidden first.

    Returns:
        (B,) each: "deletion", the area under the MoRF curve (mean over levels; lower is better);
        "insertion", the area under the insertion curve (higher is better), which is the LeRF curve
        read backwards if the levels are symmetric around 0.5; "lerf_morf", half their difference,
        -0.5 to 0.5: 0 on average for a map that does not depend on the image.
    """
    deletion, insertion = morf.mean(dim=0), lerf.mean(dim=0)
    return {
        "deletion": deletion,
        "insertion": insertion,
        "lerf_morf": (insertion - deletion) / 2,
    }


def with_baselines(maps: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Add the "random" and "centred" baselines to maps by kind, (B, rows, columns) each."""
    shape = next(iter(maps.values())).shape
    grid = (shape[1], shape[2])
    return {
        **maps,
        "random": random_maps(shape[0], grid, seed),
        "centred": centred_map(grid).expand(shape),
    }


def score_maps(
    classify: Callable[[Tensor], Tensor],
    images: Tensor,
    maps: dict[str, Tensor],
    target: Tensor,
    levels: Sequence[float] = LEVELS,
    batch_size: int = 500,
    fill: Filling = mean_colour,
) -> dict[str, dict[str, Tensor]]:
    """Compute `faithfulness` for each kind of map, on the CPU.

    Arguments are those of `hiding_curves`, with `maps` by kind.
    """
    scores = {}
    for kind, found in maps.items():
        curves = hiding_curves(classify, images, found, target, levels, batch_size, fill)
        scores[kind] = {name: values.cpu() for name, values in faithfulness(*curves).items()}
    return scores


def pointing_game(maps: Tensor, masks: Tensor) -> Tensor:
    """Test whether the strongest patch is on the object (arXiv 1608.00507, for patches).

    Args:
        maps: (B, rows, columns).
        masks: (B, H, W) bool, True on the object.

    Returns:
        (B,): 1 if the object covers at least half of the strongest patch, otherwise 0; if several
        patches are equally strong, the fraction of them that the object covers.
    """
    covered = to_patches(masks.float(), (maps.shape[1], maps.shape[2])) >= 0.5
    strongest = maps == maps.amax(dim=(1, 2), keepdim=True)
    return (strongest & covered).sum(dim=(1, 2)) / strongest.sum(dim=(1, 2))


def mask_iou(maps: Tensor, masks: Tensor) -> Tensor:
    """Compute the IoU of the patches above the map's mean with the object: (B,), 0 to 1.

    Areas are counted in pixels; the IoU is 0 if both are empty. Arguments are those of
    `pointing_game`.
    """
    # In float32, the mean of equal values may be below them.
    values = maps.cpu().double()
    chosen = (values > values.mean(dim=(1, 2), keepdim=True)).to(maps.device)
    cover = to_patches(masks.float(), (maps.shape[1], maps.shape[2]))
    both = (cover * chosen).sum(dim=(1, 2))
    return both / (chosen.sum(dim=(1, 2)) + cover.sum(dim=(1, 2)) - both).clamp(min=1e-30)


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return the mean of values (B,) and half the width of its 95% confidence interval.

    The interval is that of the normal approximation; NaN for a single value.
    """
    values = values.cpu().double()
    spread = values.std().item() if len(values) > 1 else math.nan
    return values.mean().item(), 1.959964 * spread / math.sqrt(len(values))
