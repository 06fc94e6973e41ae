"""Faithfulness of maps, compared with a loop and by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vit.reporting.faithfulness import baselines, faithfulness, hiding_curves, pointing_game

GRID, PATCH = (2, 3), (4, 5)  # not square on purpose: pictures of 8 x 15 pixels
IMPORTANCE = [[0.5, 3.0, -1.0], [2.0, 0.0, 1.0]]  # of the patches to the toy's class 1


def classify(images: Tensor) -> Tensor:
    """Return three logits; that of class 1 is a weighted sum of the brightness of patches."""
    bright = images.mean(1).unflatten(2, (GRID[1], -1)).unflatten(1, (GRID[0], -1))
    logit = (bright.mean((2, 4)) * torch.tensor(IMPORTANCE)).sum((1, 2))
    return torch.stack([torch.zeros_like(logit), logit, torch.ones_like(logit)], dim=1)


def curves_by_loop(images, maps, target, levels):
    """Hide patches of one image at a time: (K, B) for the most and the least important first."""
    curves = np.zeros((2, len(levels), len(images)))
    for (k, level), (b, image) in itertools.product(enumerate(levels), enumerate(images)):
        places = np.argsort(
            -maps[b].flatten().numpy(), kind="stable"
        )  # of equals the earlier first
        for curve, order in zip(curves, (places, places[::-1]), strict=True):
            hidden = image.clone()
            patches = hidden.unflatten(2, (GRID[1], -1)).unflatten(1, (GRID[0], -1))  # views
            for place in order[: round(level * len(places))]:
                patches[:, place // GRID[1], :, place % GRID[1]] = 0
            curve[k, b] = classify(hidden[None])[0].softmax(dim=0)[target[b]].item()
    return curves


@settings(max_examples=20)
@given(st.integers(0, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_curves_are_those_of_a_loop(seed, levels):
    torch.manual_seed(seed)
    images = 0.5 + torch.rand(3, 3, GRID[0] * PATCH[0], GRID[1] * PATCH[1])
    maps, target = torch.randint(4, (3, *GRID)).float(), torch.tensor([0, 1, 2])
    found = hiding_curves(classify, images, maps, target, levels)
    expected = curves_by_loop(images, maps, target, levels)
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


def test_baselines_by_hand():
    found = baselines(2, (2, 3), 0)
    assert found["random"].shape == (2, 2, 3) and found["random"].std() > 0.1
    # Of two rows each lies one quarter of the side from the middle, of three columns 4/3 of one.
    low, side = math.exp(-0.5), math.exp(-0.5 * (4 / 3) ** 2)
    row = torch.tensor([low * side, low, low * side])
    torch.testing.assert_close(found["centred"], row.expand(2, 2, 3))


def test_pointing_game_by_hand():
    rows = "###.#.", "##.#..", "....##", "..#..#"
    mask = torch.tensor([[[pixel == "#" for pixel in row] for row in rows]])
    for one_map, expected in (
        ([[0.9, 0.1, 0.2], [0.3, 0.0, 0.8]], 1),  # all of the patch
        ([[0.1, 0.9, 0.2], [0.3, 0.0, 0.8]], 1),  # exactly half of it
        ([[0.1, 0.2, 0.9], [0.3, 0.0, 0.8]], 0),  # a quarter of it
        ([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], 1 / 2),
    ):
        assert pointing_game(torch.tensor([one_map]), mask).item() == pytest.approx(expected)
