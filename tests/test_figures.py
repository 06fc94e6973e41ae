"""What pictures show, and where."""

import itertools

import matplotlib
import numpy as np
import pytest
import torch
from torch import Tensor

from vit.evaluation import wilson_interval
from vit.explain import canvas
from vit.explain.canvas import BAR, enlarge, framed, overlay, shorten, text_width
from vit.explain.charts import confusion_picture, reliability_picture
from vit.explain.colours import (
    SIGNED,
    UNIFORM,
    Bar,
    as_pixels,
    colour_map,
    table_of,
)
from vit.explain.explanation import TITLE_WIDTH
from vit.explain.figures import (
    attention_picture,
    captions_of,
    gallery_picture,
    named,
    statistics_picture,
)
from vit.explain.maps import MAP_KINDS, map_title

LEVELS = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 50.0]])


def noise(count: int, channels: int = 3, size: tuple[int, int] = (20, 30)) -> Tensor:
    """Images of random pixels, (count, channels, *size) uint8."""
    random = np.random.default_rng(0).integers(0, 256, (count, channels, *size), dtype=np.uint8)
    return torch.from_numpy(random)


def assert_cells(
    picture: np.ndarray,
    cells: list[list[np.ndarray]],
    corner: tuple[int, int],
    pitch: tuple[int, int],
    side: int,
) -> None:
    """A picture is a table of parts, each enlarged in the middle of a square; white around."""
    for row, parts in enumerate(cells):
        for column, part in enumerate(parts):
            top, left = corner[0] + row * pitch[0], corner[1] + column * pitch[1]
            longer = max(part.shape[:2])
            high, wide = (round(side * n / longer) for n in part.shape[:2])
            top, left = top + (side - high) // 2, left + (side - wide) // 2
            found = picture[top : top + high, left : left + wide]
            np.testing.assert_array_equal(found, enlarge(part, (high, wide)), f"{row} {column}")
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()  # nothing is cut off


def places(picture: np.ndarray, colour: np.ndarray | list[int]) -> np.ndarray:
    """Return row and column of every pixel of a colour, give or take 2, (n, 2)."""
    return np.argwhere((np.abs(picture.astype(int) - np.asarray(colour)) <= 2).all(-1))


# Colours.


@pytest.mark.parametrize("bar", [UNIFORM, SIGNED])
def test_colours_are_those_of_matplotlib(bar: Bar) -> None:
    name, (low, high), _ = bar
    heat = torch.linspace(-3.5, 3.5, 999)[None]
    expected = matplotlib.colormaps[name]((heat.numpy() - low) / (high - low), bytes=True)
    np.testing.assert_array_equal(colour_map(heat, bar), expected[..., :3])


@pytest.mark.parametrize("bar", [UNIFORM, SIGNED])
def test_overlay_mixes_a_grey_picture_with_the_colours_of_a_map(bar: Bar) -> None:
    levels = LEVELS if bar == UNIFORM else LEVELS * torch.tensor([1.0, -1.0, 1.0])
    photo = as_pixels(noise(1)[0])
    drawn, colours = overlay(photo, levels, bar), colour_map(levels, bar)
    for (row, column), level in np.ndenumerate(levels.numpy()):
        part = np.s_[10 * row : 10 * row + 10, 10 * column : 10 * column + 10]
        grey, size = photo[part].mean(axis=-1, keepdims=True), min(abs(level), 3) / 3
        if bar == SIGNED:
            grey, opacity = (255 + grey) / 2, 0.75 * size
        else:
            opacity = 0.1 + 0.65 * size
        expected = (1 - opacity) * grey + opacity * colours[row, column]
        assert np.abs(drawn[part] - expected).max() < 2


def test_numbers_that_are_not_finite_are_drawn() -> None:
    heat = torch.tensor([[torch.nan, torch.inf]])
    assert colour_map(heat)[0].tolist() == table_of("inferno")[[0, 255]].tolist()
    assert overlay(np.zeros((2, 2, 3), np.uint8), heat).shape == (2, 2, 3)


# Pictures of several panels.


@pytest.mark.parametrize(("channels", "size"), [(3, (20, 30)), (1, (16, 48))])
def test_attention_picture_has_image_map_and_overlay(channels: int, size: tuple[int, int]) -> None:
    (image,), bars = noise(1, channels, size), [UNIFORM, SIGNED]
    maps = [LEVELS, torch.linspace(-3, 3, size[0] * size[1]).view(size)]  # patches, pixels
    titles = [map_title("rollout", ""), map_title("lrp_pixels", "cat")]
    picture = attention_picture(image, maps, "true cat\npredicted dog", titles, bars)
    assert picture.shape == (512, 706 + BAR, 3)  # a colour bar for each scale
    pixels = as_pixels(image)
    cells = [
        [pixels, colour_map(heat, bar), overlay(pixels, heat, bar)]
        for heat, bar in zip(maps, bars, strict=True)
    ]
    assert_cells(picture, cells, (42, 6), (256, 214), 208)


def test_statistics_have_layers_as_rows_and_heads_as_columns() -> None:
    values = torch.zeros(3, 2)
    values[2, 0] = 1.0
    picture = statistics_picture({"one": values, "tenfold": 10 * values.flip(0, 1)})
    for left, cells in ((52, values), (52 + 2 * 75 + 6 + 52, values.flip(0, 1))):
        corners = picture[27 : 27 + 90 : 30, left + 1 : left + 150 : 75]  # of each cell
        for layer, head in itertools.product(range(3), range(2)):
            assert (corners[layer, head].mean() < 100) == bool(cells[layer, head])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1e-12])
def test_statistics_of_a_broken_model_are_drawn(value: float) -> None:
    assert statistics_picture({"entropy": torch.full((3, 2), value)}).shape == (142, 208, 3)


@pytest.mark.parametrize(("count", "columns"), [(5, 2), (1, 4)])
def test_gallery_sets_overlays_beside_their_images_row_by_row(count: int, columns: int) -> None:
    images, maps = noise(count), torch.randn(count, 2, 2, 3)
    captions, headings = ["true cat\nas dog 99%"] * count, [["for dog", "for cat"]] * count
    names = ["cats/" * 30 + "1.jpg"] * count  # cut off
    picture = gallery_picture("mistakes", images, names, captions, maps, headings, columns)
    for number, (image, pair) in enumerate(zip(images, maps, strict=True)):
        pixels = as_pixels(image)
        cells = [[pixels, *(overlay(pixels, heat, SIGNED) for heat in pair)]]
        corner = 96 + number // columns * 176, 6 + number % columns * 354
        assert_cells(picture, cells, corner, (0, 112), 112)


# Charts.


@pytest.mark.parametrize("num_classes", [2, 100])
def test_confusion_picture_shows_shares_of_rows(num_classes):
    # Every image of the first class is taken for the last, though it has but one.
    counts = (1000 * np.eye(num_classes, dtype=int)).tolist()
    counts[0] = [0] * (num_classes - 1) + [1]
    picture = confusion_picture(counts, ["x"] * num_classes)
    assert picture.shape == ((560, 640, 3) if num_classes <= 20 else (800, 900, 3))
    full = np.array(matplotlib.colormaps["Blues"](1.0, bytes=True)[:3])
    found = places(picture, full)
    found = found[found[:, 1] < 0.86 * picture.shape[1]]  # not the colour bar
    top, bottom = found[:, 0].min(), found[:, 0].max()
    first = found[found[:, 0] < top + 0.5 * (bottom - top) / num_classes]
    assert first[:, 1].min() > found[:, 1].max() - 1.5 * (bottom - top + 1) / num_classes
    last = found[found[:, 0] > bottom - 0.5 * (bottom - top) / num_classes]
    assert last[:, 1].max() == found[:, 1].max()


def test_a_class_without_images_is_grey() -> None:
    picture = confusion_picture([[5, 5], [0, 0]], ["a", "b"])
    assert len(places(picture, [217, 217, 217])) > 10_000


def bin_of(n: int, confidence: float, accuracy: float) -> dict:
    interval = wilson_interval(round(accuracy * n), n)
    return {"n": n, "confidence": confidence, "accuracy": accuracy, "accuracy_95": interval}


BLUE_BAR = np.array([31, 119, 180])  # matplotlib's first colour


def test_reliability_picture_puts_accuracy_over_confidence() -> None:
    def marks(confidence: float, accuracy: float, n: int) -> np.ndarray:
        bins = [bin_of(n, confidence, accuracy)]
        found = places(reliability_picture({"model": {"reliability": bins, "ece": 0.1}}), BLUE_BAR)
        return found[(found[:, 0] < 350) & (found[:, 0] > 70)]

    def marker(confidence: float, accuracy: float) -> np.ndarray:
        return np.median(marks(confidence, accuracy, 1_000_000), axis=0)  # its interval is a point

    low, high, off = marker(0.25, 0.25), marker(0.75, 0.75), marker(0.25, 0.75)
    assert low[0] - high[0] > 100 and high[1] - low[1] > 100
    assert abs(off[0] - high[0]) < 3 and abs(off[1] - low[1]) < 3
    heights = [np.ptp(marks(0.5, 0.5, n)[:, 0]) for n in (10, 100, 1000)]
    assert heights[0] > 2 * heights[1] > 4 * heights[2]  # the interval narrows with √n


@pytest.mark.parametrize("hits", [0, 1])
def test_reliability_of_bins_all_right_or_all_wrong_is_drawn(hits: int) -> None:
    bins = [bin_of(n, 0.5, float(hits)) for n in range(1, 200)]
    result = {"reliability": bins, "ece": 0.5}
    assert reliability_picture({"model": result}).shape == (520, 460, 3)
    assert reliability_picture({"before": result, "after": result}).shape == (520, 920, 3)


# Texts.


def test_captions_name_truth_and_guess() -> None:
    shares = torch.tensor([[0.7, 0.2, 0.1], [0.004, 0.001, 0.995]])
    captions = captions_of(shares.log(), torch.tensor([1, 2]), ["cat", "dog", "ship"])
    assert captions == ["true dog\npredicted cat 70%", "true ship\npredicted ship 100%"]
    with pytest.raises(ValueError):
        captions_of(shares.log(), torch.tensor([1]), ["cat", "dog", "ship"])


def test_letters_that_the_default_font_lacks_come_from_another(monkeypatch):
    """STIXGeneral, which comes with matplotlib, stands for an East Asian font."""
    letter, pictures = "\u1d8a", []
    for installed in ((), ("No Such Font", "STIXGeneral")):
        monkeypatch.setattr(canvas, "EAST_ASIAN", installed)
        canvas.font_file.cache_clear()
        blank = np.full((40, 99, 3), 255, np.uint8)
        pictures.append(framed(blank, [(9, 30, "left", letter)], [], length=9, top=9))
        pictures.append(confusion_picture([[1, 0], [0, 1]], [letter, "b"]))
    assert (pictures[0] != pictures[2]).any() and (pictures[1] != pictures[3]).any()


@pytest.mark.parametrize(
    "words", ["cat", "W" * 200, "i" * 200, "$a$b_{", "", "雪" * 90, "a\tb\x1b"]
)
def test_texts_are_cut_to_a_width_with_an_ellipsis(words):
    cut = shorten(words, 150)
    assert text_width(cut) <= 150 and cut.isprintable()
    if text_width(words) > 150:
        start, end = cut.split("…")
        assert words.startswith(start) and words.endswith(end) and 0 <= len(start) - len(end) <= 1
        assert text_width(cut) > 130  # no more is cut than must be
    elif words.isprintable():
        assert cut == words


def test_a_name_is_written_above_a_picture() -> None:
    picture = np.zeros((50, 200, 3), dtype=np.uint8)
    first, other = (named(picture, "cats/" * 30 + end) for end in ("1.jpg", "2.jpg"))
    assert first.shape == other.shape and (first[-50:] == picture).all()
    assert (first[:-50] != other[:-50]).any() and (first[:-50, :6] == 255).all()
    assert (first[0] == 255).all() and (first[:-50, -6:] == 255).all()  # not cut off


def test_every_title_fits_above_the_narrowest_map_of_a_sheet() -> None:
    for kind in MAP_KINDS:
        title = map_title(kind, "automobile")
        assert shorten(title, TITLE_WIDTH) == title
