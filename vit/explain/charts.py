"""Charts of the report, (height, width, 3) uint8, drawn with matplotlib.

matplotlib is imported when it is needed, because that takes half a second.
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vit.data.severities import CORRUPTIONS
from vit.explain.canvas import DPI, font_file, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERED, NAMED = 20, 50  # largest numbers of classes drawn with percentages, and with names
NAME_WIDTH = 130  # of a class, in pixels; longer ones are shortened


def _panels(size: tuple[float, float], *grid: int, **options: Any) -> tuple[Any, Any]:
    """Return a figure of a width and height in inches, and its axes in a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    return figure, figure.subplots(*grid, **options)


def confusion_picture(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> np.ndarray:
    """Draw C x C counts, normalized over the true classes, which are the rows."""
    from matplotlib.colors import PowerNorm
    from matplotlib.font_manager import FontProperties

    counts = torch.tensor(confusion, dtype=torch.float64)
    percent = 100 * counts / counts.sum(dim=1, keepdim=True)  # nan without images, drawn grey
    few = len(classes) <= NUMBERED
    figure, axis = _panels((6.4, 5.6) if few else (9, 8))
    axis.set_facecolor("0.85")
    # The square root makes rare confusions visible next to the diagonal.
    shown = axis.imshow(percent.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 100))
    figure.colorbar(shown, ax=axis, label="% of the true class")
    axis.set(xlabel="predicted", ylabel="true")
    axis.set_title("confusion, % of each true class", fontsize=10)
    if len(classes) <= NAMED:
        names = [shorten(name, NAME_WIDTH) for name in classes]
        font = FontProperties(fname=font_file("".join(names)), size=10 if few else 7)
        style = {"fontproperties": font, "parse_math": False}  # a name may have $ signs
        axis.set_xticks(range(len(names)), names, rotation=90, **style)
        axis.set_yticks(range(len(names)), names, **style)
    if few:
        for (row, column), share in np.ndenumerate(percent.numpy()):
            if share > 0.5:
                colour = "white" if share > 50 else "black"
                centre = {"ha": "center", "va": "center"}
                axis.text(column, row, f"{share:.0f}", color=colour, fontsize=8, **centre)
    return pixels_of(figure)


def reliability_picture(results: dict[str, dict[str, Any]]) -> np.ndarray:
    """Draw accuracy over confidence, and images per bin, of `measure_calibration` by title."""
    size, shared = (4.6 * len(results), 5.2), {"sharex": True, "sharey": "row"}
    figure, axes = _panels(size, 2, len(results), height_ratios=(3, 1), squeeze=False, **shared)
    for (upper, lower), (title, result) in zip(axes.T, results.items(), strict=True):
        bins = result["reliability"]
        upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1, label="perfect")
        keys = "confidence", "accuracy", "accuracy_95", "n"
        confidence, accuracy, interval, count = (np.array([b[key] for b in bins]) for key in keys)
        low, high = interval.T
        errors = accuracy - low, high - accuracy
        style = {"marker": "o", "markersize": 4, "capsize": 2, "elinewidth": 1}
        upper.errorbar(confidence, accuracy, errors, label="model, 95% interval", **style)
        upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
        low, high = result["ece_95"]
        error = f"calibration error {result['ece']:.3f} ({low:.3f} to {high:.3f})"
        upper.set_title(f"{title}, {error}", fontsize=10)
        upper.legend(fontsize=8, frameon=False)
        lower.bar(confidence, count, width=0.04, color="C0")
        lower.set(xlabel="confidence", ylabel="images")
    return pixels_of(figure)


def scores_picture(scores: dict[str, tuple[Tensor, Tensor]]) -> np.ndarray:
    """Draw histograms of scores by name: of test images (N,) and of unfamiliar images (M,)."""
    figure, axes = _panels((3.2 * len(scores), 2.8), 1, len(scores))
    for axis, (name, pair) in zip(axes, scores.items(), strict=True):
        edges = np.histogram_bin_edges(torch.cat(pair).numpy(), 40)
        for values, label in zip(pair, ("test images", "unfamiliar images"), strict=True):
            weights = np.full(len(values), 1 / len(values))
            axis.hist(values.numpy(), edges, weights=weights, alpha=0.6, label=label)
        limit, label = pair[0].quantile(0.05).item(), "95% of test images are above"
        axis.axvline(limit, color="0.3", linestyle="--", linewidth=1, label=label)
        axis.set(xlabel=name)
    figure.supylabel("fraction of images", fontsize=10)
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    return pixels_of(figure)


def corruption_chart(summary: dict[str, Any], clean: float) -> np.ndarray:
    """Draw accuracy over severity, with 95% intervals: a panel for each group of corruptions.

    The summary comes from `vit.reporting.corruptions.summarize`; clean images have severity 0.
    """
    groups = list(dict.fromkeys(entry.group for entry in CORRUPTIONS.values()))
    figure, axes = _panels((11, 3.4), 1, len(groups), sharey=True)
    for axis, group in zip(axes, groups, strict=True):
        for kind, row in summary["kinds"].items():
            if CORRUPTIONS[kind].group == group:
                (line,) = axis.plot([clean, *row["accuracy"]], marker="o", markersize=3)
                line.set_label(kind.replace("_", " "))
                low, high = np.array(row["accuracy_95"]).T
                axis.fill_between(range(1, 6), low, high, color=line.get_color(), alpha=0.2)
        axis.axhline(clean, color="0.6", linestyle="--", linewidth=1)
        axis.set(xlabel="severity (0 is clean)", ylim=(0, 1), xticks=range(6))
        axis.set_title(group, fontsize=10)
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        axis.legend(fontsize=8, frameon=False, ncols=2, **below)
    axes[0].set_ylabel("accuracy")
    return pixels_of(figure)


def pixels_of(figure: "Figure") -> np.ndarray:
    """Render a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # see `font_file`
        canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
