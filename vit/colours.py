"""Colours of maps, the same in all pictures and in the Attention tab.

Maps are in units of uniform attention, or signed in units of their mean absolute value. Each unit
has one fixed scale of colours, so figures can be compared. TensorBoard imports this, so it imports
neither torch nor matplotlib before they are needed.
"""

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Bar = tuple[str, tuple[float, float], str]  # name of a colour table, scale, label
UNIFORM: Bar = ("inferno", (0.0, 3.0), "× uniform")
SIGNED: Bar = ("RdBu_r", (-3.0, 3.0), "against ← → for, × mean")


@functools.cache
def table_of(name: str) -> np.ndarray:
    """Return one of matplotlib's colour tables, (256, 3) uint8."""
    import matplotlib

    return matplotlib.colormaps[name](np.arange(256), bytes=True)[:, :3]


def colour_map(heat: "Tensor | np.ndarray", bar: Bar = UNIFORM) -> np.ndarray:
    """Colour numbers (...): (..., 3) uint8. Those beyond the scale get the nearest colour."""
    name, (low, high), _ = bar
    values = heat if isinstance(heat, np.ndarray) else heat.cpu().numpy()
    steps = np.nan_to_num(256 * (values - low) / (high - low)).clip(0, 255)
    return table_of(name)[steps.astype(np.uint8)]


def as_pixels(images: "Tensor") -> np.ndarray:
    """Turn images (..., channels, H, W) uint8 into pixels (..., H, W, 3)."""
    return as_rgb(images.movedim(-3, -1).cpu().numpy())


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Show uint8 channels in colour, (..., 3): up to two as their mean, else the first three."""
    if pixels.shape[-1] < 3:
        mean = pixels.mean(axis=-1, keepdims=True).round().astype(np.uint8)
        return np.repeat(mean, 3, axis=-1)
    return pixels[..., :3]
