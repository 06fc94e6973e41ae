"""Choosing images at random: subsets and splits as pure functions of labels and a seed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vit.seeding import generator

MAX_LISTED = 20  # classes whose image counts are listed one by one
LARGE_SET = 10_000  # images from which on `HELD_OUT` are held out by default
HELD_OUT, HELD_OUT_FRACTION = 1000, 0.1
TEST_FRACTION = 0.2


def balanced_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, with equal numbers per class as far as the classes allow.

    Args:
        labels: (N,) int64.
        count: Number of images to choose, 0 to N.
        seed: Seed of the run.
        purpose: What the images are for; different purposes give independent choices.

    Returns:
        (count,) int64, ascending indices into labels.

    Raises:
        ValueError: count is larger than N.
    """
    if count > len(labels):
        raise ValueError(f"{purpose}: {count} images requested, but there are only {len(labels)}")
    order, turn, _ = _random_turns(labels, seed, purpose)
    chosen = order[turn.argsort(stable=True)[:count]]
    return chosen.sort().values


def stratified_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, in proportion to the class sizes, leaving at least one per class.

    Each class gets its proportional number, rounded by the Webster method. For classes of equal
    size this is the same choice as `balanced_subset`.

    Args:
        labels: (N,) int64.
        count: Number of images to choose, 0 to N - C for C classes.
        seed: Seed of the run.
        purpose: What the images are for; different purposes give independent choices.

    Returns:
        (count,) int64, ascending indices into labels.
    """
    order, turn, size = _random_turns(labels, seed, purpose)
    assert count <= (turn < size - 1).sum()
    priority = (turn + 0.5) / size
    priority[turn == size - 1] = torch.inf  # the last image of a class stays
    chosen = order[priority.argsort(stable=True)[:count]]
    return chosen.sort().values


def fraction_per_class(labels: Tensor, fraction: float, seed: int, purpose: str) -> Tensor:
    """Choose a fraction of each class at random, rounded: at least one image, but never all.

    Args:
        labels: (N,) int64.
        fraction: 0 up to, not including, 1; 0 chooses none.
        seed: Seed of the run.
        purpose: What the images are for; different purposes give independent choices.

    Returns:
        (n,) int64, ascending indices into labels. A class with a single image gives none.
    """
    order, turn, size = _random_turns(labels, seed, purpose)
    least = 1 if fraction > 0 else 0
    number = (size * fraction).round().clamp(min=least).minimum(size - 1)
    return order[turn < number].sort().values


def split_off_test(labels: Tensor, fraction: float | None) -> Tensor:
    """Choose the test images of a set that names none; they do not depend on the run's seed.

    Args:
        labels: (N,) int64.
        fraction: Fraction of each class; None is `TEST_FRACTION`.

    Returns:
        (N,) bool, True for the test images.
    """
    chosen = fraction_per_class(labels, fraction or TEST_FRACTION, 0, "data.test_fraction")
    return torch.zeros(len(labels), dtype=torch.bool).index_fill(0, chosen, True)


def require_classes(key: str, place: object, classes: Sequence[str]) -> None:
    """Check that there is something to tell apart.

    Raises:
        ValueError: There are less than two classes.
    """
    if len(classes) < 2:
        raise ValueError(
            f"{key}: {place} has a single class, {classes[0]}; a classifier needs at least two"
        )


def held_out(labels: Tensor, classes: Sequence[str], size: float | None, seed: int) -> Tensor:
    """Choose the images to hold out from training, stratified by class.

    Args:
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names, for the message.
        size: Number of images; a fraction of each class, if less than 1; None means 1,000 of a set
            of at least 10,000 images, and a tenth of each class of a smaller one.
        seed: Seed of the run.

    Returns:
        (n,) int64, ascending indices into labels.

    Raises:
        ValueError: A class would be left without training images.
    """
    if size is None:
        size = HELD_OUT if len(labels) >= LARGE_SET else HELD_OUT_FRACTION
    if size < 1:
        return fraction_per_class(labels, size, seed, "data.val_size")
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    most = sum(max(n - 1, 0) for n in counts)
    if size > most:
        raise ValueError(
            f"data.val_size: {size} is not allowed; it must be a fraction such as 0.1, or "
            f"at most {most}, because every class keeps at least one training image "
            f"({describe_counts(classes, counts)})"
        )
    return stratified_subset(labels, int(size), seed, "data.val_size")


def held_out_beside(train_size: int, size: float | None) -> int:
    """Return how many images to hold out beside `train_size` training images, see `held_out`."""
    if size is None:
        return HELD_OUT
    return round(train_size * size / (1 - size)) if size < 1 else int(size)


def _random_turns(labels: Tensor, seed: int, purpose: str) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffle images; number them within their classes.

    Returns:
        A permutation (N,), and for each image in that order its number within its class, from 0,
        and the size of its class.
    """
    order = torch.randperm(len(labels), generator=generator(seed, purpose))
    _, label, sizes = labels[order].unique(return_inverse=True, return_counts=True)
    by_class = label.argsort(stable=True)
    first = (sizes.cumsum(dim=0) - sizes)[label[by_class]]  # in by_class, of the same class
    turn = torch.empty_like(order)
    turn[by_class] = torch.arange(len(labels)) - first
    return order, turn, sizes[label]


def describe_counts(classes: Sequence[str], counts: Sequence[int]) -> str:
    """List the number of images of each class, or summarize them if there are many classes."""
    low, high = min(counts), max(counts)
    if low == high:
        return f"{low:,} in each of {len(classes)} classes"
    if len(classes) > MAX_LISTED:
        return f"{low:,} to {high:,} in each of {len(classes)} classes"
    return ", ".join(f"{name} {n:,}" for name, n in zip(classes, counts, strict=True))
