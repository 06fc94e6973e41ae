"""Pictures of attention, confusion and calibration: tensors in, uint8 pictures out.

Pictures are (height, width, 3) uint8 arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

DPI = 100
COLOURS = "inferno"
SCALE = (0.0, 3.0)  # units of uniform attention; fixed, so that pictures can be compared


def attention_picture(images: Tensor, maps: Tensor, captions: Sequence[str]) -> np.ndarray:
    """Draw images, their attention maps and both laid over each other, one row per image.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, rows, columns), in units of uniform attention.
        captions: B lines of text.

    Returns:
        About 700 pixels wide and 245 high per row. Pixels and patches are enlarged as they are,
        without smoothing.
    """
    count, _, height, width = images.shape
    figure = Figure(figsize=(7.0, 2.45 * count), dpi=DPI, layout="constrained")
    axes = figure.subplots(count, 3, squeeze=False)
    whole = (-0.5, width - 0.5, height - 0.5, -0.5)
    for row, image, heat, caption in zip(axes, images.cpu(), maps.cpu(), captions, strict=True):
        pixels = image.permute(1, 2, 0).numpy()
        # Darkening what is not attended to keeps the colours of what is.
        light = (heat / SCALE[1]).clamp(0, 1).repeat_interleave(height // len(heat), 0)
        light = light.repeat_interleave(width // heat.shape[1], 1)[..., None].numpy()
        row[0].imshow(pixels, interpolation="nearest")
        shown = row[1].imshow(
            heat.numpy(), cmap=COLOURS, vmin=SCALE[0], vmax=SCALE[1], extent=whole,
            interpolation="nearest",
        )  # fmt: skip
        row[2].imshow((pixels * (0.15 + 0.85 * light)).astype(np.uint8), interpolation="nearest")
        for axis in row:
            axis.set_axis_off()
        row[0].set_title(caption, fontsize=9, loc="left")
        row[1].set_title("attention rollout", fontsize=9)
        row[2].set_title("overlay", fontsize=9)
        bar = figure.colorbar(shown, ax=row.tolist(), extend="max", pad=0.01, aspect=15)
        bar.set_label("× uniform attention", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    return _pixels(figure)


def confusion_picture(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> np.ndarray:
    """Draw a confusion matrix (C x C counts, rows are true classes) with shares of each row."""
    counts = torch.tensor(confusion, dtype=torch.float64)
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    few = len(classes) <= 20
    figure = Figure(figsize=(6.4, 5.6) if few else (9, 8), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    shown = axis.imshow(shares.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(shown, ax=axis, label="share of the true class")
    axis.set(xlabel="predicted", ylabel="true")
    if few:
        axis.set_xticks(range(len(classes)), classes, rotation=45, ha="right")
        axis.set_yticks(range(len(classes)), classes)
        for (row, column), share in np.ndenumerate(shares.numpy()):
            if share >= 0.005:
                colour = "white" if share > 0.5 else "black"
                text = f"{share:.0%}".rstrip("%")
                axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
        axis.set_title("confusion, % of each true class", fontsize=10)
    return _pixels(figure)


def reliability_picture(bins: Sequence[dict[str, Any]], ece: float) -> np.ndarray:
    """Draw accuracy over confidence, with the number of images in each bin below it."""
    figure = Figure(figsize=(4.6, 5.2), dpi=DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence = [b["confidence"] for b in bins]
    upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="calibrated")
    upper.plot(confidence, [b["accuracy"] for b in bins], marker="o", markersize=4, label="model")
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    upper.set_title(f"reliability, expected calibration error {ece:.3f}", fontsize=10)
    upper.legend(fontsize=8, frameon=False)
    lower.bar(confidence, [b["n"] for b in bins], width=0.04, color="C0")
    lower.set(xlabel="confidence", ylabel="images")
    return _pixels(figure)


def _pixels(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
