"""What pictures show, and where."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import font_manager
from torch import Tensor

from vit.colours import SIGNED, UNIFORM, as_pixels, colour_map, table_of
from vit.explain import canvas
from vit.explain.canvas import BAR, Panel, fit, overlay, resize, shorten, table, text_width
from vit.explain.charts import confusion_picture, reliability_picture
from vit.explain.figures import (
    MARK,
    attention_picture,
    captions_of,
    distance_picture,
    gallery_picture,
    statistics_picture,
)
from vit.explain.maps import MAP_KINDS, map_title
from vit.intervals import wilson_interval

LEVELS = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 50.0]])


def noise(count: int, channels: int = 3, size: tuple[int, int] = (20, 30)) -> Tensor:
    """Images of random pixels, (count, channels, *size) uint8."""
    random = np.random.default_rng(0).integers(0, 256, (count, channels, *size), dtype=np.uint8)
    return torch.from_numpy(random)


def assert_cells(
    picture: np.ndarray,
    cells: list[list[np.ndarray]],
    corner: tuple[int, int],
    side: int,
    words: int = 0,
) -> None:
    """A picture is a table of parts, as large as fits into squares, below words; white around."""
    height, width = fit(cells[0][0].shape, (side, side))
    for row, parts in enumerate(cells):
        for column, part in enumerate(parts):
            top, left = corner[0] + row * (height + 6 + words), corner[1] + column * (side + 6)
            found = picture[top : top + height, left : left + width]
            np.testing.assert_array_equal(found, resize(part, (height, width)), f"{row} {column}")
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()  # nothing is cut off


def places(picture: np.ndarray, colour: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return row and column of every pixel of a colour, give or take 2, (n, 2)."""
    return np.argwhere((np.abs(picture.astype(int) - np.asarray(colour)) <= 2).all(-1))


# Colours.


@pytest.mark.parametrize("bar", [UNIFORM, SIGNED])
def test_colours_are_those_of_matplotlib(bar):
    name, (low, high), _ = bar
    heat = torch.linspace(-3.5, 3.5, 999)[None]
    expected = matplotlib.colormaps[name]((heat.numpy() - low) / (high - low), bytes=True)
    np.testing.assert_array_equal(colour_map(heat, bar), expected[..., :3])


@pytest.mark.parametrize("bar", [UNIFORM, SIGNED])
def test_overlay_mixes_a_grey_picture_with_the_colours_of_a_map(bar):
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


def test_numbers_that_are_not_finite_are_drawn():
    heat = torch.tensor([[torch.nan, torch.inf]])
    assert colour_map(heat)[0].tolist() == table_of("inferno")[[0, 255]].tolist()
    assert overlay(np.zeros((2, 2, 3), np.uint8), heat).shape == (2, 2, 3)
    for value in (0.0, torch.nan, torch.inf, -1e-12):
        statistics_picture({"entropy": torch.full((3, 2), value)})


# Tables of pictures.


@pytest.mark.parametrize(("channels", "size"), [(3, (20, 30)), (1, (16, 48))])
def test_attention_picture_has_image_map_and_overlay(channels, size):
    for kind in MAP_KINDS:  # every title fits
        assert shorten(title := map_title(kind, "automobile"), 208) == title
    (image,) = noise(1, channels, size)
    pixel_map = torch.linspace(-3, 3, size[0] * size[1]).view(size)
    maps = {"rollout": (LEVELS, UNIFORM), "lrp_pixels": (pixel_map, SIGNED)}
    given = image, {kind: heat for kind, (heat, _) in maps.items()}, "true cat\npredicted dog"
    picture = attention_picture(*given, "cat")
    pixels = as_pixels(image)
    cells = [
        [pixels, colour_map(heat, bar), overlay(pixels, heat, bar)] for heat, bar in maps.values()
    ]
    assert_cells(picture, cells, (42, 6), 208, 36)
    assert picture.shape[1] == 6 + 3 * 214 + 2 * BAR  # a colour bar for each scale
    first, other = (attention_picture(*given, "cat", f"cats/{n}" * 99) for n in "12")
    assert (first[27:] == picture[6:]).all() and (first[:27] != other[:27]).any()
    assert (first[:27, :6] == 255).all() and (first[:27, -6:] == 255).all()  # not cut off


def test_statistics_have_layers_as_rows_and_heads_as_columns():
    dark, found = (255 * np.array(matplotlib.colormaps["Blues"](1.0)[:3])).round(), {}
    for layer, head in np.ndindex(2, 2):
        values = torch.zeros(2, 2)
        values[layer, head] = 1
        picture = statistics_picture({"one": values, "tenfold": 10 * values})
        found[layer, head] = places(picture, dark).mean(axis=0)
    assert picture.shape[1] / 4 < found[0, 0][1] < picture.shape[1] * 3 / 4  # once in each half
    for (layer, head), place in found.items():
        np.testing.assert_allclose(place - found[0, 0], (34 * layer, 81 * head), atol=1)


def test_a_head_that_looks_one_patch_to_the_right_is_bright_there():
    offsets = torch.zeros(3, 2, 3, 5)
    offsets[1, 1, 1, 3] = 0.3  # of 10 tokens: 3 times uniform
    picture = distance_picture(offsets, 10, 8)[:, : -2 * BAR]
    bright, marked = places(picture, table_of("inferno")[-1]), places(picture, MARK)
    box = 2 * (120 // 5)
    assert np.ptp(bright, axis=0).tolist() == [box - 1, box - 1]
    top, left = marked.min(axis=0)  # of the query of layer 0 and head 0
    assert bright.min(axis=0).tolist() == [top + 2 * (72 + 6), left + 2 * (120 + 6) + box]


@pytest.mark.parametrize(("count", "columns"), [(5, 2), (1, 4)])
def test_gallery_sets_overlays_beside_their_images_row_by_row(count, columns):
    images, maps = noise(count), torch.randn(count, 2, 2, 3)
    captions, headings = ["true cat\nas dog 99%"] * count, [["for dog", "for cat"]] * count
    names = ["cats/" * 30 + "1.jpg"] * count  # shortened
    picture = gallery_picture("mistakes", images, names, captions, maps, headings, columns)
    for number, (image, pair) in enumerate(zip(images, maps, strict=True)):
        pixels = as_pixels(image)
        cells = [[pixels, *(overlay(pixels, heat, SIGNED) for heat in pair)]]
        corner = 90 + number // columns * 144, 12 + number % columns * 360
        assert_cells(picture, cells, corner, 112)


# Charts.


@pytest.mark.parametrize("num_classes", [2, 100])
def test_confusion_picture_shows_fractions_of_rows(num_classes):
    # Every image of the first class is taken for the last, though it has but one.
    counts = (1000 * np.eye(num_classes, dtype=int)).tolist()
    counts[0] = [0] * (num_classes - 1) + [1]
    picture = confusion_picture(counts, ["$" * (1 + n % 3) for n in range(num_classes)])
    full = np.array(matplotlib.colormaps["Blues"](1.0, bytes=True)[:3])
    found = places(picture, full)
    found = found[found[:, 1] < 0.86 * picture.shape[1]]  # not the colour bar
    side = (np.ptp(found[:, 0]) + 1) / num_classes
    first = found[found[:, 0] < found[:, 0].min() + side / 2]
    assert first[:, 1].min() > found[:, 1].max() - 1.5 * side
    without = confusion_picture([[5, 5], [0, 0]], ["a", "b"])  # images of the second class
    assert len(places(without, [217, 217, 217])) > 10_000


def bin_of(n: int, confidence: float, accuracy: float) -> dict:
    interval = wilson_interval(round(accuracy * n), n)
    return {"n": n, "confidence": confidence, "accuracy": accuracy, "accuracy_95": interval}


def test_reliability_picture_puts_accuracy_over_confidence():
    def marks(confidence: float, accuracy: float, n: int = 1_000_000) -> np.ndarray:
        result = {"reliability": [bin_of(n, confidence, accuracy)], "ece": 0.1, "ece_95": (0, 1)}
        found = places(reliability_picture({"model": result}), [31, 119, 180])
        return found[(found[:, 0] < 350) & (found[:, 0] > 70)]  # below the title

    low, high = (np.median(marks(*at), axis=0) for at in ((0.25, 0.25), (0.75, 0.5)))
    assert low[0] - high[0] > 50 and high[1] - low[1] > 100
    heights = [np.ptp(marks(0.5, 0.5, n)[:, 0]) for n in (10, 1000)]
    assert heights[0] > 4 * heights[1]  # the interval narrows with √n
    for hits in (0.0, 1.0):  # all wrong, all right
        result = {"reliability": [bin_of(n, 0.5, hits) for n in range(1, 200)]}
        result |= {"ece": 0.5, "ece_95": (0, 1)}
        assert reliability_picture({"a": result, "b": result}).shape == (520, 920, 3)


# Texts.


def test_captions_name_true_and_predicted_class():
    shares = torch.tensor([[0.7, 0.2, 0.1], [0.004, 0.001, 0.995]])
    captions = captions_of(shares.log(), torch.tensor([1, 2]), ["cat", "dog", "ship"])
    assert captions == ["true dog\npredicted cat 70%", "true ship\npredicted ship 100%"]


def test_letters_that_the_default_font_lacks_come_from_another_or_are_noted(
    monkeypatch, tmp_path, capsys
):
    """STIXGeneral, which comes with matplotlib, is installed or not."""
    letter, pictures = "\u1d8a", []
    source = Path(matplotlib.get_data_path()) / "fonts/ttf/STIXGeneral.ttf"
    for installed in (False, True):
        if installed:
            shutil.copy(source, tmp_path)
            (tmp_path / "broken.ttf").write_bytes(b"no font")
        monkeypatch.setattr(font_manager, "X11FontDirectories", [str(tmp_path)])
        for cached in (canvas.font_file, canvas._installed, canvas.note_once):
            cached.cache_clear()
        for word in (letter, f"a {letter}"):
            pictures.append(table([[Panel(np.zeros((9, 9, 3), np.uint8), word)]], (99, 99)))
        pictures.append(confusion_picture([[1, 0], [0, 1]], [letter, "b"]))
        assert capsys.readouterr().err.count("apt install fonts-noto-core\n") == (not installed)
    for without, with_font in zip(pictures[:3], pictures[3:], strict=True):
        assert (without != with_font).any()
    table([[Panel(np.zeros((9, 9, 3), np.uint8), "قط")]], (99, 99))  # DejaVu Sans has these letters
    assert capsys.readouterr() == ("", "")
    for word in ("猫", "고양이"):  # which neither font has
        table([[Panel(np.zeros((9, 9, 3), np.uint8), word)]], (99, 99))
    assert capsys.readouterr().err.count("apt install fonts-noto-cjk\n") == 1


@pytest.mark.parametrize(
    "words", ["cat", "W" * 200, "i" * 200, "$a$b_{", "", "雪" * 90, "a\tb\x1b"]
)
def test_words_are_cut_to_a_width_with_an_ellipsis(words):
    cut = shorten(words, 150)
    assert text_width(cut) <= 150 and cut.isprintable()
    if text_width(words) > 150:
        start, end = cut.split("…")
        assert words.startswith(start) and words.endswith(end) and 0 <= len(start) - len(end) <= 1
        assert text_width(cut) > 130  # no more is cut than must be
    elif words.isprintable():
        assert cut == words
