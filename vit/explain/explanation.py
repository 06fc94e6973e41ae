"""The Explanation of a photo: what a model predicts for it, and maps of what it attends to."""

import io
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from vit.explain.colours import as_rgb, bar_of
from vit.explain.maps import map_title
from vit.explain.sheet import View, photo_sheet


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
        """Draw the photo, its maps and their overlays, with captions and a colour bar."""
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
        titles = [map_title(kind, self.target) for kind in self.maps]
        maps, bars = list(self.maps.values()), [bar_of(kind) for kind in self.maps]
        fill = as_rgb(np.array(self.fill, np.uint8))
        seen = View(as_rgb(self.photo), self.seen, self.padding, fill)
        return Image.fromarray(photo_sheet(seen, maps, titles, bars, header, self.probabilities))

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
