"""Seeds derived from names and counters."""

from vit.seeding import fold_in

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
