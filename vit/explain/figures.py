"""Figures of attention maps: tensors in, pictures (height, width, 3) uint8 out.

Images are (channels, H, W) uint8, or B of them, and maps (rows, columns) in the units of their
kind; see `vit.colours` for colours and scale.

Shapes: B images, L layers, H heads.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vit.colours import SIGNED, UNIFORM, as_pixels, colour_map
from vit.console import counted
from vit.explain.canvas import BLANK, Panel, font_of, join, overlay, table, text_width
from vit.explain.features import colours
from vit.explain.kinds import RolloutOptions
from vit.explain.maps import DEFAULTS, bar_of, map_title

MARK = (0, 213, 255)  # outlines the query, as in the Attention tab


def captions_of(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> list[str]:
    """Return captions of images with logits (B, C): true class, predicted class, probability."""
    best = logits.softmax(dim=1).max(dim=1)
    return [
        f"true {classes[label]}\npredicted {classes[guess]} {probability:.0%}"
        for label, guess, probability in zip(labels, best.indices, best.values, strict=True)
    ]


def attention_picture(
    image: Tensor,
    maps: Mapping[str, Tensor],
    caption: str,
    explained: str = "",
    name: str = "",
    rollout: RolloutOptions = DEFAULTS,
) -> np.ndarray:
    """Draw an image, a map of it and the overlay of both; a row for each of several maps.

    The maps, by kind, may differ in size. Their titles name the explained class and the options of
    `attention_rollout`. The name is written above everything, the caption above the image.
    """
    rows, pixels, bars = [], as_pixels(image), [bar_of(kind) for kind in maps]
    for (kind, heat), bar in zip(maps.items(), bars, strict=True):
        map_panel = Panel(colour_map(heat, bar), map_title(kind, explained, rollout))
        overlaid = Panel(overlay(pixels, heat, bar), "overlay")
        rows.append([Panel(pixels, caption), map_panel, overlaid])
    return table(rows, (208, 208), title=name, bars=bars)


def features_picture(images: Tensor, features: Tensor, grid: tuple[int, int]) -> np.ndarray:
    """Draw the first three components of patches as colours: images as rows, layers as columns.

    The features (B, L, P, K) come from `vit.explain.features.coordinates`.
    """
    rows = [
        [as_pixels(image), *colours(numbers).unflatten(1, grid).numpy()]
        for image, numbers in zip(images, features, strict=True)
    ]
    head = ["", *(f"layer {number}" for number in range(features.shape[1]))]
    return table(_headed(rows, head), (96, 96), title="patches: principal components 1, 2, 3")


def corruption_picture(image: Tensor, corrupted: Mapping[str, Sequence[Tensor]]) -> np.ndarray:
    """Draw an image with each kind of corruption as a column, the five severities as rows."""
    side = min(112, max(72, *image.shape[1:]))
    rows = [[BLANK, *map(as_pixels, row)] for row in zip(*corrupted.values(), strict=True)]
    rows[0][0] = as_pixels(image)
    head = [kind.replace("_", "\n") for kind in ("clean", *corrupted)]
    labels = [f"severity {number}" for number in range(1, 6)]
    return table(_headed(rows, head), (side, side), labels=labels)


def distance_picture(offsets: Tensor, tokens: int, images: int) -> np.ndarray:
    """Draw `attention_by_offset` of a number of images, (L, H, 2 rows - 1, 2 columns - 1).

    Layers are rows, heads columns; the query is outlined. `tokens` is their number, N.
    """
    depth, heads, *shape = offsets.shape
    side = max(3, 120 // max(shape))  # pixels to an offset
    bar = UNIFORM if offsets.min() >= 0 else (*SIGNED[:2], UNIFORM[2])
    pixels = colour_map(tokens * offsets, bar).repeat(side, axis=2).repeat(side, axis=3)
    row, column = (slice(length // 2 * side, (length // 2 + 1) * side) for length in shape)
    edge = np.pad(np.zeros((side - 2, side - 2), dtype=bool), 1, constant_values=True)
    pixels[:, :, row, column][:, :, edge] = MARK
    rows = _headed([*pixels], [f"head {number}" for number in range(heads)])
    mean = f"mean of {counted(images, 'image')}"
    title = f"attention by offset of the key from the query (outlined), {mean}"
    labels, box = [f"layer {number}" for number in range(depth)], pixels.shape[2:4]
    return table(rows, box, title=title, labels=labels, bars=[bar], zoom=2)


def statistics_picture(statistics: Mapping[str, Tensor]) -> np.ndarray:
    """Draw statistics (L, H) by title side by side, each from its least to its greatest value."""
    return join([_statistic(title, values) for title, values in statistics.items()], axis=1)


def _statistic(title: str, statistic: Tensor) -> np.ndarray:
    """Draw layers as rows and heads as columns; values that are written alike look alike."""
    values = np.nan_to_num(statistic.cpu().numpy(), posinf=0, neginf=0)  # of a model that diverges
    size = max(np.abs(values).max(), 1e-9)
    low, span = values.min(), max(np.ptp(values), 0.05 * size)
    decimals = min(max(0, 1 - math.floor(math.log10(size))), 4)
    box = (28, max(48, 150 // values.shape[1]))
    shades = colour_map(values, ("Blues", (low, low + span), title))
    rows = [
        [_number(f"{value:.{decimals}f}", shade, box) for value, shade in zip(*row, strict=True)]
        for row in zip(values, shades, strict=True)
    ]
    head = [f"head {number}" for number in range(values.shape[1])]
    labels = [f"layer {number}" for number in range(len(values))]
    return table(_headed(rows, head), box, title=title, labels=labels)


def _number(text: str, shade: np.ndarray, box: tuple[int, int]) -> np.ndarray:
    """Write a number on a coloured ground."""
    cell = Image.new("RGB", box[::-1], tuple(shade.tolist()))
    ink = "white" if shade.mean() < 128 else "black"
    ImageDraw.Draw(cell).text((box[1] / 2, box[0] / 2), text, ink, font_of(text), "mm")
    return np.array(cell)


def gallery_picture(
    title: str,
    images: Tensor,
    names: Sequence[str],
    captions: Sequence[str],
    maps: Tensor | None = None,
    headings: Sequence[Sequence[str]] = (),
    columns: int = 4,
) -> np.ndarray:
    """Draw B images, each followed by its overlays if there are maps, several images per row.

    Names are written above the captions. Maps are signed, (B, M, rows, columns), with M headings
    for the overlays of each image. Long captions make images larger.
    """
    words = "\n".join([*captions, *("\n".join(heads) for heads in headings)])
    side = math.ceil(min(224, max(112, *map(text_width, words.split("\n")))))
    groups = []
    for number, image in enumerate(images):
        pixels = as_pixels(image)
        row = [Panel(pixels, captions[number])]
        if maps is not None:
            overlays = (overlay(pixels, heat, SIGNED) for heat in maps[number])
            row += map(Panel, overlays, headings[number])
        groups.append(table([row], (side, side), title=names[number]))
    lines = [join(groups[n : n + columns], 1) for n in range(0, len(groups), columns)]
    gallery = join(lines, 0)
    bars = [] if maps is None else [SIGNED]
    return table([[Panel(gallery)]], (len(gallery), gallery.shape[1]), title=title, bars=bars)


def _headed(rows: Sequence[Sequence[np.ndarray]], head: Sequence[str]) -> list[list[Panel]]:
    """Return rows of panels, with a heading above each column."""
    first, *others = rows
    panels = [Panel(pixels, words) for pixels, words in zip(first, head, strict=True)]
    return [panels, *([Panel(pixels) for pixels in row] for row in others)]
