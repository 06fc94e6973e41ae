"""Faithfulness compared with a loop over images and with cases computed by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vit.explain.faithfulness import (
    centred_map,
    faithfulness,
    hiding_curves,
    mask_iou,
    mean_interval,
    pointing_game,
)

GRID, PATCH = (2, 3), (4, 5)  # not square on purpose: pictures of 8 x 15 pixels
IMPORTANCE = [[0.5, 3.0, -1.0], [2.0, 0.0, 1.0]]  # of the patches to the toy's class 1


class Toy(nn.Module):
    """A model whose logit of class 1 is a weighted sum of how bright the patches are."""

    def __init__(self) -> None:
        super().__init__()
        self.importance = torch.tensor(IMPORTANCE)
        self.seen: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(images)
        bright = images.mean(1).unflatten(2, (GRID[1], -1)).unflatten(1, (GRID[0], -1))
        logit = (bright.mean((2, 4)) * self.importance).sum((1, 2))
        return torch.stack([torch.zeros_like(logit), logit, torch.ones_like(logit)], dim=1)


def draw_images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = GRID[0] * PATCH[0], GRID[1] * PATCH[1]
    return 0.5 + torch.rand(count, 3, *size, generator=generator)


def draw_maps(count: int, seed: int = 1) -> Tensor:
    return torch.rand(count, *GRID, generator=torch.Generator().manual_seed(seed))


def ranking(one_map: Tensor) -> list[tuple[int, int]]:
    """List the patches of a map, the most important first; of equals the earlier first."""
    places = [(row, column) for row in range(one_map.shape[0]) for column in range(len(one_map[0]))]
    return sorted(places, key=lambda place: -one_map[place].item())


def cover(image: Tensor, places: list[tuple[int, int]]) -> Tensor:
    """Set patches of an image to 0, one after the other."""
    image = image.clone()
    for row, column in places:
        top, left = row * PATCH[0], column * PATCH[1]
        image[:, top : top + PATCH[0], left : left + PATCH[1]] = 0
    return image


def probability(model: nn.Module, image: Tensor, target: int) -> float:
    logits = model(image[None])[0].double().numpy()
    return float(np.exp(logits[target]) / np.exp(logits).sum())


def curves_by_loop(model, images, maps, target, levels):
    """Hide patches of one image at a time: (K, B) for the most and the least important first."""
    morf, lerf = np.zeros((len(levels), len(images))), np.zeros((len(levels), len(images)))
    for k, level in enumerate(levels):
        for b, image in enumerate(images):
            places = ranking(maps[b])
            number = round(level * len(places))
            aim = target[b].item()
            morf[k, b] = probability(model, cover(image, places[:number]), aim)
            lerf[k, b] = probability(model, cover(image, places[::-1][:number]), aim)
    return morf, lerf


@settings(max_examples=20)
@given(st.integers(0, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_curves_are_those_of_a_loop(seed, levels):
    model, images, maps = Toy(), draw_images(3, seed), draw_maps(3, seed)
    target = torch.tensor([0, 1, 2])
    found = hiding_curves(model, images, maps, target, levels)
    expected = curves_by_loop(model, images, maps, target, levels)
    for curve, by_loop in zip(found, expected, strict=True):
        assert curve.shape == (len(levels), 3) and curve.dtype == torch.float32
        np.testing.assert_allclose(curve.numpy(), by_loop, rtol=0, atol=1e-5)


def test_faithfulness_by_hand():
    # Two levels of three images.
    morf = torch.tensor([[0.5, 1.0, 0.2], [0.25, 0.0, 0.4]])
    lerf = torch.tensor([[1.0, 0.0, 0.4], [0.75, 0.0, 0.2]])
    found = {name: values.tolist() for name, values in faithfulness(morf, lerf).items()}
    assert found == {
        "deletion": pytest.approx([0.375, 0.5, 0.3]),
        "insertion": pytest.approx([0.875, 0.0, 0.3]),
        "lerf_morf": pytest.approx([0.25, -0.25, 0.0]),
    }


# Maps that know nothing.


def test_centred_map_by_hand():
    assert centred_map((1, 1)).tolist() == [[1]]
    # On four columns, a quarter of the side is one column: the middles lie 1.5 and 0.5 away.
    edge, middle = math.exp(-1.125), math.exp(-0.125)
    assert centred_map((1, 4)).tolist() == [pytest.approx([edge, middle, middle, edge], abs=1e-6)]
    assert centred_map((4, 1)).T.tolist() == [pytest.approx([edge, middle, middle, edge], abs=1e-6)]
    # Of two rows each lies one quarter of the side from the middle, of three columns 4/3 of one.
    low, side = math.exp(-0.5), math.exp(-0.5 * (4 / 3) ** 2)
    row = pytest.approx([low * side, low, low * side], abs=1e-6)
    assert centred_map((2, 3)).tolist() == [row, row]


# Against masks of objects.


def draw_mask(*rows: str) -> Tensor:
    """Return a mask (1, H, W) of rows such as "##..", # on the object."""
    return torch.tensor([[[pixel == "#" for pixel in row] for row in rows]])


@pytest.mark.parametrize(
    ("one_map", "expected"),
    [
        ([[0.9, 0.1, 0.2], [0.3, 0.0, 0.8]], 1),  # all of the patch
        ([[0.1, 0.9, 0.2], [0.3, 0.0, 0.8]], 1),  # exactly half of it
        ([[0.1, 0.2, 0.9], [0.3, 0.0, 0.8]], 0),  # a quarter of it
        ([[-0.1, -0.2, -0.8], [-0.9, -0.3, -0.8]], 1),
        ([[0.9, 0.9, 0.9], [0.3, 0.0, 0.8]], 2 / 3),
        ([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], 1 / 2),
    ],
)
def test_pointing_game_by_hand(one_map, expected):
    mask = draw_mask(
        "##" "#." "#.",
        "##" ".#" "..",
        ".." ".." "##",
        ".." "#." ".#",
    )  # fmt: skip
    found = pointing_game(torch.tensor([one_map]), mask)
    assert found.tolist() == [pytest.approx(expected, abs=1e-6)]


@pytest.mark.parametrize(
    ("one_map", "expected"),
    [
        # Of 24 pixels the object has 10: 4, 2, 1 and 0, 1, 2 of the patches.
        ([[1, 0, 0], [0, 0, 0]], 4 / 10),
        ([[1, 1, 0], [0, 0, 0]], 6 / 12),
        # Above the mean, 3, are 9 and 4 alone; the 3 is not.
        ([[9, 1, 3], [0, 1, 4]], 6 / 12),
        ([[-1, -2, -2], [-2, -2, -2]], 4 / 10),
        ([[2, 2, 2], [2, 2, 2]], 0),
    ],
)
def test_mask_iou_by_hand(one_map, expected):
    mask = draw_mask(
        "##" "#." "#.",
        "##" ".#" "..",
        ".." "#." "##",
        ".." ".." "..",
    )  # fmt: skip
    found = mask_iou(torch.tensor([one_map]).float(), mask)
    assert found.tolist() == [pytest.approx(expected, abs=1e-6)]


def test_no_patch_of_a_constant_map_is_above_its_mean():
    masks = torch.ones(1, 28, 28, dtype=torch.bool)
    for value in (0.1, 1 / 3, 0.7):
        assert mask_iou(torch.full((1, 7, 7), value), masks).tolist() == [0]


# Over images.


def test_mean_interval_by_hand():
    # The variance of 1, 2, 3, 4 is 5/3 over three degrees of freedom; the root of four is 2.
    mean, half_width = mean_interval(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert mean == 2.5
    assert half_width == pytest.approx(1.959964 * math.sqrt(5 / 3) / 2, abs=1e-9)
    mean, half_width = mean_interval(torch.tensor([0.25]))
    assert mean == 0.25 and math.isnan(half_width)  # of one image, it is not known
