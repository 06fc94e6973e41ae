"""The sheet of a photo: the photo, and each of its maps with the overlay of both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from vit.explain.canvas import GAP, Text, enlarge, framed, overlay, paper, shorten
from vit.explain.colours import Bar, colour_map

ZOOM = 2  # pixels of a sheet to one pixel of all lengths below, so that it can be printed
PANEL = 220  # the longer side of a map
HEADER, TITLE = 42, 48  # height of the two lines above everything, and above a panel
NARROWEST, TITLE_WIDTH = 180, 190  # least width of the photo's column, and of those of maps
BEST, LINE_HEIGHT = 5, 36  # classes that are listed
BAR_HEIGHT, BAR_COLOUR, BAR_PAPER = 6, (76, 114, 176), 230
BORDER = 3  # width of the frame around what the model sees, in pixels of the sheet


@dataclass(frozen=True)
class View:
    """A photo, and what the model sees of it.

    Attributes:
        photo: (height, width, 3) uint8, of any size.
        seen: Rows and columns of the photo that the model sees.
        padding: What the model sees around them, in pixels of the photo: above, below; left, right.
        fill: Colour of the padding, (3,) uint8.
    """

    photo: np.ndarray
    seen: tuple[slice, slice]
    padding: tuple[tuple[int, int], tuple[int, int]]
    fill: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of what the model sees, in pixels of the photo."""
        height, width = self.photo[self.seen].shape[:2]
        (above, below), (left, right) = self.padding
        return height + above + below, width + left + right


def photo_sheet(
    view: View,
    maps: Sequence[Tensor],
    titles: Sequence[str],
    bars: Sequence[Bar],
    header: str,
    probabilities: dict[str, float],
) -> np.ndarray:
    """Draw a photo, and a row with map and overlay for each map.

    Args:
        view: The photo; what the model sees is framed.
        maps: (rows, columns) each.
        titles: A text for each map, of up to two lines.
        bars: Colours and scale of each map.
        header: Two lines above everything.
        probabilities: Probability of each class, best first; the first five are listed below the
            photo if there is room, that is with two maps or more.

    Returns:
        (height, width, 3) uint8.
    """
    size = _fit(view.photo.shape, PANEL, 2 * PANEL)
    panel = _fit(view.size, PANEL, PANEL)
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
    photo = _resize(view.photo, (ZOOM * size[0], ZOOM * size[1]))
    _place(canvas, _framed_part(photo, view), top, GAP)
    crop = _padded(view, panel)
    for row, (heat, title, bar) in enumerate(zip(maps, titles, bars, strict=True)):
        top = HEADER + TITLE + row * pitch
        parts = (enlarge(colour_map(heat, bar), crop.shape), overlay(crop, heat, bar))
        for column, (part, words) in enumerate(zip(parts, (title, "overlay"), strict=True)):
            x = left + column * (column_width + GAP)
            _place(canvas, part, top, x + (column_width - panel[1]) // 2)
            texts.append((x + column_width / 2, top - 5, "center", shorten(words, column_width)))
    if len(maps) > 1:
        texts += _list_classes(canvas, probabilities, list_top)
    scales, length = list(dict.fromkeys(bars)), panel[0] - 12
    return framed(canvas, texts, scales, length=length, top=HEADER + TITLE + 4, zoom=ZOOM)


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


def _padded(view: View, panel: tuple[int, int]) -> np.ndarray:
    """Draw what the model sees in a panel: the part of the photo, and padding around it.

    Args:
        view: The photo.
        panel: Height and width of the panel in pixels of the layout.
    """
    drawn = np.tile(view.fill, (ZOOM * panel[0], ZOOM * panel[1], 1))
    (top, bottom), (left, right) = (
        (round(before * shown / full), round((full - after) * shown / full))
        for (before, after), shown, full in zip(
            view.padding, drawn.shape[:2], view.size, strict=True
        )
    )
    size = max(1, bottom - top), max(1, right - left)
    drawn[top : top + size[0], left : left + size[1]] = _resize(view.photo[view.seen], size)
    return drawn


def _framed_part(pixels: np.ndarray, view: View) -> np.ndarray:
    """Fade what the model does not see and frame what it sees, unless that is everything.

    Args:
        pixels: (h, w, 3) uint8, the photo, resized.
        view: The photo.
    """
    (top, bottom), (left, right) = (
        (round(part.start * shown / full), round(part.stop * shown / full))
        for part, shown, full in zip(view.seen, pixels.shape[:2], view.photo.shape[:2], strict=True)
    )
    if (top, left) == (0, 0) and (bottom, right) == pixels.shape[:2]:
        return pixels
    drawn = (0.3 * pixels + 0.7 * 255).round().astype(np.uint8)
    drawn[top:bottom, left:right] = 0
    inside = slice(top + BORDER, bottom - BORDER), slice(left + BORDER, right - BORDER)
    drawn[inside] = pixels[inside]
    return drawn
