"""Drawn shapes: areas, places and edges."""

import math

import pytest
import torch
from torch import Tensor

from vit.data.shapes import KINDS, draw_shapes

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
def test_shapes_types_and_balance_whatever_the_global_generator(count):
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
