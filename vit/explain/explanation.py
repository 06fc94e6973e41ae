"""The Explanation of a photo: what a model predicts for it, its maps, and a sheet of both.

A sheet has the photo on the left, and on the right a row with map and overlay for each kind of map.
"""

import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vit.explain.canvas import GAP, Text, enlarge, framed, overlay, paper, shorten
from vit.explain.colours import as_rgb, bar_of, colour_map
from vit.explain.maps import map_title

ZOOM = 2  # pixels of a sheet to one pixel of all lengths below, so that it can be printed
PANEL = 220  # the longer side of a map
HEADER, TITLE = 42, 48  # height of the two lines above everything, and above a panel
NARROWEST, TITLE_WIDTH = 180, 190  # least width of the photo's column, and of those of maps
BEST, LINE_HEIGHT = 5, 36  # classes that are listed
BAR_HEIGHT, BAR_COLOUR, BAR_PAPER = 6, (76, 114, 176), 230
BORDER = 3  # width of the frame around what the model sees, in pixels of the sheet


@dataclass(frozen=True, eq=False)
class Explanation:
    """The prediction for a photo with one or several maps; a notebook shows its sheet.

    Attributes:
        photo: (height, width, channels) uint8, of any size.
        seen: Rows and columns of the photo that the model sees.
        maps: By kind, (rows, columns) float32 on the CPU, in the units of
            `vit.explain.maps.attention_maps`.
        probabilities: Probability of each class by name, 0 to 1, best first.
        target: The class that class-specific maps explain.
        name: The name of the photo, for the sheet.
        padding: What the model sees around the photo, in pixels of it: above, below; left, right.
        fill: Colour of the padding, a value for each channel, 0 to 255.
    """

    photo: np.ndarray = field(repr=False)
    seen: tuple[slice, slice] = field(repr=False)
    maps: dict[str, Tensor] = field(repr=False)
    probabilities: dict[str, float]
    target: str
    name: str = "photo"
    padding: tuple[tuple[int, int], tuple[int, int]] = field(default=((0, 0), (0, 0)), repr=False)
    fill: tuple[int, ...] = field(default=(0,), repr=False)

    @property
    def kind(self) -> str:
        """The kind of the first map."""
        return next(iter(self.maps))

    @property
    def map(self) -> Tensor:
        """The first map, (rows, columns) float32."""
        return self.maps[self.kind]

    @property
    def predicted(self) -> str:
        """The most probable class."""
        return next(iter(self.probabilities))

    def sheet(self) -> Image.Image:
        """Draw the photo, its maps and their overlays, with captions and colour bars.

        What the model sees is framed. The five most probable classes are listed below the photo if
        there is room, that is with two maps or more.
        """
        size = _fit(self.photo.shape, PANEL, 2 * PANEL)
        panel = _fit(self._seen_size, PANEL, PANEL)
        left = 3 * GAP + max(size[1], NARROWEST)
        pitch, column_width = TITLE + panel[0], max(panel[1], TITLE_WIDTH)
        height = HEADER + max(pitch * len(self.maps), TITLE + size[0]) + 2 * GAP
        list_top = HEADER + TITLE + max(pitch, size[0] + TITLE)
        if len(self.maps) > 1:
            height = max(height, list_top + BEST * LINE_HEIGHT + GAP)
        canvas = paper(ZOOM * height, ZOOM * (left + 2 * column_width + 3 * GAP))
        first = HEADER + TITLE
        texts: list[Text] = [
            (GAP, HEADER - 8, "left", shorten(self._header(), canvas.shape[1] / ZOOM - GAP)),
            (GAP, first - 5, "left", "photo"),
        ]
        _place(canvas, self._framed_photo(ZOOM * size[0], ZOOM * size[1]), first, GAP)
        crop = self._padded_crop(ZOOM * panel[0], ZOOM * panel[1])
        bars = [bar_of(kind) for kind in self.maps]
        for row, (kind, heat) in enumerate(self.maps.items()):
            top, title = first + row * pitch, map_title(kind, self.target)
            parts = enlarge(colour_map(heat, bars[row]), crop.shape), overlay(crop, heat, bars[row])
            for column, (part, words) in enumerate(zip(parts, (title, "overlay"), strict=True)):
                x = left + column * (column_width + GAP)
                _place(canvas, part, top, x + (column_width - panel[1]) // 2)
                words = shorten(words, column_width)
                texts.append((x + column_width / 2, top - 5, "center", words))
        if len(self.maps) > 1:
            texts += self._list_classes(canvas, list_top)
        scales, length = list(dict.fromkeys(bars)), panel[0] - 12
        drawn = framed(canvas, texts, scales, length=length, top=first + 4, zoom=ZOOM)
        return Image.fromarray(drawn)

    @property
    def _seen_size(self) -> tuple[int, int]:
        """Height and width of what the model sees, in pixels of the photo."""
        height, width = self.photo[self.seen].shape[:2]
        (above, below), (left, right) = self.padding
        return height + above + below, width + left + right

    def _header(self) -> str:
        """Return two lines: name, size and view of the photo, and the prediction."""
        height, width = self.photo.shape[:2]
        if self.photo[self.seen].shape != self.photo.shape:
            view = "; the model sees the framed part"
        else:
            view = "; the model sees it padded" if np.any(self.padding) else ""
        header = (
            f"{self.name}, {width:,} × {height:,} pixels{view}\n"
            f"predicted {self.predicted} {self.probabilities[self.predicted]:.1%}"
        )
        if self.target != self.predicted:
            header += f", explained for {self.target} {self.probabilities[self.target]:.1%}"
        return header

    def _list_classes(self, canvas: np.ndarray, top: int) -> list[Text]:
        """Draw a bar for each of the best classes and return the texts above the bars."""
        texts: list[Text] = [(GAP, top - 5, "left", "predicted")]
        for number, (name, probability) in enumerate(list(self.probabilities.items())[:BEST]):
            bottom = top + number * LINE_HEIGHT + LINE_HEIGHT - 2 * BAR_HEIGHT
            texts.append((GAP, bottom - 2, "left", shorten(name, NARROWEST - 50)))
            texts.append((GAP + NARROWEST, bottom - 2, "right", f"{probability:.1%}"))
            bar = np.full((ZOOM * BAR_HEIGHT, ZOOM * NARROWEST, 3), BAR_PAPER, dtype=np.uint8)
            bar[:, : round(probability * bar.shape[1])] = BAR_COLOUR
            _place(canvas, bar, bottom, GAP)
        return texts

    def _padded_crop(self, height: int, width: int) -> np.ndarray:
        """Draw what the model sees, (height, width, 3): its part of the photo, and padding."""
        drawn = np.tile(as_rgb(np.array(self.fill, np.uint8)), (height, width, 1))
        (top, bottom), (left, right) = (
            (round(before * shown / full), round((full - after) * shown / full))
            for (before, after), shown, full in zip(
                self.padding, (height, width), self._seen_size, strict=True
            )
        )
        size = max(1, bottom - top), max(1, right - left)
        crop = _resize(as_rgb(self.photo[self.seen]), *size)
        drawn[top : top + size[0], left : left + size[1]] = crop
        return drawn

    def _framed_photo(self, height: int, width: int) -> np.ndarray:
        """Draw the photo, (height, width, 3).

        What the model does not see is faded and what it sees is framed, unless that is everything.
        """
        pixels = _resize(as_rgb(self.photo), height, width)
        (top, bottom), (left, right) = (
            (round(part.start * shown / full), round(part.stop * shown / full))
            for part, shown, full in zip(
                self.seen, (height, width), self.photo.shape[:2], strict=True
            )
        )
        if (top, left, bottom, right) == (0, 0, height, width):
            return pixels
        drawn = (0.3 * pixels + 0.7 * 255).round().astype(np.uint8)
        drawn[top:bottom, left:right] = 0
        inside = slice(top + BORDER, bottom - BORDER), slice(left + BORDER, right - BORDER)
        drawn[inside] = pixels[inside]
        return drawn

    def save(self, path: str | Path) -> None:
        """Write the sheet to a file; its suffix chooses the format, e.g. .png or .pdf."""
        self.sheet().save(path, dpi=(200, 200))

    def show(self) -> None:
        """Open the sheet in an image viewer."""
        self.sheet().show()

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.sheet().save(buffer, "PNG")
        return buffer.getvalue()


def _fit(shape: tuple[int, ...], height: int, width: int) -> tuple[int, int]:
    """Return the largest height and width of a picture that fit into a rectangle."""
    scale = min(height / shape[0], width / shape[1])
    return max(1, round(scale * shape[0])), max(1, round(scale * shape[1]))


def _place(canvas: np.ndarray, part: np.ndarray, top: int, left: int) -> None:
    """Copy pixels of a sheet to a place in pixels of the layout."""
    top, left = ZOOM * top, ZOOM * left
    canvas[top : top + part.shape[0], left : left + part.shape[1]] = part


def _resize(photo: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bring a photo to a size in pixels of the sheet; the pixels of a small one stay visible."""
    small = 2 * photo.shape[0] <= height
    method = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(photo).resize((width, height), method))
