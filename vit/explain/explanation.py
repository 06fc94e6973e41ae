"""The Explanation of a photo: what a model predicts for it, its maps, and a sheet of both."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from vit.colours import as_rgb, colour_map
from vit.explain.canvas import Panel, fit, join, overlay, resize, table
from vit.explain.maps import bar_of, map_title
from vit.files import open_atomically
from vit.settings import require

ZOOM = 2  # pixels of a sheet to one pixel of all lengths below, so that it can be printed
PANEL = 220  # the longer side of a map
NARROWEST = 180  # least width of the photo's column
BEST, BAR_HEIGHT, BAR_COLOUR, BAR_PAPER = 5, 6, (76, 114, 176), 230  # bars of probabilities
BORDER = 3  # width of the frame around what the model sees, in pixels of the sheet


@dataclass(frozen=True, eq=False)
class Explanation:
    """The prediction for a photo with one or several maps; a notebook shows its sheet.

    Attributes:
        photo: (height, width, channels) uint8, of any size.
        seen: Rows and columns of the photo that the model sees.
        maps: By kind, (rows, columns) float32 on the CPU, see `vit.Classifier.maps`.
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
        """Draw the photo on the left, and a row with map and overlay for each kind on the right.

        What the model sees is framed. With two maps or more, there is room below the photo for the
        five most probable classes.
        """
        height, width = fit(self.photo.shape, (PANEL, 2 * PANEL))
        photo = Panel(self._framed_photo(ZOOM * height, ZOOM * width), "\nphoto")
        left = [table([[photo]], (height, max(width, NARROWEST)), zoom=ZOOM)]
        if len(self.maps) > 1:
            left.append(self._classes())
        view = self._view()
        height, width = fit(view.shape, (PANEL, PANEL))
        view = resize(view, (ZOOM * height, ZOOM * width))
        rows, bars = [], [bar_of(kind) for kind in self.maps]
        for (kind, heat), bar in zip(self.maps.items(), bars, strict=True):
            pixels, title = resize(colour_map(heat, bar), view.shape), map_title(kind, self.target)
            rows.append([Panel(pixels, title), Panel(overlay(view, heat, bar), "overlay")])
        drawn = join([join(left, 0), table(rows, (PANEL, PANEL), bars=bars, zoom=ZOOM)], 1)
        box = drawn.shape[0] // ZOOM, drawn.shape[1] // ZOOM
        return Image.fromarray(table([[Panel(drawn)]], box, title=self._header(), zoom=ZOOM))

    def _header(self) -> str:
        """Return two lines: name, size and view of the photo, and the prediction."""
        height, width = self.photo.shape[:2]
        header = f"{self.name}, {width:,} × {height:,} pixels"
        if self.photo[self.seen].shape != self.photo.shape:
            header += "; the model sees the framed part"
        elif np.any(self.padding):
            header += "; the model sees it padded"
        header += f"\npredicted {self.predicted} {self.probabilities[self.predicted]:.1%}"
        if self.target != self.predicted:
            header += f", explained for {self.target} {self.probabilities[self.target]:.1%}"
        return header

    def _classes(self) -> np.ndarray:
        """Draw the most probable classes, with a bar for each."""
        rows = []
        for name, probability in list(self.probabilities.items())[:BEST]:
            bar = np.full((ZOOM * BAR_HEIGHT, ZOOM * NARROWEST, 3), BAR_PAPER, dtype=np.uint8)
            bar[:, : round(probability * bar.shape[1])] = BAR_COLOUR
            rows.append([Panel(bar, f"{name} {probability:.1%}")])
        return table(rows, (BAR_HEIGHT, NARROWEST), title="predicted", zoom=ZOOM)

    def _view(self) -> np.ndarray:
        """Return what the model sees, (height, width, 3): its part of the photo, and padding."""
        part, widths = self.photo[self.seen], (*self.padding, (0, 0))
        inside = np.pad(np.ones((*part.shape[:2], 1), dtype=bool), widths)
        fill = np.array(self.fill, dtype=np.uint8)
        return as_rgb(np.where(inside, np.pad(part, widths), fill))

    def _framed_photo(self, height: int, width: int) -> np.ndarray:
        """Draw the photo with a frame around what the model sees, unless that is everything."""
        pixels = resize(as_rgb(self.photo), (height, width))
        if self.photo[self.seen].shape == self.photo.shape:
            return pixels
        down, across = height / self.photo.shape[0], width / self.photo.shape[1]
        rows, columns = self.seen
        top, bottom = round(down * rows.start), round(down * rows.stop)
        left, right = round(across * columns.start), round(across * columns.stop)
        drawn = (0.3 * pixels + 0.7 * 255).round().astype(np.uint8)
        drawn[top:bottom, left:right] = pixels[top:bottom, left:right]
        frame = left, top, max(left, right - 1), max(top, bottom - 1)  # also of less than a pixel
        picture = Image.fromarray(drawn)
        ImageDraw.Draw(picture).rectangle(frame, outline="black", width=BORDER)
        return np.array(picture)

    def save(self, path: str | Path) -> None:
        """Write the sheet to a file, whose suffix chooses the format, e.g. .png, and its folder."""
        formats, suffix = Image.registered_extensions(), Path(path).suffix.lower()
        is_writable = formats.get(suffix) in Image.SAVE
        require(is_writable, "path", path, "a picture, such as sheet.png")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open_atomically(Path(path)) as file:
            self.sheet().save(file, formats[suffix], dpi=(200, 200))

    def show(self) -> None:
        """Open the sheet in an image viewer."""
        self.sheet().show()

    def _repr_png_(self) -> bytes | None:
        return self.sheet()._repr_png_()
