"""Charts: statistics of attention heads, confusion matrix and reliability diagram.

The two charts of the report are drawn with matplotlib, which is imported when it is needed, because
that takes half a second. Pictures are (height, width, 3) uint8 arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vit.explain.canvas import (
    DPI,
    FONT_SIZE,
    SMALL_FONT,
    enlarge,
    font_families,
    font_of,
    paper,
    pixels_of,
    shorten,
    upwards,
)
from vit.explain.colours import blues, colour

NUMBERED, NAMED = 20, 50  # largest numbers of classes drawn with percentages, and with names
NAME_WIDTH = 130  # of a class, in pixels; longer ones are shortened


def heads_chart(statistics: dict[str, Tensor]) -> np.ndarray:
    """Draw statistics of all heads as heatmaps side by side, layers as rows and heads as columns.

    Each has a colour scale of its own, from its least to its greatest value.

    Args:
        statistics: Values (L, H) by title.
    """
    charts = [_heads_chart(title, values.cpu().numpy()) for title, values in statistics.items()]
    return np.concatenate(charts, axis=1)


def _heads_chart(title: str, values: np.ndarray) -> np.ndarray:
    """Draw one statistic (L, H) as a heatmap."""
    layers, heads = values.shape
    cell, left, top, below = (max(45, 150 // heads), 30), 34, 24, 36  # pixels
    height, width = cell[1] * layers, cell[0] * heads
    # Values that are equal to the digits that are written have equal colours.
    span = max(values.max() - values.min(), 0.05 * np.abs(values).max(), 1e-9)
    shares = (values - values.min()) / span
    canvas = paper(top + height + below, left + width + 8)
    cells = enlarge(colour(shares, blues()), (height, width))
    canvas[top : top + height, left : left + width] = cells
    picture = Image.fromarray(canvas)
    draw, bottom, middle = ImageDraw.Draw(picture), top + height, left + width / 2
    small = font_of(SMALL_FONT)
    draw.text((middle, top - 4), title, "black", font_of(FONT_SIZE), "md")
    draw.text((middle, bottom + 32), "head", "black", small, "md")
    across = [left + (head + 0.5) * cell[0] for head in range(heads)]
    down = [top + (layer + 0.5) * cell[1] for layer in range(layers)]
    for head, x in enumerate(across):
        draw.text((x, bottom + 17), str(head), "black", small, "md")
    for layer, y in enumerate(down):
        draw.text((left - 4, y), str(layer), "black", small, "rm")
    for (layer, head), value in np.ndenumerate(values):
        ink = "white" if shares[layer, head] > 0.5 else "black"
        draw.text((across[head], down[layer]), f"{value:.2g}", ink, font_of(7), "mm")
    word = upwards("layer", SMALL_FONT)
    picture.paste(word, (0, top + (height - word.height) // 2))
    return np.array(picture)


def confusion_picture(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> np.ndarray:
    """Draw a confusion matrix, normalized over the true classes.

    Args:
        confusion: C x C counts, rows are true classes and columns predicted ones.
        classes: The C class names.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts = torch.tensor(confusion, dtype=torch.float64)
    shares = counts / counts.sum(dim=1, keepdim=True)  # a class without images is nan, drawn grey
    few = len(classes) <= NUMBERED
    figure = Figure(figsize=(6.4, 5.6) if few else (9, 8), dpi=DPI, layout="constrained")
    axis = figure.subplots()
    axis.set_facecolor("0.85")
    # The square root makes rare confusions visible next to the diagonal.
    shown = axis.imshow(shares.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1))
    figure.colorbar(shown, ax=axis, label="fraction of the true class")
    axis.set(xlabel="predicted", ylabel="true")
    axis.set_title("confusion, % of each true class", fontsize=10)
    if len(classes) <= NAMED:
        names = [shorten(name, NAME_WIDTH) for name in classes]
        how: dict[str, Any] = {"family": font_families(), "fontsize": 10 if few else 7}
        turned: dict[str, Any] = {"rotation": 45, "ha": "right"} if few else {"rotation": 90}
        axis.set_xticks(range(len(names)), names, **turned, **how)
        axis.set_yticks(range(len(names)), names, **how)
    if few:
        for (row, column), share in np.ndenumerate(shares.numpy()):
            if share > 0.005:
                colour = "white" if share > 0.5 else "black"
                text = f"{share:.0%}".rstrip("%")
                axis.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    return pixels_of(figure)


def reliability_picture(bins: Sequence[dict[str, Any]], ece: float) -> np.ndarray:
    """Draw a reliability diagram: accuracy over confidence, with the images per bin below.

    Args:
        bins: Result of `vit.evaluation.reliability`.
        ece: Expected calibration error, 0 to 1.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 5.2), dpi=DPI, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    confidence = [b["confidence"] for b in bins]
    upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="calibrated")
    accuracy = np.array([b["accuracy"] for b in bins])
    low, high = np.array([b["accuracy_95"] for b in bins]).T
    upper.errorbar(
        confidence, accuracy, (accuracy - low, high - accuracy), marker="o", markersize=4,
        capsize=2, elinewidth=1, label="model, 95% interval",
    )  # fmt: skip
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    upper.set_title(f"reliability, expected calibration error {ece:.3f}", fontsize=10)
    upper.legend(fontsize=8, frameon=False)
    lower.bar(confidence, [b["n"] for b in bins], width=0.04, color="C0")
    lower.set(xlabel="confidence", ylabel="images")
    return pixels_of(figure)
