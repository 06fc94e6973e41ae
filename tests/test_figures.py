"""What pictures show, and where."""

import matplotlib
import numpy as np
import pytest
import torch
from torch import Tensor

from models import PLAIN
from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.evaluation import wilson_interval
from vit.explain import canvas, charts
from vit.explain.canvas import BAR, enlarge, framed, overlay, shorten, text_width
from vit.explain.charts import confusion_picture, heads_chart, reliability_picture
from vit.explain.colours import (
    INFERNO,
    RED_BLUE,
    SIGNED,
    UNIFORM,
    Bar,
    as_pixels,
    blues,
    colour_map,
    table_of,
)
from vit.explain.figures import (
    DIFFERENCE,
    attention_picture,
    captions_of,
    comparison_picture,
    filmstrip_picture,
    gallery_picture,
    heads_picture,
    named,
    overlays_picture,
)
from vit.explain.maps import MAP_KINDS, map_title
from vit.explain.sheet import TITLE_WIDTH
from vit.model.vit import VisionTransformer
from vit.reporting.report import draw_probes

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


@pytest.mark.parametrize(("table", "name"), [(INFERNO, "inferno"), (RED_BLUE, "RdBu_r")])
def test_tables_and_their_steps_are_those_of_matplotlib(table: str, name: str) -> None:
    expected = matplotlib.colormaps[name]
    np.testing.assert_array_equal(table_of(table), expected(range(256), bytes=True)[:, :3])
    heat = torch.linspace(-3.5, 3.5, 999)[None]
    found = colour_map(heat, (table, (-3.0, 3.0), ""))
    np.testing.assert_array_equal(found, expected((heat.numpy() + 3) / 6, bytes=True)[..., :3])


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
    assert colour_map(heat)[0].tolist() == table_of(INFERNO)[[0, 255]].tolist()
    assert overlay(np.zeros((2, 2, 3), np.uint8), heat).shape == (2, 2, 3)


def test_signed_maps_are_red_for_and_blue_against_the_class() -> None:
    red, none, blue = colour_map(torch.tensor([[3.0, 0.0, -3.0]]), SIGNED)[0].astype(int)
    assert red[0] > 90 > red[2] and blue[2] > 90 > blue[0] and none.min() > 240


# Pictures of several panels.


@pytest.mark.parametrize(("channels", "size"), [(3, (20, 30)), (1, (16, 48))])
def test_attention_picture_has_image_map_and_overlay(channels: int, size: tuple[int, int]) -> None:
    images, bars = noise(2, channels, size), [UNIFORM, SIGNED]
    maps = [LEVELS, torch.linspace(-3, 3, size[0] * size[1]).view(size)]  # patches, pixels
    titles = [map_title("rollout", ""), map_title("lrp_pixels", "cat")]
    picture = attention_picture(images, maps, ["true cat\npredicted dog"] * 2, titles, bars)
    assert picture.shape == (512, 706 + BAR, 3)  # a colour bar for each scale
    cells = []
    for image, heat, bar in zip(images, maps, bars, strict=True):
        pixels = as_pixels(image)
        cells.append([pixels, colour_map(heat, bar), overlay(pixels, heat, bar)])
    assert_cells(picture, cells, (42, 6), (256, 214), 208)
    with pytest.raises(ValueError):
        attention_picture(images, maps, ["one"], titles, bars)


def test_overlays_stand_beside_the_image_each_in_its_scale() -> None:
    (image,), maps, bars = noise(1), [LEVELS, -LEVELS], [UNIFORM, SIGNED]
    titles = ["attention rollout", "layer-wise relevance\n(for automobile)"]
    picture = overlays_picture(image, maps, "true automobile\npredicted truck 51%", titles, bars)
    pixels = as_pixels(image)
    laid = [overlay(pixels, heat, bar) for heat, bar in zip(maps, bars, strict=True)]
    assert_cells(picture, [[pixels, *laid]], (42, 6), (0, 166), 160)


def test_filmstrip_has_images_as_rows_and_steps_as_columns() -> None:
    images, maps = noise(3), torch.rand(4, 3, 2, 3) * 3
    picture = filmstrip_picture(images, maps, [0, 10, 100, 10**6])
    cells = [
        [as_pixels(image), *(colour_map(heat) for heat in maps[:, row])]
        for row, image in enumerate(images)
    ]
    assert_cells(picture, cells, (44, 6), (70, 70), 64)
    other = filmstrip_picture(images, maps, [0, 88, 100, 10**6])
    rows, columns = np.nonzero((picture != other).any(-1))
    assert rows.max() < 44 and columns.min() > 6 + 140 and columns.max() < 6 + 210


def test_heads_picture_has_layers_as_rows_and_heads_as_columns() -> None:
    (image,), maps = noise(1), torch.rand(2, 3, 2, 2) * 3
    picture = heads_picture(image, maps, "aquarium_fish")
    blank = np.full((1, 1, 3), 255, np.uint8)
    cells = [
        [first, *(colour_map(heat) for heat in layer)]
        for first, layer in zip((as_pixels(image), blank), maps, strict=True)
    ]
    assert_cells(picture, cells, (44, 52), (102, 102), 96)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_comparison_has_a_map_of_each_model_and_of_two_the_difference(count: int) -> None:
    images, maps = noise(2), [torch.rand(2, 2, 3) * 3 for _ in range(count)]
    caption = "true cat\none without maps: dog\nanother: cat"
    picture = comparison_picture(images, maps, [["name: cat"] * 2] * count, [caption] * 2)
    cells = []
    for row, image in enumerate(images):
        cells.append([as_pixels(image), *(colour_map(found[row]) for found in maps)])
        if count == 2:
            cells[row].append(colour_map(maps[1][row] - maps[0][row], DIFFERENCE))
    assert_cells(picture, cells, (57, 6), (239, 182), 176)
    panels = 1 + count + (count == 2)
    assert picture.shape[1] == 182 * panels + 6 + BAR * (1 + (count == 2))


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


def test_gallery_without_maps_has_the_images_alone() -> None:
    images, words = noise(5), ["true cat\nas dog 99%"] * 5
    picture = gallery_picture("mistakes", images, ["cats/" * 30 + "1.jpg"] * 5, words)
    assert picture.shape[1] == 4 * (112 + 64 + 18)  # no colour bar
    pixels = [as_pixels(image) for image in images]
    assert_cells(picture, [pixels[:4], pixels[4:]], (96, 6), (176, 194), 112)


def test_gallery_says_what_it_shows_and_what_each_image_is() -> None:
    def draw(**changed: str) -> np.ndarray:
        words = {"title": "a", "name": "1.jpg", "caption": "dog", "heading": "for dog"}
        words |= changed
        return gallery_picture(
            words["title"], noise(2), ["0.jpg", words["name"]], ["cat", words["caption"]],
            torch.ones(2, 1, 2, 2), [["a"], [words["heading"]]],
        )  # fmt: skip

    plain = draw()
    boxes = {  # top, bottom, left, right
        "title": (0, 38, 0, 100), "name": (38, 72, 248, 472), "caption": (72, 102, 248, 360),
        "heading": (72, 102, 360, 472),
    }  # fmt: skip
    for what, (top, bottom, left, right) in boxes.items():
        found = np.argwhere((draw(**{what: "ape"}) != plain).any(-1))
        assert len(found) and (found.min(0) >= (top, left)).all(), what
        assert (found.max(0) < (bottom, right)).all(), what


def test_gallery_has_room_for_the_names_of_breeds() -> None:
    def draw(guess: str) -> np.ndarray:
        captions, ones = ["true Bengal", f"true Pug\nas {guess} 99%"], torch.ones(2, 1, 2, 2)
        names = ["0.jpg", "1.jpg"]
        return gallery_picture("mistakes", noise(2), names, captions, ones, [["a"]] * 2)

    one, other = draw("American Pit Bull Terrier"), draw("American Pit Bull Terreir")
    assert one.shape == other.shape and (one != other).any()
    assert draw("x" * 1000).shape == (38 + 64 + 224, 4 * (448 + 18) + BAR, 3)


# Charts.


def test_heads_chart_has_layers_as_rows_heads_as_columns_and_one_scale_each() -> None:
    values = torch.zeros(3, 2)
    values[2, 0] = 1.0
    chart = heads_chart({"one": values, "tenfold": 10 * values.flip(0, 1)})
    half, (least, *_, most) = chart.shape[1] // 2, blues()
    for part, row, column in ((chart[:, :half], 2, 0), (chart[:, half:], 0, 1)):
        for number in np.ndindex(3, 2):
            top, left = 24 + 30 * number[0], 34 + 75 * number[1]
            expected = most if number == (row, column) else least
            assert (part[top + 1, left + 1] == expected).all()
    equal, close = (heads_chart({"one": torch.tensor([[0.0, n]])}) for n in (0.31, 0.32))
    assert equal.shape == close.shape and (equal != close).any()  # the numbers are written
    assert heads_chart({"constant": torch.ones(12, 12)}).shape == (420, 582, 3)


def draw_confusion(num_classes: int) -> list[list[int]]:
    counts = np.random.default_rng(0).integers(0, 30, (num_classes, num_classes))
    return (counts + 100 * np.eye(num_classes, dtype=int)).tolist()


def test_confusion_picture_cuts_long_names_in_the_middle() -> None:
    def draw(number: int, length: int) -> np.ndarray:
        names = [f"{'subspecies ' * length}{n + number}" for n in range(30)]
        return confusion_picture(draw_confusion(30), names)

    assert (draw(11, 9) != draw(41, 9)).any()  # numbers at the end stay
    assert (draw(11, 9) == draw(11, 90)).all()  # the matrix has the rest of the picture


@pytest.mark.parametrize("num_classes", [2, 30, 100])
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
        found = places(reliability_picture(bins, 0.1), BLUE_BAR)
        return found[(found[:, 0] < 350) & (found[:, 0] > 70)]

    def marker(confidence: float, accuracy: float) -> np.ndarray:
        return np.median(marks(confidence, accuracy, 1_000_000), axis=0)  # its interval is a point

    low, high, off = marker(0.25, 0.25), marker(0.75, 0.75), marker(0.25, 0.75)
    assert low[0] - high[0] > 100 and high[1] - low[1] > 100
    assert abs(off[0] - high[0]) < 3 and abs(off[1] - low[1]) < 3
    heights = [np.ptp(marks(0.5, 0.5, n)[:, 0]) for n in (10, 100, 1000)]
    assert heights[0] > 2 * heights[1] > 4 * heights[2]  # the interval narrows with √n


def test_reliability_picture_counts_images_in_bars() -> None:
    bins = [bin_of(100, 0.3, 0.3), bin_of(400, 0.8, 0.8)]
    bars = places(reliability_picture(bins, 0.1), BLUE_BAR)
    bars = bars[bars[:, 0] > 360]
    low, high = (np.ptp(bars[side, 0]) for side in (bars[:, 1] < 250, bars[:, 1] > 250))
    assert high / low == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("hits", [0, 1])
def test_reliability_of_bins_all_right_or_all_wrong_is_drawn(hits: int) -> None:
    bins = [bin_of(n, 0.5, float(hits)) for n in range(1, 200)]
    assert reliability_picture(bins, 0.5).shape == (520, 460, 3)


# Texts.


def test_captions_name_truth_and_guess() -> None:
    shares = torch.tensor([[0.7, 0.2, 0.1], [0.004, 0.001, 0.995]])
    captions = captions_of(shares.log(), torch.tensor([1, 2]), ["cat", "dog", "ship"])
    assert captions == ["true dog\npredicted cat 70%", "true ship\npredicted ship 100%"]
    with pytest.raises(ValueError):
        captions_of(shares.log(), torch.tensor([1]), ["cat", "dog", "ship"])


def test_captions_of_probes_fit_above_their_image() -> None:
    vit = VisionTransformer(**PLAIN, img_size=32, num_classes=1, embed_dim=12, depth=1).eval()
    blue = torch.tensor([0, 0, 200], dtype=torch.uint8)[:, None, None].expand(1, 3, 32, 32)
    name = "aquarium_fish"
    probes = ImageSet(blue.clone(), torch.zeros(1, dtype=torch.int64), (name,))
    preprocess = Preprocess((32, 32), (0.0,) * 3, (1.0,) * 3)
    classifier = Classifier(vit, preprocess, (name,), torch.device("cpu"), torch.float32)
    (picture,) = draw_probes(classifier, probes)
    image = places(picture, [0, 0, 200])
    (top, _), right = image.min(axis=0), image[image[:, 1] < 300, 1].max()
    text = (picture[:top] < 128).all(-1)
    assert text[:, :right].any()
    assert not text[0].any() and not text[:, 0].any()  # not cut off
    assert not text[:, right + 1 : right + 5].any()  # nor running into the next title


def test_letters_that_the_default_font_lacks_come_from_another(monkeypatch, capsys):
    """STIXGeneral, which comes with matplotlib, stands for an East Asian font."""
    letter, pictures = "\u1d8a", []
    monkeypatch.setattr(canvas, "EAST_ASIAN", ("No Such Font", "STIXGeneral"))
    for families in (["sans-serif"], canvas.font_families.__wrapped__()):
        for module in (charts, canvas):
            monkeypatch.setattr(module, "font_families", lambda found=families: found)
        pictures.append(
            framed(
                np.full((40, 99, 3), 255, np.uint8), [(9, 30, "left", letter)], [], length=9, top=9
            )
        )
        pictures.append(confusion_picture([[1, 0], [0, 1]], [letter, "b"]))
        assert capsys.readouterr().err == ""
        canvas.report_boxes()
        canvas.report_boxes()
        said = capsys.readouterr().err
        assert said.count("warning: pictures show boxes") == (families == ["sans-serif"])
    assert families == ["sans-serif", "STIXGeneral"]
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


def test_of_a_file_name_the_end_stays() -> None:
    name = "a long folder of pictures/cats/IMG_0123.jpg"
    cut = shorten(name, 150, front=True)
    assert cut[0] == "…" and name.endswith(cut[1:]) and 130 < text_width(cut) <= 150
    assert shorten(name, 500, front=True) == name


def test_a_name_is_written_above_a_picture() -> None:
    picture = np.zeros((50, 200, 3), dtype=np.uint8)
    first, other = (named(picture, "cats/" * 30 + end) for end in ("1.jpg", "2.jpg"))
    assert first.shape == other.shape and (first[-50:] == picture).all()
    assert (first[:-50] != other[:-50]).any() and (first[:-50, :6] == 255).all()
    assert (first[0] == 255).all() and (first[:-50, -6:] == 255).all()  # not cut off


def test_each_line_of_a_text_is_cut() -> None:
    assert shorten(f"cat\n{'W' * 99}\ndog", 100).split("\n")[::2] == ["cat", "dog"]


@pytest.mark.parametrize(
    "name", ["black-footed ferret (Mustela nigripes) in the snow", "$x_{$", "雪"]
)
def test_class_names_of_any_kind_stay_over_their_panel(name):
    picture = attention_picture(
        noise(1), torch.zeros(1, 2, 2), [f"true {name}\npredicted {name}"],
        [map_title("relevance", name)],
    )  # fmt: skip
    assert picture.shape == (256, 706, 3)
    head = picture[:42, :642]
    columns = np.flatnonzero((head < 128).any(axis=(0, 2)))
    gaps = (columns >= 216) & (columns < 219), (columns >= 430) & (columns < 433)
    assert len(columns) and not any(gap.any() for gap in gaps)


def test_every_title_fits_above_the_narrowest_map_of_a_sheet() -> None:
    for kind in MAP_KINDS:
        title = map_title(kind, "automobile")
        assert shorten(title, TITLE_WIDTH) == title
