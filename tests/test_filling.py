"""Fillings compared with a dense solver and cases computed by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.maps.filling import FILLINGS, blurred, derangement, impute, make_filling

SIZE = (10, 14)


def draw_images(count: int, size: tuple[int, int] = SIZE, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))


def draw_hidden(fractions: list[float], size: tuple[int, int] = SIZE, seed: int = 1) -> Tensor:
    """Hide a fraction of the pixels of each image, (B, 1, H, W)."""
    chances = torch.rand(len(fractions), 1, *size, generator=torch.Generator().manual_seed(seed))
    return chances < torch.tensor(fractions)[:, None, None, None]


def solve_by_numpy(image: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Solve ROAD's linear system for one channel (H, W), with the weights of arXiv 2202.00449."""
    rows, columns = image.shape
    unknown = {(int(r), int(c)): n for n, (r, c) in enumerate(np.argwhere(hidden))}
    matrix, right = np.zeros((len(unknown), len(unknown))), np.zeros(len(unknown))
    for (row, column), n in unknown.items():
        for down, across in np.ndindex(3, 3):
            place = row + down - 1, column + across - 1
            if place == (row, column) or not (0 <= place[0] < rows and 0 <= place[1] < columns):
                continue
            weight = 1 / 6 if down == 1 or across == 1 else 1 / 12
            matrix[n, n] += weight
            if place in unknown:
                matrix[n, unknown[place]] -= weight
            else:
                right[n] += weight * image[place]
    filled = image.copy()
    filled[hidden] = np.linalg.solve(matrix, right)
    return filled


@pytest.mark.parametrize("size", [SIZE, (9, 5)])
def test_imputation_solves_the_published_system(size):
    images, hidden = draw_images(4, size), draw_hidden([0.05, 0.5, 0.95, 0.0], size)
    hidden[3, :, : size[0] // 2] = True  # half the image, with three of its borders
    found = impute(images.double(), hidden, tolerance=1e-12)
    for b in range(4):
        expected = solve_by_numpy(images[b, 1].double().numpy(), hidden[b, 0].numpy())
        torch.testing.assert_close(found[b, 1], torch.from_numpy(expected), rtol=0, atol=1e-9)
    torch.testing.assert_close(impute(images, hidden), found.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", FILLINGS)
def test_a_filling_changes_hidden_pixels_only(name):
    images, hidden = draw_images(6), draw_hidden([0.1, 0.3, 0.5, 0.7, 0.9, 0.9])
    before = images.clone()
    fill = make_filling(name, images, seed=3)
    found = fill(images, hidden)
    everywhere = hidden.expand_as(images)
    assert found.shape == images.shape and found.dtype == torch.float32
    assert torch.equal(images, before)
    assert torch.equal(found[~everywhere], images[~everywhere])
    assert (found[everywhere] != images[everywhere]).all()
    assert torch.equal(make_filling(name, images, seed=3)(images, hidden), found)
    assert torch.equal(fill(images, hidden & False), images)


def test_hidden_pixels_show_another_image_at_the_same_place():
    images = draw_images(5, (4, 6))
    found = make_filling("other", images, seed=0)(images, torch.ones(5, 1, 4, 6).bool())
    assert torch.equal(found, images[derangement(5, seed=0)])
    for seed in range(5):
        other = derangement(101, seed)
        assert sorted(other.tolist()) == list(range(101)) and (other != torch.arange(101)).all()


def test_blur_by_hand():
    # An eighth of each side: 1 pixel down, 2 across.
    image = torch.zeros(1, 1, 8, 16)
    image[0, 0, 4, 8] = 1
    found = blurred(image)[0, 0]
    assert found.sum().item() == pytest.approx(1, abs=0.01)  # the borders are mirrored
    assert (found[5, 8] / found[4, 8]).item() == pytest.approx(math.exp(-1 / 2), abs=1e-4)
    assert (found[4, 10] / found[4, 8]).item() == pytest.approx(math.exp(-1 / 2), abs=1e-4)
