"""Counter-based randomness: every random draw is a pure function of a seed and named counters.

Nothing keeps a generator's state between steps, so a run that is resumed at step t draws what the
uninterrupted run would have drawn there, with no state to save.
"""

import hashlib

import torch


def fold_in(seed: int, *keys: int | str) -> int:
    """Mix a seed with counters and names into a new, statistically independent seed.

    Args:
        seed: Non-negative.
        keys: What the draw is for, e.g. `("augment", step)`; integers are non-negative.

    Returns:
        A seed of 32 bits: torch's CPU generator keeps no more of it.
    """
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on `device`, seeded with `fold_in(seed, *keys)`."""
    return torch.Generator(device).manual_seed(fold_in(seed, *keys))
