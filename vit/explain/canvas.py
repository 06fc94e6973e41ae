"""Canvas: pixels, coloured maps, text and colour bars.

A canvas is a (height, width, 3) uint8 array. Pixels and patches are enlarged without smoothing.

Everything is drawn with NumPy and Pillow. matplotlib supplies the font and finds others for scripts
that this font lacks; it is imported when it is needed, because that takes time.
"""

import bisect
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vit.explain.colours import UNIFORM, Bar, colour, colour_map

DPI = 100  # pixels to 72 points
GAP = 6  # pixels between panels
BAR = 58  # width of a colour bar with its labels, in pixels
BAR_MARGIN = 8  # pixels above and below it, for half a label
BAR_TIP = 0.05  # height of a pointed end over that of the scale between the ends
TICKS_APART = 12  # pixels between two labels of a colour bar, at least
FONT_SIZE = 9  # points
SMALL_FONT = 8
LINE = 14.5  # pixels from one line of a text to the next

# Common fonts on Linux, macOS and Windows with Chinese, Japanese and Korean letters.
EAST_ASIAN = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "IPAexGothic",
    "Hiragino Sans", "PingFang SC", "Hiragino Sans GB", "Apple SD Gothic Neo", "Arial Unicode MS",
    "Yu Gothic", "Microsoft YaHei", "Malgun Gothic",
)  # fmt: skip

Text = tuple[float, float, str, str]  # pixels from the left and the top, alignment, words


def overlay(pixels: np.ndarray, heat: Tensor, bar: Bar = UNIFORM) -> np.ndarray:
    """Lay a map over a picture.

    The picture turns grey, so every colour is the map's; the farther from 0, the more opaque. Under
    a signed map it also turns pale, because both ends of such a scale are dark.

    Args:
        pixels: (H, W, 3) uint8, of any size.
        heat: (rows, columns) map.
        bar: Colours and scale of the map.

    Returns:
        (H, W, 3) uint8.
    """
    low, high = bar[1]
    least, most, white = (0.1, 0.75, 0.0) if low == 0 else (0.0, 0.75, 0.5)
    strength = np.nan_to_num(np.abs(heat.cpu().numpy().clip(low, high))) / high
    opacity = (255 * (least + (most - least) * strength)).astype(np.uint8)
    opacity = enlarge(opacity, pixels.shape[:2])[..., None] / np.float32(255)
    grey = pixels.mean(axis=-1, dtype=np.float32, keepdims=True)
    grey += white * (255 - grey)
    colours = enlarge(colour_map(heat, bar), pixels.shape[:2]).astype(np.float32)
    return (grey + (colours - grey) * opacity).round().astype(np.uint8)


def paper(height: int, width: int) -> np.ndarray:
    """Return a white canvas."""
    return np.full((height, width, 3), 255, dtype=np.uint8)


def enlarge(part: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize (h, w) or (h, w, 3) uint8 to a height and width, without smoothing."""
    return np.asarray(Image.fromarray(part).resize((size[1], size[0]), Image.Resampling.NEAREST))


def paste(canvas: np.ndarray, part: np.ndarray, top: int, left: int, side: int) -> None:
    """Paste a part into the middle of a square of the canvas, enlarged until it fits."""
    longer = max(part.shape[:2])
    height, width = (max(1, round(side * n / longer)) for n in part.shape[:2])
    top, left = top + (side - height) // 2, left + (side - width) // 2
    canvas[top : top + height, left : left + width] = enlarge(part, (height, width))


def shorten(words: str, width: float, front: bool = False) -> str:
    """Cut each line of a text to a width in pixels, with an ellipsis for what is missing.

    The middle is left out, because class names often differ at their ends, and numbers follow them.
    Of the name of a file, the front is left out instead: its folders.
    """
    return "\n".join(_shorten_line(line, width, front) for line in words.split("\n"))


@functools.lru_cache(maxsize=1000)
def _shorten_line(line: str, width: float, front: bool) -> str:
    line = "".join(c if c.isprintable() else "?" for c in line)
    if 2 * FONT_SIZE * len(line) <= width or text_width(line) <= width:  # no letter is wider
        return line

    def kept(count: int) -> str:
        start = 0 if front else -(-count // 2)
        return f"{line[:start]}…{line[len(line) - (count - start) :]}"

    fitting = bisect.bisect(range(len(line)), width, key=lambda n: text_width(kept(n)))
    return kept(max(0, fitting - 1))


def text_width(line: str) -> float:
    """Measure a line of text in pixels."""
    return font_of(line, FONT_SIZE).getlength(line)


def font_of(words: str, size: float) -> ImageFont.FreeTypeFont:
    """Load the font for a text, see `font_file`, in a size in points."""
    return _load_font(font_file(words), size)


@functools.cache
def _load_font(file: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(file, size * DPI / 72)


@functools.lru_cache(maxsize=1000)
def font_file(words: str) -> str:
    """Choose the font for a text: the first of those that lack the fewest of its letters.

    The first is matplotlib's default font; installed ones with East Asian letters follow.
    """
    import matplotlib

    default = str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf")
    if words.isascii():
        return default
    from matplotlib import font_manager

    def count_lacking(file: str) -> int:
        font = font_manager.get_font(file)
        return sum(not font.get_char_index(ord(letter)) for letter in words if letter != "\n")

    if count_lacking(default) == 0:
        return default
    installed = {*font_manager.fontManager.get_font_names()} & {*EAST_ASIAN}
    others = [str(font_manager.findfont(name)) for name in EAST_ASIAN if name in installed]
    return min([default, *others], key=count_lacking)


def framed(
    canvas: np.ndarray,
    texts: Sequence[Text],
    bars: Sequence[Bar],
    *,
    length: int,
    top: int,
    zoom: int = 1,
) -> np.ndarray:
    """Write texts on a canvas and add colour bars at its right.

    Args:
        canvas: What to write on.
        texts: The texts.
        bars: The colour bars, from left to right.
        length: Length of a colour bar, in pixels.
        top: Where the colour bars begin, in pixels from the top.
        zoom: Pixels of the canvas to one pixel of all lengths.
    """
    tall, wide = len(canvas), canvas.shape[1]
    pixels = paper(tall, wide + zoom * BAR * len(bars))
    pixels[:, :wide] = canvas
    for number, bar in enumerate(bars):
        drawn = _draw_bar(bar, length, zoom)
        left, high = wide + number * zoom * BAR, zoom * (top - BAR_MARGIN)
        pixels[high : high + len(drawn), left : left + zoom * BAR] = drawn[: tall - high]
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    for x, y, align, words in texts:
        for number, line in enumerate(reversed(words.split("\n"))):
            place, font = (zoom * x, zoom * (y - number * LINE)), font_of(line, zoom * FONT_SIZE)
            draw.text(place, line, "black", font, f"{align[0].replace('c', 'm')}d")
    return np.array(picture)


@functools.cache
def _draw_bar(bar: Bar, length: int, zoom: int) -> np.ndarray:
    """Draw a colour bar with labels, pointed where values beyond the scale have the same colour."""
    _, (low, high), label = bar
    tips = 1 if low == 0 else 2
    scale = length / (1 + tips * BAR_TIP)  # pixels from low to high
    top, left, right = BAR_MARGIN + BAR_TIP * scale, 0.5, 11.5
    bottom, middle = top + scale, (left + right) / 2
    outline = [(left, bottom), (left, top), (middle, BAR_MARGIN), (right, top), (right, bottom)]
    outline += [(middle, BAR_MARGIN + length)] * (tips - 1) + [(left, bottom)]
    size = zoom * BAR, zoom * (length + 2 * BAR_MARGIN)
    fine = 4 * zoom  # drawn larger and then reduced, for smooth slopes
    large = (4 * size[0], 4 * size[1])
    levels = high - ((np.arange(large[1]) + 0.5) / fine - top) * (high - low) / scale
    column = colour(levels, bar)[:, None]
    corners, mask = [(fine * x, fine * y) for x, y in outline], Image.new("L", large)
    ImageDraw.Draw(mask).polygon(corners, fill=255)
    picture = Image.new("RGB", large, "white")
    picture.paste(Image.fromarray(column).resize(large), mask=mask)
    ImageDraw.Draw(picture).line(corners, "black", fine, "curve")
    picture = picture.resize(size, Image.Resampling.BOX)
    draw, font = ImageDraw.Draw(picture), font_of(label, zoom * SMALL_FONT)
    step = 1 if scale >= TICKS_APART * (high - low) else high
    ticks = np.arange(low, high + 1, step)
    texts = [f"{tick:.0f}".replace("-", "−") for tick in ticks]
    for tick, text in zip(ticks, texts, strict=True):
        y = zoom * (bottom - (tick - low) * scale / (high - low))
        draw.line([(zoom * 12, round(y)), (zoom * 15, round(y))], "black", zoom)
        draw.text((zoom * 17.5, y), text, "black", font, "lm")
    words = Image.new(
        "RGB", (round(font.getlength(label)), round(1.75 * zoom * SMALL_FONT)), "white"
    )
    ImageDraw.Draw(words).text((0, words.height), label, "black", font, "ld")
    words = words.transpose(Image.Transpose.ROTATE_90)
    start = round(zoom * 19 + max(map(font.getlength, texts)))
    picture.paste(words, (start, (size[1] - words.height) // 2))
    return np.array(picture)
