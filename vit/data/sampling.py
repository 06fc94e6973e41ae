"""Which images are used when: subsets, splits and batches, as pure functions of seed and epoch.

Labels are (N,) int64, 0 to C - 1, on any device. Subsets are ascending indices into them, int64 on
the CPU. Subsets for different purposes, named by a text, are independent.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vit.console import printable
from vit.seeding import generator
from vit.settings import require

MAX_LISTED = 20  # classes whose image counts are listed one by one
LARGE_SET = 10_000  # images from which on `HELD_OUT` are held out by default
HELD_OUT, HELD_OUT_FRACTION = 1000, 0.1
MANY_BATCHES = 50  # in a set; complete batches leave out less than 2% of it
COMMON = 8  # images; with a multiple of them, 1, 2 or 4 processes train on the same batches


def balanced_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, with equal numbers per class as far as the classes allow.

    All N are chosen if `count` is larger.
    """
    order, rank, _ = _random_ranks(labels, seed, purpose)
    return order[rank.argsort(stable=True)[:count]].sort().values


def stratified_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, in proportion to the class sizes, leaving at least one per class.

    Each class gets its proportional number, rounded by the Webster method. For classes of equal
    size this is the same choice as `balanced_subset`. count is at most N - C: (count,).
    """
    order, rank, size = _random_ranks(labels, seed, purpose)
    assert count <= (rank < size - 1).sum()
    priority = (rank + 0.5) / size
    priority[rank == size - 1] = torch.inf  # the last image of a class stays
    return order[priority.argsort(stable=True)[:count]].sort().values


def fraction_per_class(labels: Tensor, fraction: float, seed: int, purpose: str) -> Tensor:
    """Choose a fraction below 1 of each class at random, rounded: at least one image, never all.

    A class with a single image gives none.
    """
    order, rank, size = _random_ranks(labels, seed, purpose)
    number = (size * fraction).round().clamp(min=1).minimum(size - 1)
    return order[rank < number].sort().values


def together(labels: Tensor, first: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Choose images so that copies stay together: by the labels of the different images.

    first (N,) is the index of each image's first copy. Copies with several labels are not chosen. A
    class without two different images could not be split, so its copies do not stay together.
    """
    own, mixed = torch.arange(len(labels)), torch.isin(first, first[labels != labels[first]])
    few = labels[(first == own) & ~mixed].bincount(minlength=len(labels))[labels] < 2
    first = first.where(~few, own)
    different = ((first == own) & (few | ~mixed)).nonzero().squeeze(1)
    return torch.isin(first, different[choose(labels[different])]).nonzero().squeeze(1)


def held_out(labels: Tensor, classes: Sequence[str], size: float | None, seed: int) -> Tensor:
    """Choose the images to hold out from training, stratified by class.

    The size is a number of images; a fraction of each class, if less than 1; None means at most
    1,000 of a set of at least 10,000 images, and a tenth of each class of a smaller one.

    Raises:
        ValueError: A class would be left without training images.
    """
    counts = labels.bincount(minlength=len(classes)).tolist()
    most = sum(max(n - 1, 0) for n in counts)
    if size is None:
        size = min(HELD_OUT, most) if len(labels) >= LARGE_SET else HELD_OUT_FRACTION
    if 0 < size < 1:
        return fraction_per_class(labels, size, seed, "data.val_size")
    reason = f"every class keeps at least one training image ({describe_counts(classes, counts)})"
    allowed = f"a fraction such as 0.1, or at most {most}, because {reason}"
    require(size <= most, "data.val_size", size, allowed)
    return stratified_subset(labels, int(size), seed, "data.val_size")


def held_out_beside(train_size: int, size: float | None) -> int:
    """Return how many images to hold out beside `train_size` training images, see `held_out`."""
    if size is None:
        return HELD_OUT
    return round(train_size * size / (1 - size)) if size < 1 else int(size)


def _random_ranks(labels: Tensor, seed: int, purpose: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a permutation (N,), and each image's number within its class and its class's size."""
    order = torch.randperm(len(labels), generator=generator(seed, purpose))
    _, label, sizes = labels.cpu()[order].unique(return_inverse=True, return_counts=True)
    place = label.argsort(stable=True).argsort()  # of each image in the order of classes
    return order, place - (sizes.cumsum(dim=0) - sizes)[label], sizes[label]


def describe_counts(classes: Sequence[str], counts: Sequence[int]) -> str:
    """List the number of images of each class, or summarize them if there are many classes."""
    low, high = min(counts), max(counts)
    if low < high and len(classes) <= MAX_LISTED:
        pairs = zip(classes, counts, strict=True)
        return ", ".join(f"{printable(name)} {n:,}" for name, n in pairs)
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{span} in each of {len(classes)} classes"


def divide_epoch(
    num_images: int, batch_size: int, parts: int = 1, steps: int | None = None
) -> tuple[int, int]:
    """Choose the number of steps in an epoch and of images in each.

    In a set of at least 50 batches, an epoch leaves out the remainder. In a smaller one, an epoch
    uses all images, in batches of at most `batch_size`, a multiple of `parts`; of 2 `parts` if
    `batch_size` is. A run that has begun keeps its number of `steps`.
    """
    if steps is None:
        large = num_images >= MANY_BATCHES * batch_size
        steps = num_images // batch_size if large else -(-num_images // batch_size)
    if steps * batch_size <= num_images:
        return steps, batch_size
    unit = math.lcm(math.gcd(batch_size, COMMON), parts * math.gcd(batch_size // parts, 2))
    return steps, unit * -(-num_images // (steps * unit))


def epoch_batches(num_images: int, shape: tuple[int, int], seed: int, epoch: int) -> Tensor:
    """Shuffle the indices of all images and divide them into batches: (steps, images per step).

    The last batch is filled up with images of the first.
    """
    order = torch.randperm(num_images, generator=generator(seed, "epoch", epoch))
    return order[torch.arange(math.prod(shape)) % num_images].view(shape)


def balanced_batches(labels: Tensor, shape: tuple[int, int], seed: int, epoch: int) -> Tensor:
    """Draw batches in which every class is equally frequent: (steps, images per step).

    The epoch is a sequence of rounds, each with one image of every class, so every batch is
    balanced too, up to two images per class. Its order is random, so that neighbours, which are
    mixed, may be of one class. A class repeats its images, in another order, when all were taken.
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
    batches = shuffled.flatten()[: math.prod(shape)].view(shape)
    return batches.gather(1, torch.rand(shape, generator=draw).argsort(dim=1))


def class_weights(counts: Sequence[int]) -> Tensor:
    """Weigh classes by their inverse frequency, as scikit-learn's class_weight="balanced" does.

    A class with n >= 1 of N images in C classes gets N / (C n). The mean over the training images
    is 1, so the loss keeps its scale.
    """
    images = torch.tensor(counts, dtype=torch.float32)
    return images.sum() / (len(counts) * images)
