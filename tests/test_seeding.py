"""Seeds derived from names and counters."""

import pytest
import torch

from vit.seeding import fold_in, generator

KEYS = [
    (0, "augment", 1), (0, "augment", 2), (1, "augment", 1), (0, "dropout", 1), (0, "Augment", 1),
    (0, 1, "augment"), (0, "augment", 1, 1), (0, 1, 2), (0, 2, 1), (1, 0, 2), (7,), (7, 0),
    (7, 0, 0), (7 + 2**32,), (0, "1", 2),
]  # fmt: skip


def test_same_key_same_seed_and_other_keys_other_seeds():
    seeds = [fold_in(*key) for key in KEYS]
    assert seeds[0] == 1_314_903_785  # in every process, whatever its hash seed
    assert len(set(seeds)) == len(KEYS)
    assert all(type(seed) is int and 0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_seeds_of_consecutive_steps_collide_no_more_than_chance(seed):
    count = 20_000  # chance makes 0.05 pairs of equal seeds
    seeds = torch.tensor([fold_in(seed, "augment", step) for step in range(count)])
    assert count - len(seeds.unique()) <= 1
    bits = (seeds[:, None] >> torch.arange(32)) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 5 * 0.5 / count**0.5


def test_generator_depends_on_its_key_alone():
    torch.manual_seed(0)
    first = torch.rand(5, generator=generator(3, "epoch", 4))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    again = torch.rand(5, generator=generator(3, "epoch", 4))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, torch.rand(5, generator=generator(3, "epoch", 5)))
    expected = torch.Generator().manual_seed(fold_in(3, "epoch", 4))
    assert torch.equal(first, torch.rand(5, generator=expected))
