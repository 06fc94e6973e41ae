import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.shapes import KINDS, draw_shapes

Drawn = tuple[Tensor, Tensor, Tensor]

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
def train() -> Drawn:
    return draw_shapes(4000, seed=1)


@pytest.fixture(scope="module")
def test() -> Drawn:
    return draw_shapes(1000, seed=2)


def grow(masks: Tensor, times: int = 1) -> Tensor:
    """Add the eight neighbours of every pixel to masks (n, h, w)."""
    grown = masks.float()
    for _ in range(times):
        grown = F.max_pool2d(grown[:, None], 3, stride=1, padding=1)[:, 0]
    return grown > 0


def shrink(masks: Tensor, times: int = 1) -> Tensor:
    return ~grow(~masks, times)


def centroids(masks: Tensor) -> Tensor:
    """Return the column and row of each object's middle, (n, 2)."""
    weight = masks / masks.sum((1, 2), keepdim=True)
    axis = torch.arange(32.0)
    return torch.stack([(weight.sum(1) * axis).sum(1), (weight.sum(2) * axis).sum(1)], dim=1)


def mean_colour(images: Tensor, where: Tensor) -> Tensor:
    """Return the mean colours (n, 3) in [0, 1] over the pixels (n, h, w) of each image."""
    weight = where[:, None].float()
    return (images / 255 * weight).sum((2, 3)) / weight.sum((2, 3))


def enclosed_area(masks: Tensor) -> Tensor:
    """Count the free pixels that cannot be reached from the border, (n,)."""
    outside = torch.ones_like(masks)
    outside[:, 1:-1, 1:-1] = False
    for _ in range(64):
        outside = grow(outside) & ~masks
    return (~outside & ~masks).sum((1, 2))


def solidity(masks: Tensor) -> Tensor:
    """Return the share of its convex hull that each object fills, (n,)."""
    angle = torch.arange(64) * (2 * math.pi / 64)
    row, column = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    along = column[..., None] * angle.cos() + row[..., None] * angle.sin()
    filled = []
    for mask in masks:
        hull = (along <= along[mask].amax(0) + 1e-4).all(-1)
        filled.append(mask.sum() / hull.sum())
    return torch.stack(filled)


def ridge_accuracy(x: Tensor, labels: Tensor, x_test: Tensor, test_labels: Tensor) -> float:
    """Fit the labels by ridge regression on standardised x (n, d), return the test accuracy."""
    mean, deviation = x.mean(0), x.std(0) + 1e-6
    x, x_test = (x - mean) / deviation, (x_test - mean) / deviation
    targets = F.one_hot(labels, len(KINDS)).float() - 1 / len(KINDS)
    penalty = len(x) * torch.eye(x.shape[1])
    weights = torch.linalg.solve(x.T @ x + penalty, x.T @ targets)
    return ((x_test @ weights).argmax(1) == test_labels).float().mean().item()


def outline_features(masks: Tensor) -> Tensor:
    """Return moments (n, 13) that stay the same however an object is placed, turned, scaled."""
    weight = masks.double().flatten(1)
    axis = torch.arange(32, dtype=torch.float64)
    points = torch.complex(axis.repeat(32), axis.repeat_interleave(32))
    area = weight.sum(1, keepdim=True)
    points = (points - (weight * points).sum(1, keepdim=True) / area) / area.sqrt()
    orders = [(p, q) for p in range(7) for q in range(3) if p >= q and 2 <= p + q <= 6]
    moments = [(weight * points**p * points.conj() ** q).sum(1) / area[:, 0] for p, q in orders]
    return torch.stack(moments, dim=1).abs()


def test_kinds():
    assert KINDS == (
        "circle", "square", "triangle", "star", "cross",
        "ring", "heart", "crescent", "arrow", "hexagon",
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 9, 10, 1234])
def test_shapes_types_and_balance(count):
    images, labels, masks = draw_shapes(count, seed=3)
    assert images.shape == (count, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.shape == (count,) and labels.dtype == torch.int64
    assert masks.shape == (count, 32, 32) and masks.dtype == torch.bool
    per_kind = torch.bincount(labels, minlength=len(KINDS))
    assert len(per_kind) == len(KINDS) and per_kind.max() - per_kind.min() <= 1
    assert masks.any((1, 2)).all()


def test_labels_are_in_random_order(train):
    labels = train[1]
    for lag in (1, 2, 10):
        equal = (labels[lag:] == labels[:-lag]).float().mean()
        assert 0.07 < equal < 0.13


def test_images_use_the_whole_range(train):
    for channel in train[0].unbind(1):
        assert channel.min() == 0 and channel.max() == 255
        assert 0.45 < channel.float().mean() / 255 < 0.55


def test_same_seed_same_bytes_whatever_the_global_generator():
    torch.manual_seed(0)
    first = draw_shapes(600, seed=4)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    second = draw_shapes(600, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("other_seed", [1, 2**32 - 1])
def test_seeds_are_independent(other_seed):
    images, labels, masks = draw_shapes(500, seed=0)
    others, other_labels, other_masks = draw_shapes(500, seed=other_seed)
    assert (labels == other_labels).float().mean() < 0.2
    for one, other in ((images, others), (masks, other_masks)):
        pixels = torch.stack([one.flatten().double(), other.flatten().double()])
        average = one.double().mean(0).flatten().repeat(500)  # objects prefer the middle
        assert torch.corrcoef(pixels - average)[0, 1].abs() < 0.1


def test_no_image_occurs_twice(train, test):
    images = torch.cat([train[0], test[0]]).flatten(1)
    assert len(torch.unique(images[:, :64], dim=0)) == len(images)


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
    for middle in (centroids(masks)[:, 0], centroids(masks)[:, 1]):
        assert middle.min() < 11 and middle.max() > 20
        assert middle.mean() == pytest.approx(15.5, abs=0.2)


def test_objects_are_turned_by_any_angle(train):
    _, labels, masks = train
    arrows = masks[labels == KINDS.index("arrow")].float()
    x, y = (torch.arange(32.0) - middle[:, None] for middle in centroids(arrows).T)
    far = x[:, None, :] ** 2 + y[:, :, None] ** 2
    # The third moments point from the tail to the head or back, but always the same way.
    skew_x = (arrows * far * x[:, None, :]).sum((1, 2))
    skew_y = (arrows * far * y[:, :, None]).sum((1, 2))
    angle = torch.atan2(skew_y, skew_x) + math.pi
    octants = torch.bincount((angle / (math.pi / 4)).long() % 8, minlength=8)
    assert octants.min() > 0.5 * len(arrows) / 8


def test_only_the_ring_has_a_hole_and_it_is_wide(test):
    _, labels, masks = test
    share = enclosed_area(masks) / masks.sum((1, 2))
    ring = labels == KINDS.index("ring")
    assert share[ring].min() > 0.4
    assert share[~ring].max() == 0


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [("circle", 0.98, 1), ("square", 0.94, 1), ("hexagon", 0.97, 1), ("triangle", 0.93, 1),
     ("heart", 0.9, 0.99), ("star", 0.5, 0.72), ("cross", 0.6, 0.75), ("arrow", 0.65, 0.8),
     ("ring", 0.6, 0.68), ("crescent", 0.48, 0.62)],
)  # fmt: skip
def test_notches_are_deep_and_the_other_kinds_convex(test, kind, low, high):
    _, labels, masks = test
    filled = solidity(masks[labels == KINDS.index(kind)])
    assert low <= filled.min() and filled.max() <= high


def test_edges_are_anti_aliased_where_the_mask_ends(train):
    images, _, masks = (part[:500] for part in train)
    inner, near = shrink(masks), grow(masks, 3) & ~grow(masks)
    thing, ground = mean_colour(images, inner), mean_colour(images, near)
    direction = (thing - ground) / (thing - ground).square().sum(1, keepdim=True)
    between = ((images / 255 - ground[:, :, None, None]) * direction[:, :, None, None]).sum(1)
    mixed = (between > 0.3) & (between < 0.7)
    edge = grow(masks) & ~inner
    print(
        mixed[edge].float().mean(),
        mixed[inner].float().mean(),
        between[masks & ~inner].mean(),
        between[grow(masks) & ~masks].mean(),
    )
    assert mixed[edge].float().mean() > 0.1
    assert mixed[inner].float().mean() < 0.01
    assert between[masks & ~inner].mean() > 0.8
    assert between[grow(masks) & ~masks].mean() < 0.2


def test_object_stands_out_from_its_surroundings(train):
    images, _, masks = train
    thing, ground = (
        mean_colour(images, where) for where in (shrink(masks), grow(masks, 3) & ~grow(masks))
    )
    contrast = (thing - ground).norm(dim=1)
    assert contrast.min() > 0.4
    assert contrast.median() > 0.7


def test_background_is_textured(train):
    images, _, masks = train
    ground = ~grow(masks)[:, None]
    centred = (images / 255 - mean_colour(images, ground[:, 0])[:, :, None, None]) * ground
    deviation = (centred.square().sum((2, 3)) / ground.sum((2, 3))).sqrt().mean(1)
    assert deviation.min() > 0.05


@pytest.mark.slow
def test_pixels_and_colours_do_not_tell_the_kind_linearly(train, test):
    (images, labels, masks), (test_images, test_labels, test_masks) = train, test
    pixels, test_pixels = images.flatten(1) / 255, test_images.flatten(1) / 255
    assert ridge_accuracy(pixels, labels, test_pixels, test_labels) < 0.25
    colours, test_colours = (
        torch.cat([mean_colour(x, shrink(m)), mean_colour(x, ~grow(m))], dim=1)
        for x, m in ((images, masks), (test_images, test_masks))
    )
    assert ridge_accuracy(colours, labels, test_colours, test_labels) < 0.16


@pytest.mark.slow
def test_outlines_tell_the_kind(train, test):
    (labels, masks), (test_labels, test_masks) = (
        (part[1][:size], part[2][:size]) for part, size in ((train, 2000), (test, 500))
    )
    features, test_features = outline_features(masks), outline_features(test_masks)
    spread = features.std(0)
    nearest = torch.cdist(test_features / spread, features / spread).argmin(1)
    right = labels[nearest] == test_labels
    print(
        [right[test_labels == k].float().mean().item() for k in range(10)],
        right.float().mean(),
        features.shape,
    )
    assert right.float().mean() > 0.95
    for kind in range(len(KINDS)):
        assert right[test_labels == kind].float().mean() > 0.85


@pytest.mark.parametrize(
    ("count", "seed", "message"),
    [
        (0, 0, "count is 0, must be at least 1"),
        (-3, 0, "count is -3, must be at least 1"),
        (1, -1, "seed is -1, must be from 0 to 2**63 - 1"),
        (1, 2**63, f"seed is {2**63}, must be from 0 to 2**63 - 1"),
    ],
)
def test_values_out_of_range_are_refused(count, seed, message):
    with pytest.raises(ValueError) as error:
        draw_shapes(count, seed)
    assert str(error.value) == message


def test_largest_seed_is_accepted():
    assert len(draw_shapes(1, seed=2**63 - 1)[0]) == 1
