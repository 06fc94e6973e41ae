"""Canvas: tables of pictures (height, width, 3) uint8 with captions and colour bars, by Pillow.

matplotlib supplies fonts, and is imported when it is needed, because that takes time.
"""

import contextlib
import functools
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vit.colours import UNIFORM, Bar, colour_map
from vit.console import note_once

DPI = 100  # pixels to 72 points
GAP = 6  # pixels between panels
BAR, SHORTEST, LONGEST = 58, 150, 220  # width and lengths of a colour bar, in pixels
FONT_SIZE = 9  # points
LINE = 15  # pixels from one line of words to the next


@dataclass(frozen=True, eq=False)
class Panel:
    """A picture with lines of words above it."""

    pixels: np.ndarray
    words: str = ""


BLANK = np.full((1, 1, 3), 255, dtype=np.uint8)  # in place of a picture


def table(
    rows: Sequence[Sequence[Panel]],
    box: tuple[int, int],
    *,
    title: str = "",
    labels: Sequence[str] = (),
    bars: Sequence[Bar] = (),
    zoom: int = 1,
) -> np.ndarray:
    """Arrange panels as a table; words that are too long for their column are shortened.

    Args:
        rows: The panels; all get the aspect ratio of the first.
        box: Largest height and width of a picture; a column has this width.
        title: Lines above everything.
        labels: Words at the left of each row.
        bars: Colour bars at the right; each is drawn once.
        zoom: Pixels to one pixel of all lengths.
    """
    height, width = fit(rows[0][0].pixels.shape, box)
    bars = list(dict.fromkeys(bars))
    left = GAP + max((GAP + round(text_width(label)) for label in labels), default=0)
    right = left + len(rows[0]) * (box[1] + GAP)
    tops, bottom = [], GAP + _height(title)
    for row in rows:
        tops.append(bottom + max(_height(panel.words) for panel in row))
        bottom = tops[-1] + height + GAP
    length = min(LONGEST, max(SHORTEST, bottom - tops[0]))
    size = right + BAR * len(bars), max(bottom, tops[0] + length) if bars else bottom
    picture = Image.new("RGB", (zoom * size[0], zoom * size[1]), "white")
    _write(picture, left, GAP + _height(title), shorten(title, size[0] - left - GAP), zoom)
    for label, top in zip(labels, tops, strict=False):
        _write(picture, GAP, top + (height + LINE) // 2, label, zoom)
    for row, top in zip(rows, tops, strict=True):
        for column, panel in enumerate(row):
            x = left + column * (box[1] + GAP)
            part = Image.fromarray(resize(panel.pixels, (zoom * height, zoom * width)))
            picture.paste(part, (zoom * x, zoom * top))
            _write(picture, x, top, shorten(panel.words, box[1]), zoom)
    for number, bar in enumerate(bars):
        drawn = colour_bar(bar, length, zoom)
        picture.paste(Image.fromarray(drawn), (zoom * (right + number * BAR), zoom * tops[0]))
    return np.array(picture)


def join(pictures: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Set pictures one below the other (axis 0) or side by side (axis 1), on white."""
    size = max(picture.shape[1 - axis] for picture in pictures)
    padded = [
        np.pad(picture, {1 - axis: (0, size - picture.shape[1 - axis])}, constant_values=255)
        for picture in pictures
    ]
    return np.concatenate(padded, axis)


def overlay(pixels: np.ndarray, heat: Tensor, bar: Bar = UNIFORM) -> np.ndarray:
    """Lay a map (rows, columns) over a picture of any size.

    The picture turns grey, so every colour is the map's; the farther from 0, the more opaque. Under
    a signed map it also turns pale, because both ends of such a scale are dark.
    """
    low, high = bar[1]
    least, most, white = (0.1, 0.75, 0.0) if low == 0 else (0.0, 0.75, 0.5)
    strength = np.nan_to_num(np.abs(heat.cpu().numpy().clip(low, high))) / high
    opacity = (255 * (least + (most - least) * strength)).astype(np.uint8)
    opacity = resize(opacity, pixels.shape)[..., None] / np.float32(255)
    grey = pixels.mean(axis=-1, dtype=np.float32, keepdims=True)
    grey += white * (255 - grey)
    colours = resize(colour_map(heat, bar), pixels.shape).astype(np.float32)
    return (grey + (colours - grey) * opacity).round().astype(np.uint8)


def fit(shape: tuple[int, ...], box: tuple[int, int]) -> tuple[int, int]:
    """Return the largest height and width of a picture that fit into a box."""
    scale = min(box[0] / shape[0], box[1] / shape[1])
    return max(1, round(scale * shape[0])), max(1, round(scale * shape[1]))


def resize(part: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize (h, w) or (h, w, 3) uint8 to a height and width; enlarged pixels stay visible."""
    small = 2 * part.shape[0] <= size[0]
    method = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(part).resize((size[1], size[0]), method))


@functools.cache
def colour_bar(bar: Bar, length: int, zoom: int) -> np.ndarray:
    """Draw a colour bar, pointed where values beyond the scale have the same colour."""
    _, (low, high), label = bar
    scale = 4 * zoom  # reduced in the end, so that slanting lines are smooth
    top, bottom = 15, length - (15 if low else 7)
    places = (1, top), (7, 7), (13, top), (13, bottom), (7, length - 7), (1, bottom)
    outline = [(scale * x, scale * y) for x, y in places]
    picture = Image.new("RGB", (scale * BAR, scale * length), "white")
    inside = Image.new("1", picture.size)
    ImageDraw.Draw(inside).polygon(outline, 1)
    step = (high - low) / (bottom - top)  # of a pixel
    column = colour_map(high - step * (np.arange(scale * length) / scale - top), bar)
    colours = np.repeat(column[:, None], scale * BAR, axis=1)
    picture.paste(Image.fromarray(colours), mask=inside)
    draw = ImageDraw.Draw(picture)
    draw.line([*outline, outline[0]], "black", scale)
    font = font_of(label, scale * (FONT_SIZE - 1) / FONT_SIZE)
    for value in range(round(low), round(high) + 1):
        y = scale * (top + (high - value) / step)
        draw.line((13 * scale, y, 18 * scale, y), "black", scale)
        draw.text((20 * scale, y), f"{value}".replace("-", "−"), "black", font, "lm")
    words = Image.new("RGB", (scale * length, scale * LINE), "white")
    ImageDraw.Draw(words).text((words.width / 2, words.height / 2), label, "black", font, "mm")
    picture.paste(words.rotate(90, expand=True), (scale * (BAR - LINE - 2), 0))
    return np.asarray(picture.reduce(4))


def shorten(words: str, width: float) -> str:
    """Cut the middle of each line of words that is wider than `width` pixels.

    Class names often differ at their ends, numbers follow them, and a path ends in its file.
    """
    lines = []
    for line in words.split("\n"):
        text = short = "".join(c if c.isprintable() else "?" for c in line)
        kept = len(text)
        while kept and text_width(short) > width:
            kept -= 1
            short = f"{text[: -(-kept // 2)]}…{text[len(text) - kept // 2 :]}"
        lines.append(short)
    return "\n".join(lines)


def text_width(line: str) -> float:
    """Measure a line of words in pixels."""
    return font_of(line).getlength(line)


def _height(words: str) -> int:
    return GAP + LINE * (words.count("\n") + 1) if words else 0


def _write(picture: Image.Image, left: int, bottom: int, words: str, zoom: int) -> None:
    for number, line in enumerate(reversed(words.split("\n"))):
        place = zoom * left, zoom * (bottom - number * LINE - 1)
        ImageDraw.Draw(picture).text(place, line, "black", font_of(line, zoom), "ld")


def font_of(words: str, zoom: float = 1) -> ImageFont.FreeTypeFont:
    """Load the font for a text, see `font_file`."""
    return _truetype(font_file(words), zoom * FONT_SIZE * DPI / 72)


_truetype = functools.cache(ImageFont.truetype)


@functools.lru_cache(maxsize=1000)
def font_file(words: str) -> str:
    """Choose matplotlib's default font, or the installed one that lacks the fewest letters."""
    import matplotlib

    default = str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf")
    needed = {ord(letter) for letter in words if letter.isprintable()}
    if words.isascii() or needed <= _letters(default):
        return default
    best = min([default, *_installed()], key=lambda file: len(needed - _letters(file)))
    if lacking := needed - _letters(best):
        is_wide = any(unicodedata.east_asian_width(chr(code)) in "WF" for code in lacking)
        package = "fonts-noto-cjk" if is_wide else "fonts-noto-core"
        problem = "pictures show boxes for letters of names that no installed font has"
        note_once(f"{problem}; install one, e.g. with apt install {package}")
    return best


@functools.cache
def _installed() -> list[str]:
    from matplotlib import font_manager  # its own list lacks fonts that are installed later

    return sorted(font_manager.findSystemFonts(), key=lambda file: ("Regular" not in file, file))


@functools.cache
def _letters(file: str) -> frozenset[int]:
    """List the code points that a font draws; none if it cannot be used."""
    from matplotlib.ft2font import FT2Font

    with contextlib.suppress(OSError, RuntimeError, ValueError):
        if (font := FT2Font(file)).scalable and "LastResort" not in file:  # that has only boxes
            return frozenset(font.get_charmap())
    return frozenset()
