"""Counter-based randomness: every random number is a pure function of a seed and named counters.

No generator state survives a step, so a run that resumes at step t draws the same numbers as the
uninterrupted run, and there is no state to save.
"""

import hashlib

import torch


def fold_in(seed: int, *keys: int | str) -> int:
    """Mix a seed with keys such as `("augment", step)` into a new, statistically independent seed.

    The result has 32 bits; torch's CPU generator ignores higher ones.
    """
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on `device`, seeded with `fold_in(seed, *keys)`."""
    return torch.Generator(device).manual_seed(fold_in(seed, *keys))
