"""Random numbers of a batch; test_augment.py tests those of its parts."""

import torch

from vit.data.draws import Draws


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
