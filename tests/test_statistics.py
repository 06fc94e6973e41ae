"""Attention statistics compared with loops over heads and rows, and cases by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vit.explain import statistics


def draw_weights(layers: int, batch: int, heads: int, tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return list((2 * torch.randn(layers, batch, heads, tokens, tokens)).softmax(dim=-1))


def by_loops(measure, weights: list[Tensor]) -> np.ndarray:
    """Apply a measure of one head's float64 (N, N) to each image; mean over images, (L, H)."""
    return np.array([
        [np.mean([measure(image[head]) for image in layer]) for head in range(layer.shape[1])]
        for layer in (layer.double().numpy() for layer in weights)
    ])  # fmt: skip


def check(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32 and found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def head_entropy(rows: np.ndarray) -> float:
    """Mean over rows of -Σ p log p, over log N."""
    entropies = [-sum(p * math.log(p) for p in row) for row in rows]
    return sum(entropies) / len(rows) / math.log(len(rows))


def head_distance(rows: np.ndarray, grid: tuple[int, int], patch_size: int, prefix: int) -> float:
    middles = [(patch_size * row, patch_size * column) for row, column in np.ndindex(grid)]
    far = []
    for query, here in enumerate(middles):
        paid = rows[prefix + query][prefix:]
        apart = np.array([math.dist(here, there) for there in middles])
        far.append((paid * apart).sum() / paid.sum())
    return sum(far) / len(far)


def head_sink(rows: np.ndarray) -> float:
    return max(sum(row[token] for row in rows) for token in range(len(rows))) / len(rows)


def test_entropy_and_sink_mass_are_those_of_a_loop():
    weights = draw_weights(3, 4, 2, 7)
    check(statistics.attention_entropy(weights), by_loops(head_entropy, weights))
    check(statistics.sink_mass(weights), by_loops(head_sink, weights))
    assert statistics.attention_entropy([torch.ones(1, 1, 1, 1)]).item() == 0


@pytest.mark.parametrize(("grid", "patch_size", "prefix"), [((1, 2), 4, 0), ((5, 2), 7, 5)])
def test_distance_is_that_of_a_loop(grid, patch_size, prefix):
    weights = draw_weights(2, 3, 2, prefix + grid[0] * grid[1])
    expected = by_loops(lambda rows: head_distance(rows, grid, patch_size, prefix), weights)
    check(statistics.attention_distance(weights, grid, patch_size, prefix), expected)


def test_largest_norm_is_that_of_a_loop():
    prefix = 5
    tokens = list(torch.randn(3, 4, 12, 8, generator=torch.Generator().manual_seed(0)))
    expected = [
        np.mean([max(math.hypot(*token) for token in image[prefix:]) for image in layer.tolist()])
        for layer in tokens
    ]
    check(statistics.largest_patch_norm(tokens, prefix), np.array(expected))
