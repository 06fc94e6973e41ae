"""Attention statistics compared with loops over heads and rows, and cases by hand."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vit.explain.statistics import (
    attention_distance,
    attention_entropy,
    largest_patch_norm,
    sink_mass,
)


def draw_weights(layers: int, batch: int, heads: int, tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(layers, batch, heads, tokens, tokens, generator=generator)
    return list((2 * scores).softmax(dim=-1))


def by_loops(measure, weights: list[Tensor]) -> np.ndarray:
    """Apply a measure of one head's float64 (N, N) to each image; mean over images, (L, H)."""
    return np.array(
        [
            [np.mean([measure(image[head]) for image in layer]) for head in range(layer.shape[1])]
            for layer in (layer.double().numpy() for layer in weights)
        ]
    )


def check(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)


def head_entropy(rows: np.ndarray) -> float:
    """Mean over rows of -Σ p log p, over log N."""
    entropies = [-sum(p * math.log(p) for p in row) for row in rows]
    return sum(entropies) / len(rows) / math.log(len(rows))


def head_distance(rows: np.ndarray, grid: tuple[int, int], patch_size: int, prefix: int) -> float:
    middles = [
        (patch_size * (row + 0.5), patch_size * (column + 0.5))
        for row in range(grid[0])
        for column in range(grid[1])
    ]
    far = []
    for query, here in enumerate(middles):
        paid = rows[prefix + query][prefix:]
        apart = np.array([math.dist(here, there) for there in middles])
        far.append((paid * apart).sum() / paid.sum())
    return sum(far) / len(far)


def head_sink(rows: np.ndarray) -> float:
    return max(sum(row[token] for row in rows) for token in range(len(rows))) / len(rows)


@pytest.mark.parametrize(("layers", "batch", "heads", "tokens"), [(1, 1, 1, 2), (3, 4, 2, 7)])
def test_entropy_is_that_of_a_loop(layers, batch, heads, tokens):
    weights = draw_weights(layers, batch, heads, tokens)
    check(attention_entropy(weights), by_loops(head_entropy, weights))


CASES = [((1, 2), 4, 0), ((3, 3), 4, 1), ((2, 5), 7, 0), ((5, 2), 2, 5), ((1, 6), 16, 2)]


@pytest.mark.parametrize(("grid", "patch_size", "prefix"), CASES)
def test_distance_is_that_of_a_loop(grid, patch_size, prefix):
    weights = draw_weights(2, 3, 2, prefix + grid[0] * grid[1])
    expected = by_loops(lambda rows: head_distance(rows, grid, patch_size, prefix), weights)
    check(attention_distance(weights, grid, patch_size, prefix), expected)


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 1, 2), (4, 3, 7)])
def test_sink_mass_is_that_of_a_loop(batch, heads, tokens):
    weights = draw_weights(2, batch, heads, tokens)
    check(sink_mass(weights), by_loops(head_sink, weights))


@pytest.mark.parametrize("prefix", [0, 1, 5])
def test_largest_norm_is_that_of_a_loop(prefix):
    tokens = list(torch.randn(3, 4, 12, 8, generator=torch.Generator().manual_seed(0)))
    expected = [
        np.mean([max(math.hypot(*token) for token in image[prefix:]) for image in layer.tolist()])
        for layer in tokens
    ]
    check(largest_patch_norm(tokens, prefix), np.array(expected))
