"""Sheets: a photo with its maps and their overlays, and a small image with overlays beside it."""

from collections.abc import Sequence

import numpy as np
from PIL import Image
from torch import Tensor

from vit.explain.drawing import (
    GAP,
    Bar,
    Text,
    as_pixels,
    colour_map,
    enlarge,
    framed,
    overlay,
    paper,
    paste,
    shorten,
)

ZOOM = 2  # pixels of a sheet to one pixel of all lengths below, so that it can be printed
PANEL = 220  # the longer side of a map
HEADER, TITLE = 42, 48  # height of the two lines above everything, and above a panel
NARROWEST, TITLE_WIDTH = 180, 190  # least width of the photo's column, and of those of maps
BEST, LINE_HEIGHT = 5, 36  # classes that are listed
BAR_HEIGHT, BAR_COLOUR, BAR_PAPER = 6, (76, 114, 176), 230
BORDER = 3  # width of the frame around what the model sees, in pixels of the sheet


def photo_sheet(
    photo: np.ndarray,
    seen: tuple[slice, slice],
    maps: Sequence[Tensor],
    titles: Sequence[str],
    bars: Sequence[Bar],
    header: str,
    probabilities: dict[str, float],
    padding: tuple[tuple[int, int], tuple[int, int]],
    fill: np.ndarray,
) -> np.ndarray:
    """Draw a photo, and a row with map and overlay for each map.

    Args:
        photo: (height, width, 3) uint8, of any size.
        seen: Rows and columns of the photo that the model sees; they are framed.
        maps: (rows, columns) each.
        titles: A text for each map, of up to two lines.
        bars: Colours and scale of each map.
        header: Two lines above everything.
        probabilities: Probability of each class, best first; the first five are listed below the
            photo if there is room, that is with two maps or more.
        padding: What the model sees around the photo, in pixels of it: above, below; left, right.
        fill: Colour of the padding, (3,) uint8.

    Returns:
        (height, width, 3) uint8.
    """
    size = _fit(photo.shape, PANEL, 2 * PANEL)
    part = photo[seen]
    view = tuple(n + sum(added) for n, added in zip(part.shape[:2], padding, strict=True))
    panel = _fit(view, PANEL, PANEL)
    left = 3 * GAP + max(size[1], NARROWEST)
    pitch, column_width = TITLE + panel[0], max(panel[1], TITLE_WIDTH)
    height = HEADER + max(pitch * len(maps), TITLE + size[0]) + 2 * GAP
    list_top = HEADER + TITLE + max(pitch, size[0] + TITLE)
    if len(maps) > 1:
        height = max(height, list_top + BEST * LINE_HEIGHT + GAP)
    canvas = paper(ZOOM * height, ZOOM * (left + 2 * column_width + 3 * GAP))
    top = HEADER + TITLE
    texts: list[Text] = [
        (GAP, HEADER - 8, "left", shorten(header, canvas.shape[1] / ZOOM - GAP)),
        (GAP, top - 5, "left", "photo"),
    ]
    shown = ZOOM * size[0], ZOOM * size[1]
    _place(canvas, _framed_part(_resize(photo, shown), seen, photo.shape), top, GAP)
    crop = _padded(part, padding, view, panel, fill)
    for row, (heat, title, bar) in enumerate(zip(maps, titles, bars, strict=True)):
        top = HEADER + TITLE + row * pitch
        parts = (enlarge(colour_map(heat, bar), crop.shape), overlay(crop, heat, bar))
        for column, (part, words) in enumerate(zip(parts, (title, "overlay"), strict=True)):
            x = left + column * (column_width + GAP)
            _place(canvas, part, top, x + (column_width - panel[1]) // 2)
            texts.append((x + column_width / 2, top - 5, "center", shorten(words, column_width)))
    if len(maps) > 1:
        texts += _list_classes(canvas, probabilities, list_top)
    return framed(
        canvas, texts, list(dict.fromkeys(bars)), length=panel[0] - 12, top=HEADER + TITLE + 4,
        zoom=ZOOM,
    )  # fmt: skip


def overlays_picture(
    image: Tensor, maps: Sequence[Tensor], caption: str, titles: Sequence[str], bars: Sequence[Bar]
) -> np.ndarray:
    """Draw an image and the overlays of several maps side by side.

    Args:
        image: (channels, H, W) uint8.
        maps: (rows, columns) each.
        caption: A caption above the image, of up to two lines.
        titles: A title above each overlay, of up to two lines.
        bars: Colours and scale of each map.
    """
    panel, top = 160, 48 - GAP
    canvas = paper(panel + top + GAP, (1 + len(maps)) * (panel + GAP) + 2 * GAP)
    pixels = as_pixels(image)
    parts = [pixels, *(overlay(pixels, heat, bar) for heat, bar in zip(maps, bars, strict=True))]
    texts: list[Text] = [(GAP, top - 5, "left", shorten(caption, panel))]
    for column, part in enumerate(parts):
        paste(canvas, part, top, GAP + column * (panel + GAP), panel)
    for column, words in enumerate(titles, start=1):
        middle = GAP + column * (panel + GAP) + panel / 2
        texts.append((middle, top - 5, "center", shorten(words, panel)))
    return framed(canvas, texts, list(dict.fromkeys(bars)), length=panel - 12, top=top + 4)


def _list_classes(canvas: np.ndarray, probabilities: dict[str, float], top: int) -> list[Text]:
    """Draw a bar for each of the best classes and return the texts above the bars."""
    texts: list[Text] = [(GAP, top - 5, "left", "predicted")]
    for number, (name, probability) in enumerate(list(probabilities.items())[:BEST]):
        bottom = top + number * LINE_HEIGHT + LINE_HEIGHT - 2 * BAR_HEIGHT
        texts.append((GAP, bottom - 2, "left", shorten(name, NARROWEST - 50)))
        texts.append((GAP + NARROWEST, bottom - 2, "right", f"{probability:.1%}"))
        bar = np.full((ZOOM * BAR_HEIGHT, ZOOM * NARROWEST, 3), BAR_PAPER, dtype=np.uint8)
        bar[:, : round(probability * bar.shape[1])] = BAR_COLOUR
        _place(canvas, bar, bottom, GAP)
    return texts


def _fit(shape: tuple[int, ...], height: int, width: int) -> tuple[int, int]:
    """Return the largest height and width of a picture that fit into a rectangle."""
    scale = min(height / shape[0], width / shape[1])
    return max(1, round(scale * shape[0])), max(1, round(scale * shape[1]))


def _place(canvas: np.ndarray, part: np.ndarray, top: int, left: int) -> None:
    """Copy pixels of a sheet to a place in pixels of the layout."""
    top, left = ZOOM * top, ZOOM * left
    canvas[top : top + part.shape[0], left : left + part.shape[1]] = part


def _resize(photo: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bring a photo to a size in pixels of the sheet; the pixels of a small one stay visible."""
    height, width = size
    small = 2 * photo.shape[0] <= height
    how = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(photo).resize((width, height), how))


def _padded(
    part: np.ndarray,
    padding: tuple[tuple[int, int], tuple[int, int]],
    view: tuple[int, ...],
    panel: tuple[int, int],
    fill: np.ndarray,
) -> np.ndarray:
    """Draw what the model sees in a panel: the part of the photo, and padding around it.

    Args:
        part: (h, w, 3) uint8.
        padding: Above, below; left, right of the part, in its pixels.
        view: Height and width of the part with padding.
        panel: Height and width of the panel in pixels of the layout.
        fill: Colour of the padding, (3,) uint8.
    """
    drawn = np.tile(fill, (ZOOM * panel[0], ZOOM * panel[1], 1))
    (top, bottom), (left, right) = (
        (round(before * shown / whole), round((whole - after) * shown / whole))
        for (before, after), shown, whole in zip(padding, drawn.shape, view, strict=False)
    )
    size = max(1, bottom - top), max(1, right - left)
    drawn[top : top + size[0], left : left + size[1]] = _resize(part, size)
    return drawn


def _framed_part(
    pixels: np.ndarray, seen: tuple[slice, slice], full: tuple[int, ...]
) -> np.ndarray:
    """Fade what the model does not see and frame what it sees, unless that is everything.

    Args:
        pixels: (h, w, 3) uint8, a photo of any size, resized.
        seen: Rows and columns of the photo as it was.
        full: Height and width of the photo as it was.
    """
    (top, bottom), (left, right) = (
        (round(part.start * shown / whole), round(part.stop * shown / whole))
        for part, shown, whole in zip(seen, pixels.shape[:2], full[:2], strict=True)
    )
    if (top, left) == (0, 0) and (bottom, right) == pixels.shape[:2]:
        return pixels
    drawn = (0.3 * pixels + 0.7 * 255).round().astype(np.uint8)
    drawn[top:bottom, left:right] = 0
    inside = slice(top + BORDER, bottom - BORDER), slice(left + BORDER, right - BORDER)
    drawn[inside] = pixels[inside]
    return drawn
