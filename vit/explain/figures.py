"""Figures of attention maps: tensors in, pictures out.

Pictures are (height, width, 3) uint8 arrays; see `vit.explain.colours` for colours and scale. Maps
are in units of uniform attention.

Shapes: B images, L layers, H heads.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vit.explain.canvas import (
    FONT_SIZE,
    GAP,
    LINE,
    SMALL_FONT,
    Text,
    enlarge,
    font_of,
    framed,
    overlay,
    paper,
    paste,
    shorten,
    text_width,
)
from vit.explain.colours import SIGNED, UNIFORM, Bar, as_pixels, colour, colour_map
from vit.explain.features import colours
from vit.explain.maps import map_title

BLANK = paper(1, 1)  # in place of a picture
NAME = 18  # height of a line with the name of an image, in pixels


@dataclass(frozen=True)
class Panel:
    """A picture, (height, width, 3) uint8, with words above it."""

    pixels: np.ndarray
    words: str
    align: str = "center"


def captions_of(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> list[str]:
    """Return two-line captions with the true class, the predicted class and its probability.

    Args:
        logits: (B, C).
        labels: (B,) int64.
        classes: The C class names.
    """
    probabilities, predicted = logits.softmax(dim=1).max(dim=1)
    return [
        f"true {classes[label]}\npredicted {classes[guess]} {probability:.0%}"
        for label, guess, probability in zip(
            labels.tolist(), predicted.tolist(), probabilities.tolist(), strict=True
        )
    ]


def attention_picture(
    image: Tensor, maps: Sequence[Tensor], caption: str, titles: Sequence[str], bars: Sequence[Bar]
) -> np.ndarray:
    """Draw an image, a map of it and the overlay of both; a row for each of several maps.

    Args:
        image: (channels, H, W) uint8.
        maps: M maps (rows, columns), which may differ in size.
        caption: Words above the image, up to two lines of 30 characters.
        titles: M titles above the maps, of up to two lines of 30 characters.
        bars: Colours and scales of the M maps.

    Returns:
        A picture, 256 pixels high per row and 706 wide; 58 wider with two different scales.
    """
    rows, pixels = [], as_pixels(image)
    for heat, title, bar in zip(maps, titles, bars, strict=True):
        row = [Panel(pixels, caption, "left"), Panel(colour_map(heat, bar), title)]
        rows.append([*row, Panel(overlay(pixels, heat, bar), "overlay")])
    return _panels(rows, bars, side=208, head=48)


def rollout_picture(image: Tensor, heat: Tensor, caption: str) -> np.ndarray:
    """Draw an image with its attention rollout; see `attention_picture`."""
    return attention_picture(image, [heat], caption, [map_title("rollout", "")], [UNIFORM])


def named(picture: np.ndarray, name: str) -> np.ndarray:
    """Write the name of an image above a picture of it."""
    strip, width = paper(NAME, picture.shape[1]), picture.shape[1] - 2 * GAP
    texts: list[Text] = [(GAP, NAME, "left", shorten(name, width, front=True))]
    return np.concatenate([framed(strip, texts, [], length=0, top=0), picture])


def features_picture(images: Tensor, features: Tensor, grid: tuple[int, int]) -> np.ndarray:
    """Draw the first three components of patches as colours: images as rows, layers as columns.

    Args:
        images: (B, channels, H, W) uint8.
        features: (B, L, P, K), from `vit.explain.features.coordinates`.
        grid: Rows and columns of patches.
    """
    cells = [
        [as_pixels(image), *colours(numbers).unflatten(1, grid).numpy()]
        for image, numbers in zip(images, features, strict=True)
    ]
    head = ["", *(f"layer {number}" for number in range(features.shape[1]))]
    words = "patches: principal components 1, 2, 3"
    return sheet(words, cells, head, [""] * len(cells), side=96, margin=GAP, bars=[])


def statistics_picture(statistics: dict[str, Tensor]) -> np.ndarray:
    """Draw statistics of all heads side by side, layers as rows and heads as columns.

    Each has a colour scale of its own, from its least to its greatest value.

    Args:
        statistics: Values (L, H) by title.
    """
    charts = [_statistic(title, values.cpu().numpy()) for title, values in statistics.items()]
    return np.concatenate(charts, axis=1)


def _statistic(title: str, values: np.ndarray) -> np.ndarray:
    layers, heads = values.shape
    values = np.nan_to_num(values, posinf=0, neginf=0)  # of a model that diverges
    width, height, left, top, below = max(48, 150 // heads), 30, 52, 26, 26  # pixels
    # Values that are equal to the digits that are written have equal colours.
    span = max(values.max() - values.min(), 0.05 * np.abs(values).max(), 1e-9)
    low, high = values.min(), values.min() + span
    shown = colour(values, ("Blues", (low, high), title))
    cells = enlarge(shown, (height * layers, width * heads))
    decimals = min(max(0, 1 - math.floor(math.log10(max(abs(low), abs(high))))), 4)
    canvas = paper(top + len(cells) + below, left + cells.shape[1] + GAP)
    canvas[top : top + len(cells), left : left + cells.shape[1]] = cells
    picture = Image.fromarray(canvas)
    draw, small = ImageDraw.Draw(picture), font_of(title, SMALL_FONT)
    draw.text((left + width * heads / 2, top - 6), title, "black", font_of(title, FONT_SIZE), "ms")
    for (layer, head), value in np.ndenumerate(values):
        place = left + (head + 0.5) * width, top + (layer + 0.5) * height
        ink = "white" if value > low + 0.5 * span else "black"
        draw.text(place, f"{value:.{decimals}f}", ink, small, "mm")
        if layer == layers - 1:
            draw.text((place[0], canvas.shape[0] - 10), f"head {head}", "black", small, "ms")
        if head == 0:
            draw.text((left - 4, place[1]), f"layer {layer}", "black", small, "rm")
    return np.array(picture)


def gallery_picture(
    title: str,
    images: Tensor,
    names: Sequence[str],
    captions: Sequence[str],
    maps: Tensor | None = None,
    headings: Sequence[Sequence[str]] = (),
    columns: int = 4,
) -> np.ndarray:
    """Draw images, each followed by its overlays if there are maps, several images per row.

    Images with overlays are drawn larger if long captions need the room.

    Args:
        title: What the gallery shows, up to two lines.
        images: (B, channels, H, W) uint8.
        names: B names, written above the captions.
        captions: B captions, of up to two lines.
        maps: (B, M, rows, columns) signed maps to lay over each image, or None.
        headings: For each image, M headings above its overlays, like the captions.
        columns: Images per row.
    """
    panel, space, first = 112, 46 + NAME, 38
    count = maps.shape[1] if maps is not None else 0
    if count:
        words = [*captions, *itertools.chain.from_iterable(headings)]
        widest = max(text_width(line) for text in words for line in text.split("\n"))
        panel = max(panel, min(2 * panel, math.ceil(widest) + 4))
    width = panel * (1 + count) if count else panel + 64  # without maps, room for the captions
    rows = -(-len(images) // columns)
    canvas = paper(first + rows * (panel + space), columns * (width + 3 * GAP))
    texts: list[Text] = [(GAP, first - 6, "left", title)]
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        top = first + number // columns * (panel + space) + space - GAP
        left = GAP + number % columns * (width + 3 * GAP)
        name = shorten(names[number], width - 4, front=True)
        texts.append((left, top - 4 - 2 * LINE, "left", name))
        parts, above = [as_pixels(image)], [caption]
        if maps is not None:
            parts += [overlay(parts[0], heat, SIGNED) for heat in maps[number]]
            above += headings[number]
        for column, (part, text) in enumerate(zip(parts, above, strict=True)):
            x = left + column * panel
            paste(canvas, part, top, x, panel)
            texts.append((x, top - 4, "left", shorten(text, (panel if count else width) - 4)))
    length = min(160, rows * (panel + space) - space - 14)
    bars = [SIGNED] if count else []
    return framed(canvas, texts, bars, length=length, top=first + space)


def _panels(
    rows: Sequence[Sequence[Panel]], bars: Sequence[Bar], *, side: int, head: int
) -> np.ndarray:
    """Draw rows of panels of equal size, with their words above them and colour bars at the right.

    Args:
        rows: The panels, equally many in each row.
        bars: Their scales; each is drawn once.
        side: The longer side of a picture, in pixels.
        head: Height of the words, in pixels.
    """
    canvas = paper((side + head) * len(rows), len(rows[0]) * (side + GAP) + GAP)
    texts: list[Text] = []
    for number, row in enumerate(rows):
        top = number * (side + head) + head - GAP
        for column, panel in enumerate(row):
            left = GAP + column * (side + GAP)
            paste(canvas, panel.pixels, top, left, side)
            x = left + side / 2 if panel.align == "center" else left
            texts.append((x, top - 5, panel.align, shorten(panel.words, side)))
    return framed(canvas, texts, list(dict.fromkeys(bars)), length=side - 12, top=head - GAP + 4)


def sheet(
    title: str,
    cells: list[list[np.ndarray]],
    head: list[str],
    rows: list[str],
    *,
    side: int,
    margin: int,
    bars: Sequence[Bar] = (UNIFORM,),
) -> np.ndarray:
    """Arrange pictures as a table with a title, column headings and row labels.

    Args:
        title: A line above everything.
        cells: The pictures, row by row.
        head: Words above each column, up to two lines.
        rows: Words at the left of each row.
        side: The longer side of a picture, in pixels.
        margin: Width of the words at the left, in pixels.
        bars: Colour bars at the right.
    """
    top = 44
    canvas = paper(top + len(cells) * (side + GAP), margin + len(head) * (side + GAP))
    texts: list[Text] = [(margin, top - 25, "left", title)]
    for number, words in enumerate(head):
        texts.append((margin + number * (side + GAP) + side / 2, top - 5, "center", words))
    for number, (row, words) in enumerate(zip(cells, rows, strict=True)):
        high = top + number * (side + GAP)
        texts.append((4, high + side / 2, "left", words))
        for column, part in enumerate(row):
            paste(canvas, part, high, margin + column * (side + GAP), side)
    return framed(canvas, texts, bars, length=min(196, len(canvas) - top - 12), top=top)
