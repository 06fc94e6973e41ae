"""Data sets as whole tensors: uint8 images, labels, class names."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vit.data.cifar import read_cifar
from vit.data.folder import read_folder
from vit.data.shapes import KINDS, draw_shapes
from vit.seeding import fold_in, generator

SHAPES_TRAIN, SHAPES_TEST = 10_000, 2_000  # images drawn where no number is asked for

# Mean and standard deviation of each channel over the training images, in units of 0 to 1.
# tests/test_datasets.py measures them again. Those of folder are ImageNet's, as published: with
# them a model file is enough to normalise images, whichever folder it was trained on.
NORMALIZATION = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "shapes": ((0.5003, 0.5005, 0.4999), (0.2818, 0.2822, 0.2817)),
    "folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class ImageSet:
    """Images with labels.

    Attributes:
        images: (N, 3, H, W) uint8.
        labels: (N,) int64, 0 to C - 1.
        classes: The C class names.
        masks: (N, H, W) bool, True on the object, where the data set knows it.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    masks: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor) -> "ImageSet":
        """Return the images at `indices` (n,), in that order."""
        return dataclasses.replace(
            self,
            images=self.images[indices],
            labels=self.labels[indices],
            masks=None if self.masks is None else self.masks[indices],
        )

    def to(self, device: torch.device) -> "ImageSet":
        """Return the set with images and labels on a device."""
        return dataclasses.replace(
            self, images=self.images.to(device), labels=self.labels.to(device)
        )


def normalization(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of a data set's channels, (3, 1, 1) each, on a device."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in NORMALIZATION[name])
    return mean.to(device), std.to(device)


def load(
    name: str,
    root: str | Path,
    train: bool,
    download: bool = True,
    count: int | None = None,
    on_bad_image: str = "error",
) -> ImageSet:
    """Load the training or the test images of a data set.

    Args:
        name: "cifar10", "cifar100", "shapes" or "folder".
        root: Folder that holds, or will hold, the downloaded data, or that holds train/ and test/
            of an image folder; shapes need none.
        train: Training images, or else test images.
        download: Whether to fetch what root does not hold.
        count: How many shapes to draw; None draws 10,000 to train and 2,000 to test. The others
            are always whole.
        on_bad_image: "error", or "skip" to leave out what cannot be read of an image folder.

    Returns:
        The images, in the data set's own order.

    Raises:
        ValueError: The name is not known, the data is neither there nor could be fetched, or a
            picture in an image folder cannot be read.
    """
    if name == "shapes":
        split, default = ("train", SHAPES_TRAIN) if train else ("test", SHAPES_TEST)
        images, labels, masks = draw_shapes(count or default, fold_in(0, "shapes", split))
        return ImageSet(images, labels, KINDS, masks)
    if name not in NORMALIZATION:
        raise ValueError(f"data.name: {name!r} is not one of {', '.join(NORMALIZATION)}")
    root = Path(root).expanduser()
    if name == "folder":
        return ImageSet(*read_folder(root, train, on_bad_image))
    return ImageSet(*read_cifar(name, root, train, download))


def balanced_subset(labels: Tensor, count: int, seed: int, purpose: str) -> Tensor:
    """Choose images at random, as evenly over the classes as their sizes allow.

    Args:
        labels: (N,) int64.
        count: How many, 0 to N.
        seed: Of the run.
        purpose: What they are for; another purpose is another draw.

    Returns:
        (count,) int64, ascending indices into labels.

    Raises:
        ValueError: count is larger than N.
    """
    if count > len(labels):
        raise ValueError(f"{purpose}: {count} images are asked for, {len(labels)} are there")
    order = torch.randperm(len(labels), generator=generator(seed, purpose))
    turn = torch.empty_like(labels)  # of an image in its class: the first of each come first
    for label in labels.unique():
        members = order[labels[order] == label]
        turn[members] = torch.arange(len(members))
    chosen = order[turn[order].argsort(stable=True)[:count]]
    return chosen.sort().values


def choose_probes(images: ImageSet, count: int, seed: int) -> ImageSet:
    """Choose images to look at, spread over the classes; all if there are fewer."""
    return images.select(
        balanced_subset(images.labels, min(count, len(images)), seed, "track.probes")
    )


def hold_out(images: ImageSet, count: int, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split a set into what is trained on and `count` images, balanced over classes, held out.

    Raises:
        ValueError: Nothing would be left to train on.
    """
    if count >= len(images):
        raise ValueError(
            f"data.val_size: {count} leaves nothing of {len(images)} training images to train on"
        )
    held = balanced_subset(images.labels, count, seed, "data.val_size")
    kept = torch.ones(len(images), dtype=torch.bool)
    kept[held] = False
    return images.select(kept.nonzero().squeeze(1)), images.select(held)


def load_training(
    name: str,
    root: str,
    download: bool,
    train_size: int | None,
    val_size: int,
    seed: int,
    on_bad_image: str = "error",
) -> tuple[ImageSet, ImageSet]:
    """Load what a run trains on and what it holds out.

    Args:
        name: As for `load`.
        root: Likewise.
        download: Likewise.
        train_size: Images to train on, of those that are not held out; None takes all.
        val_size: Images held out.
        seed: Of the choice.
        on_bad_image: As for `load`.

    Raises:
        ValueError: The data is not there or cannot be read, or there are fewer images than asked
            for.
    """
    count = None if train_size is None else train_size + val_size
    everything = load(
        name, root, train=True, download=download, count=count, on_bad_image=on_bad_image
    )
    if name == "folder":  # a bad test picture ends a run before it trains, and not when it has
        load(name, root, train=False, on_bad_image=on_bad_image)
    training, held_out = hold_out(everything, val_size, seed)
    if train_size is None:
        return training, held_out
    if train_size > len(training):
        raise ValueError(
            f"data.train_size: {train_size} is more than the {len(training)} training images"
        )
    return training.select(torch.arange(train_size)), held_out
