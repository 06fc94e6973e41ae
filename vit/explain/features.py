"""Patches in few numbers: principal components that all images share.

A frame describes the patch tokens of one layer: their mean, and axes in the directions in which
they vary most, each as long as their standard deviation. A token is approximately the mean plus a
weighted sum of the axes; the remainder is orthogonal to all of them.

Shapes: L layers, B batch, P patches, D token width, K numbers of a patch.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 32  # K: one for what is left out, the others components
SPREAD = 2.5  # standard deviations at the ends of the scale of colours, as in features.js


def fit_frames(batches: Iterable[Sequence[Tensor]]) -> Tensor:
    """Find the principal components of patch tokens in batches of L tensors (B, P, D).

    Frames are (L, K, D) float32, on the CPU: the mean, then K - 1 axes, the longest first. K is
    `NUMBERS`, or smaller if D is. The largest entry of an axis is positive, as in scikit-learn.
    """
    frames = []
    for layer in zip(*batches, strict=True):
        tokens = torch.cat(layer).flatten(0, 1).cpu().double()
        values, vectors = torch.linalg.eigh(torch.cov(tokens.T, correction=0))
        directions = vectors.flip(1).T[: NUMBERS - 1]
        largest = directions.abs().argmax(dim=1, keepdim=True)
        lengths = values.flip(0)[: NUMBERS - 1, None].clamp(min=0).sqrt()
        axes = lengths * directions * directions.gather(1, largest).sign()
        frames.append(torch.cat([tokens.mean(dim=0, keepdim=True), axes]))
    return torch.stack(frames).float()


def coordinates(tokens: Sequence[Tensor], frames: Tensor) -> Tensor:
    """Measure L patch tokens (B, P, D) in the frames (L, K, D) of their layers.

    The numbers (B, L, P, K), float32 on the CPU, are the length of what is left out, then the
    components in units of their standard deviation; components that do not vary are 0.
    """
    axes = frames[:, 1:]
    squares = axes.square().sum(dim=-1, keepdim=True)
    inverse = (axes / squares.where(squares > 0, 1)).transpose(1, 2)
    centred = torch.stack([layer.cpu().float() for layer in tokens], dim=1) - frames[:, None, 0]
    components = centred @ inverse
    left_out = (centred - components @ axes).norm(dim=-1, keepdim=True)
    return torch.cat([left_out, components], dim=-1)


def colours(numbers: Tensor) -> Tensor:
    """Show numbers of patches (..., K) in colour, (..., 3) uint8: three components are RGB."""
    components = F.pad(numbers[..., 1:4], (0, max(0, 4 - numbers.shape[-1])))
    return (127.5 + 127.5 / SPREAD * components).clamp(0, 255).round().to(torch.uint8)
