"""Data sets: their contents, and splitting; the areas, places and edges of drawn shapes."""

import functools
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from small_runs import load
from vit.data.config import DATASETS, DataConfig
from vit.data.datasets import load_training
from vit.data.images import ImageSet
from vit.data.sampling import held_out
from vit.data.shapes import KINDS, draw_shapes

ROOT = Path(__file__).resolve().parents[2] / "data"
FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}


@functools.cache
def load_real(name: str, train: bool) -> ImageSet:
    """Load a data set once for all tests; skip the test where the data set is not there."""
    if name in FOLDERS and not (ROOT / FOLDERS[name]).exists():
        pytest.skip(f"{ROOT / FOLDERS[name]} is missing: the real {name} is not tested")
    return load(name, ROOT, train, download=False)


@pytest.mark.parametrize("name", [*FOLDERS, "shapes", "digits"])
def test_normalization_is_that_of_the_training_images(name):
    images = load_real(name, train=True).images
    values = torch.arange(256).double() / 255
    shares = torch.stack([torch.bincount(c.flatten(), minlength=256) for c in images.unbind(1)])
    shares = shares / shares.sum(1, keepdim=True)
    mean = (shares * values).sum(1)
    std = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    assert mean.tolist() == pytest.approx(DATASETS[name].mean, abs=1e-4)
    assert std.tolist() == pytest.approx(DATASETS[name].std, abs=1e-4)


def test_drawn_training_and_test_images_differ_and_need_no_root(tmp_path):
    training, test = (
        load("shapes", tmp_path / "nowhere", part, count=50) for part in (True, False)
    )
    assert not (tmp_path / "nowhere").exists()
    assert training.classes == KINDS and len(training) == len(test) == 50
    images, _, _ = draw_shapes(50, seed=0)
    for one, other in itertools.combinations((training.images, test.images, images), 2):
        assert not (one == other).flatten(1).all(1).any()


def hold_out(images: ImageSet, size: int) -> tuple[ImageSet, ImageSet]:
    return images.divide(held_out(images.labels, images.classes, size, seed=0))


def test_held_out_images_and_the_others_are_disjoint_and_complete():
    numbers = torch.arange(60)  # which images and masks tell
    pixels, masks = numbers[:, None, None, None].expand(-1, 3, 2, 2), numbers[:, None, None] > 20
    images = ImageSet(pixels.to(torch.uint8), numbers % 3, ("a", "b", "c"), masks)
    kept, held = hold_out(images, 10)
    assert sorted(held.class_counts()) == [3, 3, 4]
    found = [part.images[:, 0, 0, 0].long() for part in (kept, held)]
    assert torch.equal(torch.cat(found).sort().values, numbers)
    for part, chosen in zip((kept, held), found, strict=True):
        assert torch.equal(part.images, images.images[chosen])
        assert torch.equal(part.labels, images.labels[chosen])
        assert torch.equal(part.masks, images.masks[chosen])
        assert part.classes == images.classes
    words = r"^data\.val_size: 58 .* at most 57, .*\(20 in each of 3 classes\)$"
    with pytest.raises(ValueError, match=words):
        hold_out(images, 58)


@pytest.mark.parametrize(("size", "number"), [(None, 1000), (0.25, 100), (40, 40), (0, 0)])
def test_held_out_shapes_are_drawn_in_addition(size, number):
    data = DataConfig(name="shapes", train_size=300, val_size=size)
    training, held = load_training(data, seed=0)
    assert (len(training), len(held)) == (300, number)


def test_split_of_cifar10_stays_what_it_was():
    images = load_real("cifar10", train=True)
    training, held = hold_out(images, 1000)
    assert torch.equal(held.images[:8], images.images[[22, 68, 179, 220, 222, 237, 347, 371]])
    assert held.class_counts() == [100] * 10 and training.class_counts() == [4900] * 10


def test_class_without_training_images_is_refused_with_the_counts():
    with pytest.raises(
        ValueError, match=r"^data\.train_size: 4 leaves a class .*\(circle .* use more"
    ):
        load_training(DataConfig(name="shapes", train_size=4, val_size=0), seed=0)


# Areas of the outlines inside the unit circle, by geometry.
UNIT_AREAS = {
    "circle": math.pi,
    "square": 2.0,
    "triangle": 3 * math.sqrt(3) / 4,
    "star": 5 * 0.4 * math.sin(math.pi / 5),
    "cross": 2 * 1.92 * 0.48 - 0.48**2,
    "ring": math.pi * (1 - 0.6**2),
    "heart": math.pi / 1.2**3,
    "crescent": math.pi - 1.768,  # 1.768 is where discs of radius 1 and 0.8, 0.4 apart, overlap
    "arrow": 0.85 + 0.95 * 0.4,
    "hexagon": 3 * math.sqrt(3) / 2,
}


@pytest.fixture(scope="module")
def train() -> tuple[Tensor, Tensor, Tensor]:
    return draw_shapes(4000, seed=1)


@pytest.mark.parametrize("count", [1, 9, 1234])
def test_shapes_have_the_same_types_and_balance_whatever_the_global_generator(count):
    torch.manual_seed(0)
    images, labels, masks = first = draw_shapes(count, seed=3)
    state = torch.manual_seed(1).get_state()
    again = draw_shapes(count, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert images.shape == (count, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.shape == (count,) and labels.dtype == torch.int64
    assert masks.shape == (count, 32, 32) and masks.dtype == torch.bool
    per_kind = torch.bincount(labels, minlength=len(KINDS))
    assert len(per_kind) == 10 and per_kind.max() - per_kind.min() <= 1
    assert masks.any((1, 2)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_areas_are_those_of_the_outline(train, kind):
    _, labels, masks = train
    areas = masks[labels == KINDS.index(kind)].sum((1, 2)).float() / UNIT_AREAS[kind]
    assert areas.min() > 0.92 * 9**2
    assert areas.max() < 1.08 * 13**2
    assert areas.mean() == pytest.approx((9**2 + 9 * 13 + 13**2) / 3, rel=0.05)


def test_objects_lie_inside_with_a_margin_and_anywhere(train):
    masks = train[2]
    inside = torch.zeros(32, 32, dtype=torch.bool)
    inside[1:-1, 1:-1] = True
    assert not (masks & ~inside).any()
    weight, axis = masks / masks.sum((1, 2), keepdim=True), torch.arange(32.0)
    for middle in (weight.sum(1) @ axis, weight.sum(2) @ axis):
        assert middle.min() < 11 and middle.max() > 20
        assert middle.mean() == pytest.approx(15.5, abs=0.2)
