"""Figures of attention maps: tensors in, pictures out.

Pictures are (height, width, 3) uint8 arrays; see `vit.explain.drawing` for colours and scale. Maps
are in units of uniform attention.

Shapes: B images, L layers, H heads, T steps.
"""

import itertools
import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from PIL import Image, ImageDraw
from torch import Tensor

from vit.explain.drawing import (
    FONT_SIZE,
    GAP,
    LINE,
    SIGNED,
    SMALL_FONT,
    UNIFORM,
    Bar,
    Text,
    as_pixels,
    colour_map,
    enlarge,
    font_of,
    framed,
    overlay,
    paper,
    paste,
    shorten,
    text_width,
    upwards,
)
from vit.explain.maps import map_title

DIFFERENCE_COLOURS, DIFFERENCE_SCALE = "RdBu_r", (-2.0, 2.0)
NAME = 18  # height of a line with the name of an image, in pixels


def captions_of(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> list[str]:
    """Return two-line captions with the true class, the predicted class and its probability.

    Args:
        logits: (B, C).
        labels: (B,) int64.
        classes: The C class names.
    """
    shares, predicted = logits.softmax(dim=1).max(dim=1)
    return [
        f"true {classes[label]}\npredicted {classes[guess]} {share:.0%}"
        for label, guess, share in zip(
            labels.tolist(), predicted.tolist(), shares.tolist(), strict=True
        )
    ]


def attention_picture(
    images: Tensor,
    maps: Tensor | Sequence[Tensor],
    captions: Sequence[str],
    titles: Sequence[str],
    bars: Sequence[Bar] | None = None,
) -> np.ndarray:
    """Draw images, their attention maps and the overlays of both, one row per image.

    Args:
        images: (B, channels, H, W) uint8.
        maps: B maps (rows, columns), which may differ in size.
        captions: B captions above the images, of up to two lines of 30 characters.
        titles: B titles above the maps, of up to two lines of 30 characters.
        bars: Colours and scales of the B maps; None means `UNIFORM`.

    Returns:
        A picture, 256 pixels high per row and 706 wide; 58 wider with two different scales.
    """
    bars = [UNIFORM] * len(images) if bars is None else bars
    panel, title = 208, 48
    canvas = paper((panel + title) * len(images), 3 * panel + 4 * GAP)
    texts: list[Text] = []
    for row, (image, heat, caption, kind, bar) in enumerate(
        zip(images, maps, captions, titles, bars, strict=True)
    ):
        top = row * (panel + title) + title - GAP
        pixels = as_pixels(image)
        for column, part in enumerate((pixels, colour_map(heat, bar), overlay(pixels, heat, bar))):
            paste(canvas, part, top, GAP + column * (panel + GAP), panel)
        for column, (align, words) in enumerate(
            (("left", caption), ("center", kind), ("center", "overlay"))
        ):
            left = GAP + column * (panel + GAP) + (panel / 2 if align == "center" else 0)
            texts.append((left, top - 5, align, shorten(words, panel)))
    scales = list(dict.fromkeys(bars))
    return framed(canvas, texts, scales, length=panel - 12, top=title - GAP + 4)


def rollout_pictures(images: Tensor, maps: Tensor, captions: Sequence[str]) -> list[np.ndarray]:
    """Draw each image with its attention rollout as a separate picture.

    Arguments are those of `attention_picture`.
    """
    title = [map_title("rollout", "")]
    return [
        attention_picture(images[i : i + 1], maps[i : i + 1], captions[i : i + 1], title)
        for i in range(len(images))
    ]


def named(picture: np.ndarray, name: str) -> np.ndarray:
    """Write the name of an image above a picture of it."""
    strip, width = paper(NAME, picture.shape[1]), picture.shape[1] - 2 * GAP
    texts: list[Text] = [(GAP, NAME, "left", shorten(name, width, front=True))]
    return np.concatenate([framed(strip, texts, [], length=0, top=0), picture])


def filmstrip_picture(images: Tensor, maps: Tensor, steps: Sequence[int]) -> np.ndarray:
    """Draw the maps of several training steps: images as rows, steps as columns.

    Args:
        images: (B, channels, H, W) uint8.
        maps: (T, B, rows, columns).
        steps: The T optimizer steps.
    """
    cells = [
        [as_pixels(image), *(colour_map(heat) for heat in row)]
        for image, row in zip(images, maps.transpose(0, 1), strict=True)
    ]
    head = ["step", *(f"{step:,}" for step in steps)]
    words = "rollout (class-agnostic)"  # fits over a single step
    return _sheet(words, cells, head, [""] * len(cells), side=64, margin=GAP)


def heads_picture(image: Tensor, maps: Tensor, caption: str) -> np.ndarray:
    """Draw the attention of every head: layers as rows, heads as columns.

    Args:
        image: (channels, H, W) uint8.
        maps: (L, H, rows, columns).
        caption: The class of the image.
    """
    blank = np.full((1, 1, 3), 255, dtype=np.uint8)
    cells = [
        [as_pixels(image) if number == 0 else blank, *(colour_map(heat) for heat in layer)]
        for number, layer in enumerate(maps)
    ]
    head = [caption, *(f"head {number}" for number in range(maps.shape[1]))]
    words = "attention of each head (class-agnostic)"
    return _sheet(words, cells, head, [f"layer {n}" for n in range(len(maps))], side=96, margin=52)


def heads_chart(statistics: dict[str, Tensor]) -> np.ndarray:
    """Draw statistics of all heads as heatmaps side by side, layers as rows and heads as columns.

    Each has a colour scale of its own, from its least to its greatest value.

    Args:
        statistics: Values (L, H) by title.
    """
    layers, heads = next(iter(statistics.values())).shape
    cell, left, top, below = (max(45, 150 // heads), 30), 34, 24, 36  # pixels
    size = cell[1] * layers, cell[0] * heads
    panel = left + size[1] + 8
    canvas = paper(top + size[0] + below, panel * len(statistics))
    lights = [Normalize()(values.cpu().numpy()) for values in statistics.values()]
    starts = [number * panel + left for number in range(len(statistics))]
    for start, light in zip(starts, lights, strict=True):
        colours = matplotlib.colormaps["viridis"](light, bytes=True)[..., :3]
        canvas[top : top + size[0], start : start + size[1]] = enlarge(colours, size)
    picture = Image.fromarray(canvas)
    draw, bottom = ImageDraw.Draw(picture), top + size[0]
    for start, light, (title, values) in zip(starts, lights, statistics.items(), strict=True):
        across = [start + (head + 0.5) * cell[0] for head in range(heads)]
        down = [top + (layer + 0.5) * cell[1] for layer in range(layers)]
        middle = start + size[1] / 2
        draw.text((middle, top - 4), title, "black", font_of(FONT_SIZE), "md")
        draw.text((middle, bottom + 32), "head", "black", font_of(SMALL_FONT), "md")
        for head, x in enumerate(across):
            draw.text((x, bottom + 17), str(head), "black", font_of(SMALL_FONT), "md")
        for layer, y in enumerate(down):
            draw.text((start - 4, y), str(layer), "black", font_of(SMALL_FONT), "rm")
        for (layer, head), value in np.ndenumerate(values.cpu().numpy()):
            colour = "white" if light[layer, head] < 0.6 else "black"
            draw.text((across[head], down[layer]), f"{value:.2g}", colour, font_of(7), "mm")
        word = upwards("layer", SMALL_FONT)
        picture.paste(word, (start - left, top + (size[0] - word.height) // 2))
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


def comparison_picture(
    images: Tensor,
    maps: Sequence[Tensor],
    titles: Sequence[Sequence[str]],
    captions: Sequence[str],
) -> np.ndarray:
    """Draw the rollout of one or more models side by side on the same scale.

    For two models, their difference follows.

    Args:
        images: (B, channels, H, W) uint8.
        maps: Attention rollout of each model, (B, rows, columns); the grids of two must be the
            same.
        titles: For each model, B titles above its maps, of one line of 30 characters.
        captions: B captions above the images, of lines of 30 characters.
    """
    panel, heads = 176, len(maps) + 1 + (len(maps) == 2)
    title = 18 + 15 * max(2, 1 + max(caption.count("\n") for caption in captions))
    canvas = paper((panel + title) * len(images), heads * panel + (heads + 1) * GAP)
    texts: list[Text] = []
    for row, image in enumerate(images):
        top = row * (panel + title) + title - GAP
        parts = [as_pixels(image), *(colour_map(found[row]) for found in maps)]
        words = [
            f"{shorten(title_of[row], panel)}\nrollout (class-agnostic)" for title_of in titles
        ]
        if len(maps) == 2:
            parts.append(_difference(maps[0][row], maps[1][row]))
            words.append("difference:\nsecond map − first map")
        for column, part in enumerate(parts):
            paste(canvas, part, top, GAP + column * (panel + GAP), panel)
        texts.append((GAP, top - 5, "left", shorten(captions[row], panel)))
        for column, text in enumerate(words, start=1):
            texts.append((GAP + column * (panel + GAP) + panel / 2, top - 5, "center", text))
    bars = [UNIFORM]
    if len(maps) == 2:
        bars.append((DIFFERENCE_COLOURS, DIFFERENCE_SCALE, "difference, × uniform"))
    return framed(canvas, texts, bars, length=panel - 12, top=title)


def _difference(one: Tensor, other: Tensor) -> np.ndarray:
    """Colour by how much the second of two maps (rows, columns) exceeds the first."""
    share = Normalize(*DIFFERENCE_SCALE)((other - one).cpu().numpy())
    return matplotlib.colormaps[DIFFERENCE_COLOURS](share, bytes=True)[..., :3]


def _sheet(
    title: str,
    cells: list[list[np.ndarray]],
    head: list[str],
    rows: list[str],
    *,
    side: int,
    margin: int,
) -> np.ndarray:
    """Arrange pictures as a table with a title, column headings and row labels."""
    top = 44
    canvas = paper(top + len(cells) * (side + GAP), margin + len(head) * (side + GAP))
    texts: list[Text] = [(margin, top - 25, "left", title)]
    texts += [
        (margin + number * (side + GAP) + side / 2, top - 5, "center", words)
        for number, words in enumerate(head)
    ]
    for number, (row, words) in enumerate(zip(cells, rows, strict=True)):
        high = top + number * (side + GAP)
        texts.append((4, high + side / 2, "left", words))
        for column, part in enumerate(row):
            paste(canvas, part, high, margin + column * (side + GAP), side)
    return framed(canvas, texts, [UNIFORM], length=min(196, len(canvas) - top - 12), top=top)
