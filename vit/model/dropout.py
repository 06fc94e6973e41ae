"""Dropout and stochastic depth whose masks do not depend on how a batch is divided.

The image's key, the layer's number and the element's index are hashed to 32 bits, which are
compared with the rate, so several processes or micro-batches drop what one process would. Without
keys, as in a notebook, the modules draw from torch's generator.

The hash is a permutation of the 32-bit integers from https://github.com/skeeto/hash-prospector with
an avalanche bias of 0.165. Its multipliers fit into int32, whose products wrap around.

Shapes: B batch, L layers that drop something.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn


def scramble(numbers: Tensor) -> Tensor:
    """Map int32 numbers to int32 numbers that look random, no two to the same one."""
    # A shift of a negative number brings in ones, which the mask removes.
    x = numbers ^ ((numbers >> 16) & 0xFFFF)
    x = x * 0x604BAA5D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * 0x43D6CE97
    return x ^ ((x >> 15) & 0x1FFFF)


def derive(key: Tensor, numbers: Tensor) -> Tensor:
    """Derive keys from keys and numbers, int32 that broadcast; one-to-one in either argument."""
    return scramble(scramble(numbers) ^ key)


def image_keys(seed: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the keys, (count,) int32, of images from position `first` of the whole batch on.

    The seed has 32 bits and differs between steps.
    """
    positions = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return derive(torch.tensor(seed).to(torch.int32), positions)


def keep_mask(keys: Tensor, shape: Sequence[int], rate: float) -> Tensor:
    """Choose the elements, (B, *shape) bool, that dropout keeps.

    Args:
        keys: (B,) int32, of the images in one layer.
        shape: Shape of an image's activations, fewer than 2³¹.
        rate: Probability of dropping an element, 0 to less than 1, in steps of 2⁻³².
    """
    indices = torch.arange(math.prod(shape), dtype=torch.int32, device=keys.device)
    bits = derive(keys[:, None], indices)  # uniform from -2³¹ to 2³¹ - 1
    return (bits >= round(rate * 2**32) - 2**31).unflatten(1, tuple(shape))


class Dropout(nn.Dropout):
    """torch's dropout, but with masks that are functions of keys inside `keyed_dropout`."""

    keys: Tensor | None = None  # (B,) int32; None leaves the mask to torch

    def take(self, keys: Tensor | None) -> None:
        """Set the keys of the next images, or none."""
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of (B, ...) in training and scale the others."""
        if self.keys is None or not self.training or self.p == 0:
            return super().forward(x)
        return torch.where(keep_mask(self.keys, x.shape[1:], self.p), x / (1 - self.p), 0.0)


class StochasticDepth(Dropout):
    """Drops whole branches of an image in training and scales the others (arXiv 1603.09382)."""

    # (B,) float32 factors of the images inside `keyed_dropout`. If `forward` computed them,
    # torch.compile would compile every block anew for its rate.
    scale: Tensor | None = None

    def take(self, keys: Tensor | None) -> None:
        """Choose which of the next images are dropped, or leave it to torch."""
        self.scale = None
        if keys is not None:
            kept = keep_mask(keys, (1,), self.p).squeeze(1)
            self.scale = kept.float() / (1 - self.p)

    def forward(self, x: Tensor) -> Tensor:
        """Drop or scale each image of (B, ...)."""
        if self.training and self.scale is not None:
            return x * self.scale.to(x.dtype).view(-1, *[1] * (x.ndim - 1))
        if not self.training or self.p == 0:
            return x
        return x * super().forward(x.new_ones(len(x), *[1] * (x.ndim - 1)))


@contextlib.contextmanager
def keyed_dropout(model: nn.Module, keys: Tensor) -> Iterator[None]:
    """Give the images of a batch keys (B,), see `image_keys`, in forward and backward pass.

    The L layers are the `Dropout` modules with a rate above 0, in the order of `model.modules()`.
    """
    layers = [module for module in model.modules() if isinstance(module, Dropout) and module.p > 0]
    numbers = torch.arange(len(layers), dtype=torch.int32, device=keys.device)
    for layer, layer_keys in zip(layers, derive(keys, numbers[:, None]), strict=True):
        layer.take(layer_keys)
    try:
        yield
    finally:
        for layer in layers:
            layer.take(None)
