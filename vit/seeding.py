"""Counter-based randomness: every random number is a pure function of a seed and named counters.

No generator state survives a step, so a run that resumes at step t draws the same numbers as the
uninterrupted run, and there is no state to save.
"""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

CPU = torch.device("cpu")
NOISE_BLOCK = 32  # images whose noise one generator draws


def fold_in(seed: int, *keys: int | str) -> int:
    """Mix a seed with keys such as `("augment", step)` into a new, statistically independent seed.

    The result has 32 bits; torch's CPU generator ignores higher ones.
    """
    digest = hashlib.blake2b(repr((seed, *keys)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a torch generator on `device`, seeded with `fold_in(seed, *keys)`."""
    return torch.Generator(device).manual_seed(fold_in(seed, *keys))


class Draws:
    """Draws random numbers for a part of a batch, the same as for the whole batch.

    An image gets the same numbers however the batch is divided among processes: the numbers of all
    images are drawn. They depend on the seed, of 32 bits, and the size of the whole batch. In the
    shapes that the methods take, -1 stands for the images, as in `Tensor.view`.
    """

    def __init__(
        self, seed: int, batch_size: int, part: slice | None = None, device: torch.device = CPU
    ) -> None:
        self.seed, self.batch_size, self.device = seed, batch_size, device
        self.part = range(batch_size)[part or slice(None)]
        self._generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, low: float, high: float, shape: Sequence[int] = (-1, 1, 1, 1)) -> Tensor:
        """Draw float numbers from low to high."""
        return low + (high - low) * self._draw(torch.rand, shape)

    def integers(self, low: int, high: int, shape: Sequence[int] = (-1,)) -> Tensor:
        """Draw int64 numbers from low to high - 1."""
        return self._draw(partial(torch.randint, low, high), shape)

    def beta(self, alpha: float) -> Tensor:
        """Draw a float number from Beta(alpha, alpha) for each image: (B, 1, 1, 1).

        torch.distributions accepts no generator, so this calls the function behind its Dirichlet.
        """
        both = torch.full((self.batch_size, 2), alpha, device=self.device)
        drawn = torch._sample_dirichlet(both, generator=self._generator)[:, :1, None, None]
        return drawn[self.part.start : self.part.stop]

    def noise(self, shape: Sequence[int]) -> Tensor:
        """Draw standard normal numbers: (B, *shape); the same whenever it is called.

        Each block of images has its own generator, so a process only draws the blocks of its part.
        """
        first, last = self.part.start // NOISE_BLOCK, (self.part.stop - 1) // NOISE_BLOCK
        blocks = []
        for block in range(first, last + 1):
            draw = generator(self.seed, "noise", block, device=self.device)
            blocks.append(torch.randn(NOISE_BLOCK, *shape, generator=draw, device=self.device))
        start = self.part.start - first * NOISE_BLOCK
        return torch.cat(blocks)[start : start + len(self.part)]

    def _draw(self, function: Callable[..., Tensor], shape: Sequence[int]) -> Tensor:
        """Draw the numbers of the whole batch, and return the part's."""
        size = [self.batch_size if n == -1 else n for n in shape]
        drawn = function(size, generator=self._generator, device=self.device)
        return drawn.narrow(list(shape).index(-1), self.part.start, len(self.part))
