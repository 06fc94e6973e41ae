"""Pictures of attention, confusion and calibration: tensors in, uint8 pictures out.

Pictures are (height, width, 3) uint8 arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from vit.evaluation import wilson_interval

DPI = 100
COLOURS = "inferno"
SCALE = (0.0, 3.0)  # units of uniform attention; fixed, so that pictures can be compared


def attention_picture(images: Tensor, maps: Tensor, captions: Sequence[str]) -> np.ndarray:
    """Draw images, their attention maps and both laid over each other, one row per image.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, rows, columns), in units of uniform attention.
        captions: B texts, of up to two lines of 30 characters.

    Returns:
        700 pixels wide and 250 high per row. Pixels and patches are enlarged as they are,
        without smoothing.
    """
    panel, title, gap, wide = 208, 42, 6, 700  # pixels
    tall = (panel + title) * len(images)
    figure = Figure(figsize=(wide / DPI, tall / DPI), dpi=DPI)

    def axes_at(left: float, top: float, width: float, height: float) -> Axes:
        # Placed by hand: matplotlib's own layout takes three times as long as the drawing.
        return figure.add_axes(
            (left / wide, 1 - (top + height) / tall, width / wide, height / tall)
        )

    for row, (image, heat, caption) in enumerate(zip(images, maps, captions, strict=True)):
        top = row * (panel + title) + title - gap
        plain, mapped, overlaid = (
            axes_at(gap + i * (panel + gap), top, panel, panel) for i in range(3)
        )
        pixels = image.permute(1, 2, 0).cpu().numpy()
        plain.imshow(pixels, interpolation="nearest")
        # Grey below the map, so that every colour in the overlay is the map's.
        overlaid.imshow(
            pixels.mean(axis=-1), cmap="gray", vmin=0, vmax=255, interpolation="nearest"
        )
        for axis, alpha in ((mapped, 1.0), (overlaid, 0.6)):
            axis.imshow(
                heat.cpu().numpy(), cmap=COLOURS, vmin=SCALE[0], vmax=SCALE[1], alpha=alpha,
                extent=(-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5),
                interpolation="nearest",
            )  # fmt: skip
        bar = axes_at(gap + 3 * (panel + gap), top + 4, 12, panel - 12)
        for axis in (plain, mapped, overlaid):
            axis.set_axis_off()
        plain.set_title(caption, fontsize=9, loc="left", pad=4)
        mapped.set_title("attention rollout\n(class-agnostic)", fontsize=9, pad=4)
        overlaid.set_title("overlay", fontsize=9, pad=4)
        colours = ScalarMappable(Normalize(*SCALE), COLOURS)
        figure.colorbar(colours, cax=bar, extend="max").set_label("× uniform", fontsize=8)
        bar.tick_params(labelsize=8, pad=1)
    return _pixels(figure)


def confusion_picture(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> np.ndarray:
    """Draw a confusion matrix (C x C counts, rows are true classes) with shares of each row."""
    counts = torch.tensor(confusion, dtype=torch.float64)
    shares = counts / counts.sum(dim=1, keepdim=True)  # a class without images is nan, drawn grey
    few = len(classes) <= 20
    figure = Figure(figsize=(6.4, 5.6) if few else (9, 8), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    axis.set_facecolor("0.85")
    # The square root makes rare confusions visible beside the diagonal.
    shown = axis.imshow(shares.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    figure.colorbar(shown, ax=axis, label="share of the true class")
    axis.set(xlabel="predicted", ylabel="true")
    axis.set_title("confusion, % of each true class", fontsize=10)
    if few:
        axis.set_xticks(range(len(classes)), classes, rotation=45, ha="right")
        axis.set_yticks(range(len(classes)), classes)
        for (row, column), share in np.ndenumerate(shares.numpy()):
            if share > 0.005:
                colour = "white" if share > 0.5 else "black"
                text = f"{share:.0%}".rstrip("%")
                axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    return _pixels(figure)


def reliability_picture(bins: Sequence[dict[str, Any]], ece: float) -> np.ndarray:
    """Draw accuracy over confidence, with the number of images in each bin below it."""
    figure = Figure(figsize=(4.6, 5.2), dpi=DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence = [b["confidence"] for b in bins]
    upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="calibrated")
    accuracy = np.array([b["accuracy"] for b in bins])
    low, high = np.array([wilson_interval(round(b["accuracy"] * b["n"]), b["n"]) for b in bins]).T
    upper.errorbar(
        confidence, accuracy, (accuracy - low, high - accuracy), marker="o", markersize=4,
        capsize=2, elinewidth=1, label="model, 95 % interval",
    )  # fmt: skip
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
