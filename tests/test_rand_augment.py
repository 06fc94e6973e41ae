"""RandAugment: operations equal torchvision's, and each image gets its own."""

import itertools

import pytest
import torch
from torch import Generator, Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from vit.data.config import STRONGEST
from vit.data.datasets import load
from vit.data.draws import Draws
from vit.data.rand_augment import OPERATIONS, apply_operations, rand_augment


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Drawn shapes, noise, and one plain image, which has no contrast to stretch."""
    noise = torch.randint(256, (15, 3, 32, 32), dtype=torch.uint8, generator=seeded())
    plain = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    return torch.cat([load("shapes", "", train=True, count=16).images, noise, plain])


def by_torchvision(image: Tensor, operation: str, magnitude: int, sign: int) -> Tensor:
    """Change one image as torchvision's RandAugment does once it has drawn."""
    name = {"autocontrast": "AutoContrast"}.get(
        operation, "".join(word.capitalize() for word in operation.split("_"))
    )
    amounts, signed = RandAugment()._augmentation_space(STRONGEST + 1, image.shape[1:])[name]
    amount = (float(amounts[magnitude]) if amounts.ndim else 0.0) * (sign if signed else 1)
    return _apply_op(image, name, amount, InterpolationMode.NEAREST, None)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 50, 20), (1, 24, 40)])
def test_operation_is_torchvisions(images: Tensor, operation: str, shape: tuple[int, ...]) -> None:
    square = shape == (3, 32, 32)
    if not square:
        images = torch.randint(256, (4, *shape), dtype=torch.uint8, generator=seeded())
    operations = torch.full((len(images),), OPERATIONS.index(operation))
    for magnitude, sign in itertools.product((0, 9, 23, 30), (1, -1)):
        signs = torch.full((len(images),), sign)
        found = apply_operations(images, operations, magnitude, signs)
        expected = torch.stack([by_torchvision(i, operation, magnitude, sign) for i in images])
        assert found.dtype == torch.uint8 and found.shape == images.shape
        # One level of 255, where rounding falls the other way; in images that are not square, a
        # pixel on the border between two sources may take the other one.
        apart = (found.int() - expected.int()).abs()
        assert (apart > 1).float().mean() <= (0 if square else 0.005)
        assert (apart > 0).float().mean() < (0.05 if square else 0.3)


def test_each_image_takes_its_own(images: Tensor) -> None:
    """In a batch of all operations each image is changed as it would be alone."""
    operations = torch.arange(28) % len(OPERATIONS)
    signs = torch.tensor([1, -1]).repeat_interleave(14)
    together = apply_operations(images[:28], operations, 9, signs)
    for place in range(28):
        part = slice(place, place + 1)
        alone = apply_operations(images[part], operations[part], 9, signs[part])
        assert torch.equal(alone[0], together[place]), OPERATIONS[operations[place]]


def test_operations_are_drawn_evenly_both_ways() -> None:
    """Of one image many times: each operation and way leaves its own picture."""
    image = load("shapes", "", train=True, count=1).images[..., :16, :16]
    count = 2_800
    changed = rand_augment(image.expand(count, -1, -1, -1), 1, 9, Draws(0, count))
    numbers = torch.arange(len(OPERATIONS))
    pictures = {}
    for sign in (1, -1):
        ways = apply_operations(
            image.expand(len(OPERATIONS), -1, -1, -1), numbers, 9, torch.full_like(numbers, sign)
        )
        for picture in ways:
            key = picture.numpy().tobytes()
            pictures[key] = pictures.get(key, 0.0) + 0.5 / len(OPERATIONS)
    counts = dict.fromkeys(pictures, 0)
    for picture in changed:
        counts[picture.numpy().tobytes()] += 1  # no other picture comes out
    chi_square = sum(
        (counts[key] - count * share) ** 2 / (count * share) for key, share in pictures.items()
    )
    assert len(pictures) > 18
    assert chi_square < len(pictures) + 5 * (2 * len(pictures)) ** 0.5


def test_each_of_five_channels_is_changed_like_a_grey_image() -> None:
    """But for the operations that use the mean of the channels."""
    images = torch.randint(256, (28, 5, 16, 16), dtype=torch.uint8, generator=seeded())
    operations = torch.arange(28) % len(OPERATIONS)
    signs = torch.tensor([1, -1]).repeat_interleave(14)
    found = apply_operations(images, operations, 15, signs)
    alike = ~sum(operations == OPERATIONS.index(name) for name in ("color", "contrast")).bool()
    for channel in range(5):
        alone = apply_operations(images[:, channel, None], operations, 15, signs)
        assert torch.equal(found[alike, channel, None], alone[alike])
