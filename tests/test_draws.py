"""Random numbers for parts of a batch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vit.data.draws import Draws

METHODS: dict[str, tuple[int, Callable[[Draws], Tensor]]] = {  # with the dimension of the images
    "uniform": (0, lambda draws: draws.uniform(-1, 3)),
    "uniform, several": (0, lambda draws: draws.uniform(0, 1, (-1, 10, 4))),
    "integers": (0, lambda draws: draws.integers(0, 5)),
    "integers, images second": (1, lambda draws: draws.integers(-3, 4, (2, -1, 1))),
    "beta": (0, lambda draws: draws.beta(0.4)),
    "noise": (0, lambda draws: draws.noise((3, 4, 5))),
}
with_methods = pytest.mark.parametrize(("dim", "method"), METHODS.values(), ids=METHODS)


@with_methods
@pytest.mark.parametrize("part", [(0, 100), (31, 33), (32, 96)])
def test_a_part_gets_the_numbers_that_it_has_in_the_whole_batch(
    dim: int, method: Callable[[Draws], Tensor], part: tuple[int, int]
) -> None:
    batch, part_of_batch = Draws(7, 100), Draws(7, 100, slice(*part))
    for _ in range(2):  # what is drawn next does not depend on the part either
        expected = method(batch)
        assert expected.shape[dim] == 100
        assert torch.equal(method(part_of_batch), expected.narrow(dim, part[0], part[1] - part[0]))


def test_calls_draw_what_torchs_generator_draws() -> None:
    """Runs of earlier versions, and those that augment in the same way, keep their numbers."""
    draws, generator = Draws(3, 50), torch.Generator().manual_seed(3)
    shifts = torch.randint(-2, 3, (2, 50, 1), generator=generator)
    assert torch.equal(draws.integers(-2, 3, (2, -1, 1)), shifts)
    coins = torch.rand(50, 1, 1, 1, generator=generator)
    assert torch.equal(draws.uniform(0, 1), coins)
    boxes = torch.rand(50, 10, 4, generator=generator)
    assert torch.equal(draws.uniform(0, 1, (-1, 10, 4)), boxes)


def test_noise_is_normal_and_different_in_each_image() -> None:
    noise = Draws(0, 100).noise((3, 16, 16))
    assert noise.shape == (100, 3, 16, 16)
    assert noise.mean().abs() < 0.02 and (noise.std() - 1).abs() < 0.02
    correlations = torch.corrcoef(noise.flatten(1)).fill_diagonal_(0)
    assert correlations.abs().max() < 0.2  # 5.5 standard deviations
