"""Pictures of attention: tensors in, uint8 pictures out.

Pictures are (height, width, 3) uint8 arrays. Maps are in units of uniform attention and coloured on
one fixed scale, so that pictures can be compared. Pixels and patches are enlarged as they are,
without smoothing.

Shapes: B images, L layers, H heads, T steps.
"""

import functools
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vit.explain.charts import DPI, pixels_of
from vit.explain.rollout import map_title

COLOURS = "inferno"
SCALE = (0.0, 3.0)  # units of uniform attention
DIFFERENCE_COLOURS, DIFFERENCE_SCALE = "RdBu_r", (-2.0, 2.0)
GAP = 6  # pixels between panels
BAR = 58  # pixels that a colour bar takes, with its numbers
BAR_MARGIN = 8  # pixels above and below it, for half a number

Text = tuple[float, float, str, str]  # pixels from the left and the top, alignment, words
Bar = tuple[str, tuple[float, float], str]  # colours, scale, label


def captions_of(logits: Tensor, labels: Tensor, classes: Sequence[str]) -> list[str]:
    """Say in two lines what each image shows and what it was taken for.

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


def overlay(pixels: np.ndarray, heat: Tensor) -> np.ndarray:
    """Lay a map over a picture of any size.

    Args:
        pixels: (H, W, 3) uint8.
        heat: (rows, columns).

    Returns:
        (H, W, 3) uint8: the picture in grey, so that every colour is the map's, the more covered
        the more attention there is.
    """
    colours = _colour(heat).astype(np.float32)
    low, high = SCALE
    share = ((heat.cpu().numpy() - low) / (high - low)).clip(0, 1)
    opacity = _enlarge((255 * (0.1 + 0.65 * share)).astype(np.uint8), pixels.shape[:2]) / 255
    grey = pixels.mean(axis=-1, dtype=np.float32)[..., None]
    colours = _enlarge(colours.astype(np.uint8), pixels.shape[:2])
    return (grey + (colours - grey) * opacity[..., None]).round().astype(np.uint8)


def attention_picture(
    images: Tensor, maps: Tensor, captions: Sequence[str], titles: Sequence[str]
) -> np.ndarray:
    """Draw images, their attention maps and both laid over each other, one row per image.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (B, rows, columns).
        captions: B texts over the images, of up to two lines of 30 characters.
        titles: B texts over the maps, likewise.

    Returns:
        706 pixels wide and 256 high per row.
    """
    panel, title = 208, 48
    canvas = _paper((panel + title) * len(images), 3 * panel + 4 * GAP)
    texts: list[Text] = []
    for row, (image, heat, caption, kind) in enumerate(
        zip(images, maps, captions, titles, strict=True)
    ):
        top = row * (panel + title) + title - GAP
        pixels = _as_pixels(image)
        for column, part in enumerate((pixels, _colour(heat), overlay(pixels, heat))):
            _paste(canvas, part, top, GAP + column * (panel + GAP), panel)
        for column, (align, words) in enumerate(
            (("left", caption), ("center", kind), ("center", "overlay"))
        ):
            left = GAP + column * (panel + GAP) + (panel / 2 if align == "center" else 0)
            texts.append((left, top - 5, align, words))
    return _framed(canvas, texts, [_UNIFORM], length=panel - 12, top=title - GAP + 4)


def rollout_pictures(images: Tensor, maps: Tensor, captions: Sequence[str]) -> list[np.ndarray]:
    """Draw each image with its attention rollout as a picture of its own.

    Arguments as for `attention_picture`.
    """
    title = [map_title("rollout", "")]
    return [
        attention_picture(images[i : i + 1], maps[i : i + 1], captions[i : i + 1], title)
        for i in range(len(images))
    ]


def filmstrip_picture(images: Tensor, maps: Tensor, steps: Sequence[int]) -> np.ndarray:
    """Draw how maps form: images as rows, steps as columns.

    Args:
        images: (B, 3, H, W) uint8.
        maps: (T, B, rows, columns).
        steps: T optimizer steps.
    """
    cells = [
        [_as_pixels(image), *(_colour(heat) for heat in row)]
        for image, row in zip(images, maps.transpose(0, 1), strict=True)
    ]
    head = ["step", *(f"{step:,}" for step in steps)]
    words = "rollout (class-agnostic)"  # fits over a single step
    return _sheet(words, cells, head, [""] * len(cells), side=64, margin=GAP)


def heads_picture(image: Tensor, maps: Tensor, caption: str) -> np.ndarray:
    """Draw what every head of every layer looks at: layers as rows, heads as columns.

    Args:
        image: (3, H, W) uint8.
        maps: (L, H, rows, columns).
        caption: What the image shows.
    """
    blank = np.full((1, 1, 3), 255, dtype=np.uint8)
    cells = [
        [_as_pixels(image) if number == 0 else blank, *(_colour(heat) for heat in layer)]
        for number, layer in enumerate(maps)
    ]
    head = [caption, *(f"head {number}" for number in range(maps.shape[1]))]
    words = "attention of each head (class-agnostic)"
    return _sheet(words, cells, head, [f"layer {n}" for n in range(len(maps))], side=96, margin=52)


def gallery_picture(
    title: str, images: Tensor, maps: Tensor, captions: Sequence[str], columns: int = 4
) -> np.ndarray:
    """Draw images beside their overlays, several to a row.

    Args:
        title: What the overlays show.
        images: (B, 3, H, W) uint8.
        maps: (B, rows, columns).
        captions: B texts, of up to two lines of 30 characters.
        columns: Images in a row.
    """
    panel, space, first = 96, 46, 20
    rows = -(-len(images) // columns)
    canvas = _paper(first + rows * (panel + space), columns * (2 * panel + 2 * GAP) + GAP)
    texts: list[Text] = [(GAP, first, "left", title)]
    for number, (image, heat, caption) in enumerate(zip(images, maps, captions, strict=True)):
        top = first + number // columns * (panel + space) + space - GAP
        left = GAP + number % columns * (2 * panel + 2 * GAP)
        pixels = _as_pixels(image)
        _paste(canvas, pixels, top, left, panel)
        _paste(canvas, overlay(pixels, heat), top, left + panel, panel)
        texts.append((left, top - 4, "left", caption))
    length = min(160, rows * (panel + space) - 60)
    return _framed(canvas, texts, [_UNIFORM], length=length, top=first + space)


def comparison_picture(
    images: Tensor, maps: tuple[Tensor, Tensor], names: tuple[str, str], captions: Sequence[str]
) -> np.ndarray:
    """Draw the rollout of two models side by side on one scale, and where they differ.

    Args:
        images: (B, 3, H, W) uint8.
        maps: Attention rollout, (B, rows, columns) each; the grids must be the same.
        names: Of the models.
        captions: B texts, of up to two lines of 30 characters.
    """
    panel, title, differs = 176, 48, Normalize(*DIFFERENCE_SCALE)
    canvas = _paper((panel + title) * len(images), 4 * panel + 5 * GAP)
    texts: list[Text] = []
    for row, (image, one, other, caption) in enumerate(zip(images, *maps, captions, strict=True)):
        top = row * (panel + title) + title - GAP
        pixels = _as_pixels(image)
        difference = matplotlib.colormaps[DIFFERENCE_COLOURS](
            differs((other - one).cpu().numpy()), bytes=True
        )[..., :3]
        for column, part in enumerate((pixels, _colour(one), _colour(other), difference)):
            _paste(canvas, part, top, GAP + column * (panel + GAP), panel)
        texts.append((GAP, top - 5, "left", caption))
        rollout = [f"{name}\nrollout (class-agnostic)" for name in names]
        for column, words in enumerate((*rollout, "second − first"), start=1):
            texts.append((GAP + (column + 0.5) * (panel + GAP), top - 5, "center", words))
    bars = [_UNIFORM, (DIFFERENCE_COLOURS, DIFFERENCE_SCALE, "difference, × uniform")]
    return _framed(canvas, texts, bars, length=panel - 12, top=title)


_UNIFORM: Bar = (COLOURS, SCALE, "× uniform")


def _colour(heat: Tensor) -> np.ndarray:
    return matplotlib.colormaps[COLOURS](Normalize(*SCALE)(heat.cpu().numpy()), bytes=True)[..., :3]


def _as_pixels(image: Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).cpu().numpy()


def _paper(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 255, dtype=np.uint8)


def _enlarge(part: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Bring (h, w) or (h, w, 3) uint8 to a height and width, without smoothing."""
    return np.asarray(Image.fromarray(part).resize((size[1], size[0]), Image.Resampling.NEAREST))


def _paste(canvas: np.ndarray, part: np.ndarray, top: int, left: int, side: int) -> None:
    canvas[top : top + side, left : left + side] = _enlarge(part, (side, side))


def _sheet(
    title: str,
    cells: list[list[np.ndarray]],
    head: list[str],
    rows: list[str],
    *,
    side: int,
    margin: int,
) -> np.ndarray:
    """Lay pictures out as a table with words over all, over the columns and left of the rows."""
    top = 44
    canvas = _paper(top + len(cells) * (side + GAP), margin + len(head) * (side + GAP))
    texts: list[Text] = [(margin, top - 25, "left", title)]
    texts += [
        (margin + number * (side + GAP) + side / 2, top - 5, "center", words)
        for number, words in enumerate(head)
    ]
    for number, (row, words) in enumerate(zip(cells, rows, strict=True)):
        high = top + number * (side + GAP)
        texts.append((4, high + side / 2, "left", words))
        for column, part in enumerate(row):
            _paste(canvas, part, high, margin + column * (side + GAP), side)
    return _framed(canvas, texts, [_UNIFORM], length=min(196, len(canvas) - top - 12), top=top)


def _framed(
    canvas: np.ndarray, texts: Sequence[Text], bars: Sequence[Bar], *, length: int, top: int
) -> np.ndarray:
    """Write texts on a canvas and set colour bars at its right."""
    tall, wide = len(canvas), canvas.shape[1] + BAR * len(bars)
    whole = _paper(tall, wide)
    whole[:, : canvas.shape[1]] = canvas
    for number, bar in enumerate(bars):
        drawn = _draw_bar(bar, length)
        left, high = canvas.shape[1] + number * BAR, top - BAR_MARGIN
        whole[high : high + len(drawn), left : left + BAR] = drawn[: tall - high]
    figure = Figure(figsize=(wide / DPI, tall / DPI), dpi=DPI)
    figure.figimage(whole, 0, 0, origin="upper")
    for x, y, align, words in texts:
        figure.text(x / wide, 1 - y / tall, words, ha=align, va="bottom", fontsize=9)
    return pixels_of(figure)


@functools.cache
def _draw_bar(bar: Bar, length: int) -> np.ndarray:
    """Draw a colour bar; kept, because its axis takes longer to draw than all the rest."""
    colours, scale, label = bar
    tall = length + 2 * BAR_MARGIN
    figure = Figure(figsize=(BAR / DPI, tall / DPI), dpi=DPI)
    axis = figure.add_axes((0, BAR_MARGIN / tall, 12 / BAR, length / tall))
    figure.colorbar(
        ScalarMappable(Normalize(*scale), colours), cax=axis,
        extend="max" if scale[0] == 0 else "both",
    ).set_label(label, fontsize=8, labelpad=2)  # fmt: skip
    axis.tick_params(labelsize=8, pad=1)
    return pixels_of(figure)
