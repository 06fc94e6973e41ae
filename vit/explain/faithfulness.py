"""How far a map can be believed: hide what it calls important, and see whether the model minds.

Patches are hidden by the mean colour of the training images, which is 0 once normalised. Inserting
the k most important patches into an empty image is the same picture as deleting the others, so one
set of forward passes gives the deletion and the insertion curve. Every map is to be compared with
`random_maps` and with `centred_map`: objects on photographs stand in the middle.

Shapes: B images, K levels, P patches.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from vit.hardware import device_for
from vit.seeding import generator

LEVELS = tuple(percent / 100 for percent in range(10, 100, 10))  # shares of the patches


def random_maps(count: int, grid_size: tuple[int, int], seed: int) -> Tensor:
    """Draw maps that know nothing: (count, rows, columns), 0 to 1."""
    return torch.rand(count, *grid_size, generator=generator(seed, "random maps"))


def centred_map(grid_size: tuple[int, int]) -> Tensor:
    """Return a Gaussian around the middle, a quarter of each side wide: (rows, columns)."""
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
) -> tuple[Tensor, Tensor]:
    """Hide more and more patches, the most and the least important first.

    Args:
        classify: Maps normalized images to logits, such as `Classifier.forward`.
        images: (B, channels, H, W), normalized, on the classifier's device.
        maps: (B, rows, columns), more is more important; of equals the earlier counts as more.
        target: (B,) int64, the class whose probability is followed.
        levels: K shares of the patches to hide, 0 to 1.
        batch_size: Images at a time.

    Returns:
        The target's probability with the most important patches hidden first (MoRF), and with the
        least important hidden first (LeRF), each (K, B).
    """
    count = maps[0].numel()
    order = maps.flatten(1).argsort(dim=1, descending=True, stable=True)
    rank = order.argsort(dim=1).unflatten(1, maps.shape[1:]).to(images.device)
    patch = images.shape[-2] // maps.shape[-2], images.shape[-1] // maps.shape[-1]
    rank = rank.repeat_interleave(patch[0], dim=1).repeat_interleave(patch[1], dim=2)[:, None]
    target = target.to(images.device)

    def probability(hidden: Tensor) -> Tensor:
        parts = []
        for part, mask, aim in zip(
            images.split(batch_size), hidden.split(batch_size), target.split(batch_size),
            strict=True,
        ):  # fmt: skip
            logits = classify(part.masked_fill(mask, 0.0))
            parts.append(logits.softmax(dim=1).gather(1, aim[:, None])[:, 0])
        return torch.cat(parts)

    hidden = [round(level * count) for level in levels]
    morf = torch.stack([probability(rank < number) for number in hidden])
    lerf = torch.stack([probability(rank >= count - number) for number in hidden])
    return morf, lerf


def faithfulness(morf: Tensor, lerf: Tensor) -> dict[str, Tensor]:
    """Turn curves into numbers for each image.

    Args:
        morf: (K, B), probability of the target with the most important patches hidden first.
        lerf: (K, B), with the least important hidden first.

    Returns:
        (B,) each: "deletion", the area under the MoRF curve (mean over levels; less is better);
        "insertion", the area under the insertion curve, which at levels symmetric around a half is
        the LeRF curve read backwards, to a patch (more is better); "lerf_morf", half their
        difference, -0.5 to 0.5: 0 is a map that knows nothing.
    """
    deletion, insertion = morf.mean(dim=0), lerf.mean(dim=0)
    return {
        "deletion": deletion,
        "insertion": insertion,
        "lerf_morf": (insertion - deletion) / 2,
    }


def with_baselines(maps: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Add to maps by kind, (B, rows, columns) each, the "random" and "centred" ones."""
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
) -> dict[str, dict[str, Tensor]]:
    """Put maps by kind to the test: what `faithfulness` returns, on the CPU, for each.

    Arguments as for `hiding_curves`.
    """
    scores = {}
    for kind, found in maps.items():
        curves = hiding_curves(classify, images, found, target, levels, batch_size)
        scores[kind] = {name: values.cpu() for name, values in faithfulness(*curves).items()}
    return scores


def pointing_game(maps: Tensor, masks: Tensor) -> Tensor:
    """Tell whether the strongest patch lies on the object (arXiv 1608.00507, for patches).

    Args:
        maps: (B, rows, columns).
        masks: (B, H, W) bool, True on the object.

    Returns:
        (B,), 1 where the object covers at least half of the strongest patch, 0 where it does not;
        where several are strongest, the share of them that hit.
    """
    covered = _patch_cover(masks, maps.shape[1:]) >= 0.5
    strongest = maps == maps.amax(dim=(1, 2), keepdim=True)
    return (strongest & covered).sum(dim=(1, 2)) / strongest.sum(dim=(1, 2))


def mask_iou(maps: Tensor, masks: Tensor) -> Tensor:
    """Compare the patches above the map's mean with the object: (B,), 0 to 1.

    Intersection over union is counted in pixels; it is 0 where both are empty. Arguments as for
    `pointing_game`.
    """
    values = maps.to(device_for("float64", maps.device)).double()  # float32 rounds below equals
    chosen = (values > values.mean(dim=(1, 2), keepdim=True)).to(maps.device)
    cover = _patch_cover(masks, maps.shape[1:])
    both = (cover * chosen).sum(dim=(1, 2))
    return both / (chosen.sum(dim=(1, 2)) + cover.sum(dim=(1, 2)) - both).clamp(min=1e-30)


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return the mean over images of (B,) and half the width of its 95 % interval (normal)."""
    values = values.to(device_for("float64", values.device)).double()
    spread = values.std().item() if len(values) > 1 else math.nan
    return values.mean().item(), 1.959964 * spread / math.sqrt(len(values))


def _patch_cover(masks: Tensor, grid_size: torch.Size) -> Tensor:
    """Return the share of each patch that an object covers, (B, rows, columns)."""
    return nn.functional.adaptive_avg_pool2d(masks.float()[:, None], (grid_size[0], grid_size[1]))[
        :, 0
    ]
