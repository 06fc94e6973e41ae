"""Pictures, checked by their pixels."""

import matplotlib
import numpy as np
import pytest
import torch
from torch import Tensor

from models import PLAIN
from vit.classifier import Classifier
from vit.data.datasets import ImageSet
from vit.data.preprocess import Preprocess
from vit.evaluation import wilson_interval
from vit.explain import charts, drawing, fonts
from vit.explain.charts import confusion_picture, reliability_picture
from vit.explain.drawing import (
    BAR,
    COLOURS,
    SCALE,
    SIGNED,
    UNIFORM,
    as_pixels,
    bar_of,
    colour_map,
    enlarge,
    framed,
    overlay,
    shorten,
    text_width,
)
from vit.explain.figures import attention_picture as draw_attention
from vit.explain.figures import (
    captions_of,
    comparison_picture,
    filmstrip_picture,
    gallery_picture,
    heads_chart,
    heads_picture,
    named,
)
from vit.explain.maps import MAP_KINDS, map_title
from vit.explain.sheet import TITLE_WIDTH, overlays_picture
from vit.model.vit import VisionTransformer
from vit.registry import ALL_KINDS
from vit.reporting.report import draw_probes

BLUE = torch.tensor([0, 0, 200], dtype=torch.uint8)[:, None, None]
LEVELS = [[0.0, 1.0], [2.0, 3.0]]


def blue_images(count: int, size: int = 32) -> Tensor:
    return BLUE.expand(count, 3, size, size).clone()


def colour_of(level: float) -> np.ndarray:
    """Return the colour of a map value, (3,) uint8."""
    low, high = SCALE
    return np.array(matplotlib.colormaps[COLOURS]((level - low) / (high - low), bytes=True)[:3])


def attention_picture(images: Tensor, maps: Tensor, captions: list[str]) -> np.ndarray:
    return draw_attention(images, maps, captions, [map_title("rollout", "")] * len(captions))


def places(picture: np.ndarray, colour: np.ndarray | list[int]) -> np.ndarray:
    """Return row and column of every pixel of a colour, give or take 2, (n, 2)."""
    return np.argwhere((np.abs(picture.astype(int) - np.asarray(colour)) <= 2).all(-1))


def assert_is_picture(picture: np.ndarray) -> None:
    assert isinstance(picture, np.ndarray) and picture.dtype == np.uint8
    assert picture.ndim == 3 and picture.shape[2] == 3 and picture.flags.c_contiguous
    assert (picture[0] == 255).all() or (picture[:, 0] == 255).all()  # white around
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(("size", "grid"), [(32, 8), (32, 4), (224, 14)])
def test_attention_picture_has_the_size_promised(count, size, grid):
    maps = torch.rand(count, grid, grid, generator=torch.Generator().manual_seed(0)) * 3
    picture = attention_picture(blue_images(count, size), maps, ["true cat"] * count)
    assert_is_picture(picture)
    height, width, _ = picture.shape
    assert 690 <= width <= 710 and 220 <= height / count <= 280


def test_the_map_panel_shows_every_value_in_its_place():
    picture = attention_picture(blue_images(1), torch.tensor([LEVELS]), ["cat"])
    middles = np.empty((2, 2, 2))
    for row in range(2):
        for column in range(2):
            found = places(picture, colour_of(LEVELS[row][column]))
            assert len(found) > 3000  # a quarter of a panel; the colour bar has few
            middles[row, column] = np.median(found, axis=0)
    top, left = middles[:, :, 0], middles[:, :, 1]
    assert np.ptp(top, axis=1).max() < 5 and np.ptp(left, axis=0).max() < 5
    assert (top[1] - top[0] > 50).all() and (left[:, 1] - left[:, 0] > 50).all()
    brightness = [colour_of(level).sum() for level in np.ravel(LEVELS)]
    assert brightness == sorted(brightness)


def overlay_panel(picture: np.ndarray, levels: list[float]) -> np.ndarray:
    """Cut out what lies to the right of the map panel, whose values are given."""
    shown = np.concatenate([places(picture, colour_of(level)) for level in levels])
    shown = shown[shown[:, 1] < 500]  # not the colour bar
    (top, _), (bottom, edge) = shown.min(axis=0), shown.max(axis=0)
    white = (picture[(top + bottom) // 2] == 255).all(-1)
    left = edge + 2 + np.argmin(white[edge + 2 :])
    right = left + np.argmax(white[left:])
    assert bottom - top > 150 and right - left > 150
    return picture[top : bottom + 1, left:right].astype(int)


def test_signed_maps_are_red_for_and_blue_against_the_class():
    heat = torch.tensor([[3.0, 0.0], [-0.5, -3.0]])
    picture = draw_attention(
        blue_images(2), torch.stack([heat, heat.abs()]), ["cat"] * 2,
        [map_title("lrp", "cat"), map_title("rollout", "")], [bar_of("lrp"), bar_of("rollout")],
    )  # fmt: skip
    assert picture.shape == (512, 706 + BAR, 3)  # one colour bar for each scale
    (red, none), (weak, blue) = colour_map(heat, SIGNED).astype(int)
    for colour in (red, none, weak, blue):
        assert len(places(picture, colour)) > 3000
    assert red[0] > 90 > red[2] and blue[2] > 90 > blue[0]
    assert np.ptp(none) < 5 and none.min() > 240
    grey = np.full((2, 2, 3), 100, np.uint8)
    laid = overlay(grey, heat, SIGNED).astype(int)
    assert laid[0, 0, 0] > laid[0, 0, 2] and laid[1, 1, 2] > laid[1, 1, 0]


def test_only_signed_kinds_have_two_colours():
    for kind, entry in ALL_KINDS.items():
        assert bar_of(kind) == (SIGNED if entry.signed else UNIFORM)


def test_the_overlay_is_the_brighter_the_more_is_attended_to():
    picture = attention_picture(blue_images(1), torch.tensor([LEVELS]), ["cat"])
    panel = overlay_panel(picture, [1.0, 2.0, 3.0])  # 0 is as black as text
    high, wide = len(panel) // 2, panel.shape[1] // 2
    for row in range(2):
        for column in range(2):
            part = panel[high * row :, wide * column :][8 : high - 8, 8 : wide - 8]
            assert (np.ptp(part, axis=(0, 1)) <= 2).all()  # neither smoothed nor misplaced
    middles = panel[high // 2 :: high, wide // 2 :: wide][:2, :2].sum(-1).ravel()
    assert (np.diff(middles) > 20).all()


def test_the_overlay_shows_the_image():
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    images[..., :8, 16:] = 255
    panel = overlay_panel(attention_picture(images, torch.ones(1, 4, 4), ["cat"]), [1.0]).sum(-1)
    high, wide = np.array(panel.shape) // 8
    bright, dark = panel[high, 6 * wide], panel[[high, 4 * high, 4 * high], [wide, wide, 6 * wide]]
    assert bright > dark.max() + 100 and np.ptp(dark) <= 6


def test_images_keep_their_pixels():
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    colours = torch.tensor([[[200, 10, 10], [10, 200, 10]], [[10, 10, 200], [200, 200, 10]]])
    images[0] = colours.permute(2, 0, 1)
    picture = attention_picture(images, torch.zeros(1, 2, 2), ["cat"])
    middles = np.array(
        [[np.median(places(picture, colour), axis=0) for colour in row] for row in colours.numpy()]
    )
    assert (middles[1, :, 0] - middles[0, :, 0] > 50).all()
    assert (middles[:, 1, 1] - middles[:, 0, 1] > 50).all()
    assert middles[..., 1].max() < 230  # in the left panel


def test_one_scale_for_all_pictures():
    quiet = attention_picture(blue_images(1), torch.full((1, 2, 2), 1.0), ["cat"])
    loud = attention_picture(blue_images(1), torch.tensor([[[1.0, 1.0], [1.0, 40.0]]]), ["cat"])
    one = colour_of(1.0)
    assert len(places(quiet, one)) > 4 * 3000 and len(places(loud, one)) > 3 * 3000
    beyond = places(loud, colour_of(3.0))
    assert len(beyond) > 3000


def test_each_row_is_an_image_and_its_map():
    maps = torch.stack([torch.full((2, 2), value) for value in (0.5, 1.5, 2.5)])
    picture = attention_picture(blue_images(3), maps, ["one", "two", "three"])
    for number, value in enumerate((0.5, 1.5, 2.5)):
        rows = places(picture, colour_of(value))[:, 0]
        height = len(picture) / 3
        inside = (rows >= height * number) & (rows < height * (number + 1))
        assert inside.mean() > 0.9 and inside.sum() > 4 * 3000


def test_captions_are_written():
    first, other = (
        attention_picture(blue_images(1), torch.ones(1, 2, 2), [caption]) for caption in "ab"
    )
    different = np.argwhere((first != other).any(-1))
    assert len(different) > 0 and different[:, 0].max() < 40 and different[:, 1].max() < 100


@pytest.mark.parametrize("name", ["cat", "automobile", "aquarium_fish"])
def test_captions_of_probes_fit_above_their_image(name):
    vit = VisionTransformer(**PLAIN, img_size=32, num_classes=1, embed_dim=12, depth=1).eval()
    probes = ImageSet(blue_images(1), torch.zeros(1, dtype=torch.int64), (name,))
    preprocess = Preprocess((32, 32), (0.0,) * 3, (1.0,) * 3)
    classifier = Classifier(vit, preprocess, (name,), torch.device("cpu"), torch.float32)
    (picture,) = draw_probes(classifier, probes)
    image = places(picture, [0, 0, 200])
    (top, _), right = image.min(axis=0), image[image[:, 1] < 300, 1].max()
    text = (picture[:top] < 128).all(-1)
    assert text[:, :right].any()
    assert not text[0].any() and not text[:, 0].any()  # not cut off
    assert not text[:, right + 1 : right + 5].any()  # nor running into the next title


def test_every_image_needs_its_caption():
    with pytest.raises(ValueError):
        attention_picture(blue_images(2), torch.ones(2, 2, 2), ["one"])


def draw_confusion(num_classes: int) -> list[list[int]]:
    counts = np.random.default_rng(0).integers(0, 30, (num_classes, num_classes))
    return (counts + 100 * np.eye(num_classes, dtype=int)).tolist()


def test_confusion_picture_cuts_long_names_in_the_middle():
    def draw(number: int, length: int) -> np.ndarray:
        names = [f"{'subspecies ' * length}{n + number}" for n in range(30)]
        return confusion_picture(draw_confusion(30), names)

    assert (draw(11, 9) != draw(41, 9)).any()  # numbers at the end stay
    assert (draw(11, 9) == draw(11, 90)).all()  # the matrix has the rest of the picture


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("num_classes", [2, 10, 30, 100])
def test_confusion_picture_renders(num_classes, empty):
    counts = draw_confusion(num_classes)
    if empty:
        counts[1] = [0] * num_classes
    names = [f"class number {number}" for number in range(num_classes)]
    picture = confusion_picture(counts, names)
    assert_is_picture(picture)
    assert picture.shape == ((560, 640, 3) if num_classes <= 20 else (800, 900, 3))


@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_confusion_picture_shows_shares_of_rows(num_classes):
    # Every image of the first class is taken for the last, though it has but one.
    counts = (1000 * np.eye(num_classes, dtype=int)).tolist()
    counts[0] = [0] * (num_classes - 1) + [1]
    picture = confusion_picture(counts, ["x"] * num_classes)
    full = np.array(matplotlib.colormaps["Blues"](1.0, bytes=True)[:3])
    found = places(picture, full)
    found = found[found[:, 1] < 0.86 * picture.shape[1]]  # not the colour bar
    top, bottom = found[:, 0].min(), found[:, 0].max()
    first = found[found[:, 0] < top + 0.5 * (bottom - top) / num_classes]
    assert first[:, 1].min() > found[:, 1].max() - 1.5 * (bottom - top + 1) / num_classes
    last = found[found[:, 0] > bottom - 0.5 * (bottom - top) / num_classes]
    assert last[:, 1].max() == found[:, 1].max()


def bin_of(n: int, confidence: float, accuracy: float) -> dict:
    interval = wilson_interval(round(accuracy * n), n)
    return {"n": n, "confidence": confidence, "accuracy": accuracy, "accuracy_95": interval}


BINS = [bin_of(10, 0.35, 0.4), bin_of(100, 0.72, 0.6), bin_of(400, 0.97, 0.9)]


@pytest.mark.parametrize("bins", [BINS, BINS[:1]])
def test_reliability_picture_renders(bins):
    picture = reliability_picture(bins, 0.123)
    assert_is_picture(picture)
    assert picture.shape == (520, 460, 3)


BLUE_BAR = np.array([31, 119, 180])  # matplotlib's first colour


def test_reliability_picture_puts_accuracy_over_confidence():
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


def test_reliability_picture_counts_images_in_bars():
    bins = [bin_of(100, 0.3, 0.3), bin_of(400, 0.8, 0.8)]
    bars = places(reliability_picture(bins, 0.1), BLUE_BAR)
    bars = bars[bars[:, 0] > 360]
    low, high = (np.ptp(bars[side, 0]) for side in (bars[:, 1] < 250, bars[:, 1] > 250))
    assert high / low == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("hits", [0, 1])
def test_reliability_of_bins_all_right_or_all_wrong_is_drawn(hits):
    bins = [bin_of(n, 0.5, float(hits)) for n in range(1, 200)]
    assert reliability_picture(bins, 0.5).shape[2] == 3


# Sheets of several pictures. Everything left of the colour bars is looked at.


def middle(picture: np.ndarray, colour: np.ndarray | list[int], bars: int = 1) -> np.ndarray:
    """Return the row and column where a cell of one colour has its middle, (2,)."""
    found = places(picture[:, : -BAR * bars], colour)
    assert len(found) > 1000
    top, left = found.min(axis=0)
    bottom, right = found.max(axis=0)
    assert len(found) > 0.95 * (bottom - top + 1) * (right - left + 1)  # in one piece
    return np.array([top + bottom, left + right]) / 2


def assert_not_cut_off(picture: np.ndarray) -> None:
    for edge in (picture[0], picture[-1], picture[:, 0], picture[:, -1]):
        assert (edge == 255).all()


def flat_maps(levels: Tensor, grid: tuple[int, int] = (2, 2)) -> Tensor:
    """Make maps of one value each: levels (...) to maps (..., rows, columns)."""
    return levels[..., None, None].expand(*levels.shape, *grid)


def tinted_images(count: int) -> tuple[Tensor, list[list[int]]]:
    """Return images of one colour each, (count, 3, 32, 32), and the colours."""
    colours = [[10 + 30 * number, 200 - 25 * number, 230] for number in range(count)]
    images = torch.tensor(colours, dtype=torch.uint8)[:, :, None, None].expand(-1, -1, 32, 32)
    return images.clone(), colours


def test_captions_name_truth_and_guess():
    shares = torch.tensor([[0.7, 0.2, 0.1], [0.004, 0.001, 0.995]])
    captions = captions_of(shares.log(), torch.tensor([1, 2]), ["cat", "dog", "ship"])
    assert captions == ["true dog\npredicted cat 70%", "true ship\npredicted ship 100%"]
    with pytest.raises(ValueError):
        captions_of(shares.log(), torch.tensor([1]), ["cat", "dog", "ship"])


@pytest.mark.parametrize("grid", [(2, 2), (8, 8), (2, 3), (5, 1)])
@pytest.mark.parametrize("size", [(40, 60), (31, 47), (1, 1), (200, 30)])
def test_overlay_has_the_pictures_own_size(size, grid):
    photo = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    drawn = overlay(photo, torch.rand(grid, generator=torch.Generator().manual_seed(0)) * 3)
    assert drawn.shape == photo.shape and drawn.dtype == np.uint8


def test_overlay_mixes_grey_with_the_maps_colour_patch_by_patch():
    levels = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.5, 1.5]])
    photo = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    drawn = overlay(photo, levels)
    for (row, column), level in np.ndenumerate(levels.numpy()):
        part = np.s_[10 * row : 10 * row + 10, 10 * column : 10 * column + 10]
        grey = photo[part].mean(axis=-1, keepdims=True)
        share = 0.1 + 0.65 * level / 3
        expected = (1 - share) * grey + share * colour_of(level)
        assert np.abs(drawn[part] - expected).max() < 2


def test_overlay_knows_no_colour_but_the_maps():
    heat = torch.tensor(LEVELS)
    red, green = (np.full((20, 20, 3), 0, dtype=np.uint8) for _ in range(2))
    red[..., 0] = green[..., 1] = 150
    np.testing.assert_array_equal(overlay(red, heat), overlay(green, heat))


def test_signed_overlay_shows_the_picture_pale_and_the_stronger_the_more_opaque():
    levels = torch.tensor([[0.0, 1.0, -1.5], [3.0, -3.0, 50.0]])
    photo = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    drawn, colours = overlay(photo, levels, SIGNED), colour_map(levels, SIGNED)
    for (row, column), level in np.ndenumerate(levels.numpy()):
        part = np.s_[10 * row : 10 * row + 10, 10 * column : 10 * column + 10]
        pale = (255 + photo[part].mean(axis=-1, keepdims=True)) / 2
        share = 0.75 * min(abs(level), 3) / 3
        expected = (1 - share) * pale + share * colours[row, column]
        assert np.abs(drawn[part] - expected).max() < 2


@pytest.mark.parametrize(("channels", "size"), [(3, (32, 32)), (1, (16, 48))])
def test_a_sheet_takes_maps_of_patches_and_of_pixels(channels, size):
    maps = {"rollout": torch.full((2, 2), 1.5), "lrp_pixels": torch.zeros(size)}
    maps["lrp_pixels"][: size[0] // 2] = 1.0
    images = torch.full((2, channels, *size), 90, dtype=torch.uint8)
    titles, bars = [map_title(kind, "cat") for kind in maps], [bar_of(kind) for kind in maps]
    picture = draw_attention(images, list(maps.values()), ["cat"] * 2, titles, bars)
    assert picture.shape == (512, 706 + BAR, 3)
    assert len(places(picture[:256], colour_of(1.5))) > 200 * 200
    pixels = places(picture[256:, 216:430], colour_map(torch.ones(1, 1), SIGNED)[0, 0])
    height, width = np.ptp(pixels, axis=0) + 1
    assert width == pytest.approx(208, abs=2)
    assert height == pytest.approx(104 * size[0] / size[1], abs=2)  # its upper half


def test_overlay_is_full_at_the_end_of_the_scale():
    photo = np.full((20, 20, 3), 90, dtype=np.uint8)
    end, beyond = (overlay(photo, torch.full((2, 2), level)) for level in (3.0, 50.0))
    np.testing.assert_array_equal(end, beyond)


def test_overlays_stand_beside_the_image_each_in_its_own_colours():
    image = blue_images(1)[0]
    maps = [torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([[3.0, -3.0], [0.0, 1.0]])]
    bars, titles = (
        [UNIFORM, SIGNED],
        ["attention rollout", "layer-wise relevance\n(for automobile)"],
    )
    picture = overlays_picture(image, maps, "true automobile\npredicted truck 51%", titles, bars)
    assert_is_picture(picture)
    pixels = as_pixels(image)
    parts = [pixels, *(overlay(pixels, *one) for one in zip(maps, bars, strict=True))]
    for column, part in enumerate(parts):
        left = 6 + 166 * column
        np.testing.assert_array_equal(picture[42:202, left : left + 160], enlarge(part, (160, 160)))
    red, blue = (picture[60, 338 + place].astype(int) for place in (40, 120))
    assert red[0] > red[2] and blue[2] > blue[0]


def test_filmstrip_has_images_as_rows_and_steps_as_columns():
    images, colours = tinted_images(3)
    levels = torch.linspace(0.6, 2.8, 12).view(4, 3)  # steps, images
    picture = filmstrip_picture(images, flat_maps(levels), [0, 10, 100, 1000])
    assert_is_picture(picture)
    assert_not_cut_off(picture)
    cells = np.array(
        [[middle(picture, colour_of(level)) for level in row] for row in levels.tolist()]
    )
    first = np.array([middle(picture, colour) for colour in colours])
    table = np.concatenate([first[None], cells])  # columns, rows, place
    assert np.ptp(table[..., 0], axis=0).max() < 1 and np.ptp(table[..., 1], axis=1).max() < 1
    for axis, way in ((1, 0), (0, 1)):
        steps = np.diff(table[..., way], axis=axis)
        assert steps.min() > 60 and np.ptp(steps) < 1


@pytest.mark.parametrize("steps", [1, 2, 10])
@pytest.mark.parametrize("count", [1, 8])
def test_words_of_filmstrip_are_not_cut_off(count, steps):
    maps = torch.ones(steps, count, 4, 4)
    assert_not_cut_off(filmstrip_picture(blue_images(count), maps, [10**5] * steps))


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (1, 3), (8, 1), (8, 10)])
def test_filmstrip_grows_by_a_cell(count, steps):
    maps = torch.rand(steps, count, 4, 4, generator=torch.Generator().manual_seed(0))
    picture = filmstrip_picture(blue_images(count), maps, [10**n for n in range(steps)])
    small = filmstrip_picture(blue_images(1), maps[:1, :1], [1])
    assert_is_picture(picture)
    assert len(picture) - len(small) == 70 * (count - 1)
    assert picture.shape[1] - small.shape[1] == 70 * (steps - 1)


def test_filmstrip_names_its_steps():
    pictures = [
        filmstrip_picture(blue_images(1), torch.ones(3, 1, 2, 2), [0, step, 1000])
        for step in (111, 888)
    ]
    where = np.argwhere((pictures[0] != pictures[1]).any(-1))
    level = places(pictures[0][:, :-BAR], colour_of(1.0))
    left = level[:, 1].min()
    assert where[:, 0].max() < level[:, 0].min()  # above the maps
    assert left + 70 < where[:, 1].min() and where[:, 1].max() < left + 140  # of the second step


def test_heads_picture_has_layers_as_rows_and_heads_as_columns():
    levels = torch.linspace(0.6, 2.8, 6).view(2, 3)  # layers, heads
    picture = heads_picture(blue_images(1)[0], flat_maps(levels), "cat")
    assert_is_picture(picture)
    assert_not_cut_off(picture)
    cells = np.array(
        [[middle(picture, colour_of(level)) for level in row] for row in levels.tolist()]
    )
    assert np.ptp(cells[..., 0], axis=1).max() < 1 and np.ptp(cells[..., 1], axis=0).max() < 1
    assert np.diff(cells[..., 0], axis=0).min() > 90 and np.diff(cells[..., 1], axis=1).min() > 90
    image = middle(picture, [0, 0, 200])
    assert abs(image[0] - cells[0, 0, 0]) < 1 and cells[0, 0, 1] - image[1] > 90


def test_heads_picture_shows_the_patches_of_a_map_in_their_places():
    maps = torch.tensor(LEVELS).expand(1, 1, 2, 2)
    picture = heads_picture(blue_images(1)[0], maps, "cat")
    top_right, bottom_left, bottom_right = (middle(picture, colour_of(n)) for n in (1.0, 2.0, 3.0))
    assert abs(top_right[1] - bottom_right[1]) < 1 and abs(bottom_left[0] - bottom_right[0]) < 1
    assert bottom_right[0] - top_right[0] == bottom_right[1] - bottom_left[1] == 48


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (5, 3), (12, 6)])
@pytest.mark.parametrize("name", ["cat", "aquarium_fish"])
def test_words_of_heads_picture_are_not_cut_off(layers, heads, name):
    picture = heads_picture(blue_images(1)[0], torch.ones(layers, heads, 4, 4), name)
    assert_is_picture(picture)
    assert_not_cut_off(picture)


@pytest.mark.parametrize(("count", "columns"), [(5, 2), (3, 4), (4, 4), (1, 4)])
def test_gallery_sets_overlays_beside_their_images_row_by_row(count, columns):
    images, colours = tinted_images(count)
    levels = torch.stack([torch.linspace(1.0, 2.8, count), -torch.linspace(1.0, 2.8, count)], 1)
    captions, headings = ["true cat\nas dog 99%"] * count, [["for dog", "for cat"]] * count
    names = ["cats/" * 30 + "1.jpg"] * count  # cut off
    picture = gallery_picture(
        "mistakes", images, names, captions, flat_maps(levels), headings, columns
    )
    assert_is_picture(picture)
    assert_not_cut_off(picture)
    first = middle(picture, colours[0])
    for number in range(count):
        image = middle(picture, colours[number])
        for column, level in enumerate(levels[number], start=1):
            pixels = images[number].permute(1, 2, 0).numpy()
            laid = overlay(pixels, flat_maps(level), SIGNED)[0, 0]
            assert np.abs(middle(picture, laid) - image - [0, 112 * column]).max() < 1
        row, column = np.rint((image - first) / (176, 354))
        assert (row, column) == (number // columns, number % columns)
        assert np.abs(image - first - (176 * row, 354 * column)).max() < 1


@pytest.mark.parametrize("count", [1, 2, 9])
def test_gallery_without_maps_has_the_images_alone(count):
    images, colours = tinted_images(count)
    names = ["cats/" * 30 + "1.jpg"] * count
    picture = gallery_picture("mistakes", images, names, ["true cat\nas dog 99%"] * count)
    assert_not_cut_off(picture)
    assert picture.shape[1] == 4 * (112 + 64 + 18)  # no colour bar
    for colour in colours:
        middle(np.pad(picture, ((0, 0), (0, BAR), (0, 0)), constant_values=255), colour)


def test_gallery_says_what_it_shows_and_what_each_image_is():
    def draw(**changed: str) -> np.ndarray:
        words = {"title": "a", "name": "1.jpg", "caption": "dog", "heading": "for dog"}
        words |= changed
        return gallery_picture(
            words["title"], blue_images(2), ["0.jpg", words["name"]], ["cat", words["caption"]],
            torch.ones(2, 1, 2, 2), [["a"], [words["heading"]]],
        )  # fmt: skip

    plain = draw()
    places = {  # top, bottom, left, right
        "title": (0, 38, 0, 100), "name": (38, 72, 248, 472), "caption": (72, 102, 248, 360),
        "heading": (72, 102, 360, 472),
    }  # fmt: skip
    for what, (top, bottom, left, right) in places.items():
        found = np.argwhere((draw(**{what: "ape"}) != plain).any(-1))
        assert len(found) and (found.min(0) >= (top, left)).all(), what
        assert (found.max(0) < (bottom, right)).all(), what


def test_gallery_has_room_for_the_names_of_breeds():
    def draw(guess: str) -> np.ndarray:
        captions = ["true Bengal", f"true Pug\nas {guess} 99%"]
        return gallery_picture(
            "mistakes",
            blue_images(2),
            ["0.jpg", "1.jpg"],
            captions,
            flat_maps(torch.ones(2, 1)),
            [["a"]] * 2,
        )

    one, other = draw("American Pit Bull Terrier"), draw("American Pit Bull Terreir")
    assert one.shape == other.shape and (one != other).any()
    assert_not_cut_off(one)
    assert draw("x" * 1000).shape == (38 + 64 + 224, 4 * (448 + 18) + BAR, 3)


def compare_flat(one: float, other: float) -> np.ndarray:
    maps = flat_maps(torch.tensor([one])), flat_maps(torch.tensor([other]))
    return comparison_picture(blue_images(1), maps, [["one: cat"], ["other: dog"]], ["true cat"])


def panel_colours(picture: np.ndarray) -> np.ndarray:
    """Return the colours of the four panels of a comparison of flat maps, (4, 3)."""
    row, left = middle(picture, [0, 0, 200], bars=2)
    step = (picture.shape[1] - 2 * BAR - 6) / 4
    return np.array([picture[int(row), int(left + step * column)] for column in range(4)])


@pytest.mark.parametrize(("one", "other"), [(0.5, 2.0), (2.0, 0.5), (1.0, 1.0), (1.0, 9.0)])
def test_comparison_shows_both_models_on_one_scale(one, other):
    picture = compare_flat(one, other)
    assert_is_picture(picture)
    assert_not_cut_off(picture)
    colours = panel_colours(picture).astype(int)
    assert colours[0].tolist() == [0, 0, 200]
    assert np.abs(colours[1] - colour_of(one)).max() <= 2
    assert np.abs(colours[2] - colour_of(other)).max() <= 2


def test_difference_is_white_where_there_is_none_red_where_the_second_looks_more():
    same, more, less = (
        panel_colours(compare_flat(1.5, other))[3].astype(int) for other in (1.5, 2.5, 0.5)
    )
    assert same.min() > 240
    assert more[0] > more[2] + 80 and less[2] > less[0] + 80
    slight, end, beyond = (
        panel_colours(compare_flat(0.0, other))[3].astype(int) for other in (0.2, 2.0, 7.0)
    )
    assert slight.min() > end.min() + 100
    assert end.tolist() == beyond.tolist()


def test_comparison_has_a_row_for_each_image():
    images, colours = tinted_images(3)
    one, other = torch.tensor([0.5, 1.0, 1.5]), torch.tensor([2.0, 2.4, 2.8])
    maps = flat_maps(one), flat_maps(other)
    picture = comparison_picture(images, maps, [["a"] * 3, ["b"] * 3], [""] * 3)
    assert len(picture) == 3 * len(compare_flat(1.0, 1.0))
    for number, colour in enumerate(colours):
        row, _ = middle(picture, colour, bars=2)
        assert row // (len(picture) / 3) == number
        for level in (one[number].item(), other[number].item()):
            assert abs(middle(picture, colour_of(level), bars=2)[0] - row) < 1


@pytest.mark.parametrize("levels", [(2.0,), (0.5, 1.5, 2.5), (0.5, 1.0, 1.5, 2.5)])
def test_comparison_of_one_or_more_than_two_models_has_a_map_of_each_and_no_difference(levels):
    maps = [flat_maps(torch.tensor([level])) for level in levels]
    caption = "true cat\none without maps: dog\nanother: cat"
    picture = comparison_picture(blue_images(1), maps, [["name: cat"]] * len(maps), [caption])
    assert_is_picture(picture)
    assert_not_cut_off(picture)
    row, left = middle(picture, [0, 0, 200], bars=1)
    step = (picture.shape[1] - BAR - 6) / (1 + len(levels))
    assert round(step) == 182  # so there is no room for a further panel
    for column, level in enumerate(levels, start=1):
        colour = picture[int(row), int(left + step * column)].astype(int)
        assert np.abs(colour - colour_of(level)).max() <= 2


def test_comparison_shows_finer_maps_than_two_by_two_in_their_places():
    maps = torch.zeros(1, 2, 3), torch.zeros(1, 2, 3)
    maps[1][0, 1, 2] = 2.0
    images = blue_images(1).repeat(1, 1, 2, 3)  # as wide as the maps for their height
    picture = comparison_picture(images, maps, [["a"], ["b"]], ["cat"])
    image = middle(picture, [0, 0, 200], bars=2)
    high = middle(picture, colour_of(2.0), bars=2) - image
    red = np.array(matplotlib.colormaps["RdBu_r"](1.0, bytes=True)[:3])
    changed = middle(picture, red, bars=2) - image
    height, width = np.ptp(places(picture, [0, 0, 200]), axis=0) + 1
    assert abs(width / height - 1.5) < 0.02
    assert abs(high[0] - height / 4) < 2 and abs(changed[0] - height / 4) < 2
    step = changed[1] - high[1]
    assert step > width and abs(high[1] - 2 * step - width / 3) < 2


TITLES = ("entropy / log N", "distance, pixels", "fraction to the top token")


@pytest.mark.parametrize("layers", [1, 12])
@pytest.mark.parametrize("heads", [1, 2, 3, 12])
def test_heads_chart_renders(layers, heads):
    generator = torch.Generator().manual_seed(0)
    chart = heads_chart({t: torch.rand(layers, heads, generator=generator) for t in TITLES})
    assert_is_picture(chart)
    assert_not_cut_off(chart)


def test_heads_chart_has_layers_as_rows_heads_as_columns_and_one_scale_each():
    values = torch.zeros(3, 2)
    values[2, 0] = 1.0
    chart = heads_chart({"one": values, "tenfold": 10 * values.flip(0, 1)})
    most, least = (np.array(matplotlib.colormaps["viridis"](n, bytes=True)[:3]) for n in (1.0, 0.0))
    half = chart.shape[1] // 2
    for part, row, column in ((chart[:, :half], 2, 0), (chart[:, half:], 0, 1)):
        bright, dark = places(part, most), places(part, least)
        top, left = np.concatenate([bright, dark]).min(axis=0)
        bottom, right = np.concatenate([bright, dark]).max(axis=0)
        found = (np.median(bright, axis=0) - (top, left)) / (bottom - top + 1, right - left + 1)
        assert np.abs(found - ((row + 0.5) / 3, (column + 0.5) / 2)).max() < 0.03


def test_heads_chart_writes_its_numbers():
    charts = [heads_chart({"one": torch.tensor([[0.0, level]])}) for level in (0.31, 0.32)]
    assert charts[0].shape == charts[1].shape and (charts[0] != charts[1]).any()


# Texts.


def test_letters_that_the_default_font_lacks_come_from_another(monkeypatch, capsys):
    """STIXGeneral, which comes with matplotlib, stands for an East Asian font."""
    letter, pictures = "\u1d8a", []
    monkeypatch.setattr(fonts, "EAST_ASIAN", ("No Such Font", "STIXGeneral"))
    for families in (["sans-serif"], fonts.font_families.__wrapped__()):
        for module in (charts, drawing):
            monkeypatch.setattr(module, "font_families", lambda found=families: found)
        pictures.append(
            framed(
                np.full((40, 99, 3), 255, np.uint8), [(9, 30, "left", letter)], [], length=9, top=9
            )
        )
        pictures.append(confusion_picture([[1, 0], [0, 1]], [letter, "b"]))
        assert capsys.readouterr().err == ""
        fonts.report_boxes()
        fonts.report_boxes()
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


def test_of_a_file_name_the_end_stays():
    name = "a long folder of pictures/cats/IMG_0123.jpg"
    cut = shorten(name, 150, front=True)
    assert cut[0] == "…" and name.endswith(cut[1:]) and 130 < text_width(cut) <= 150
    assert shorten(name, 500, front=True) == name


def test_a_name_is_written_above_a_picture():
    picture = np.zeros((50, 200, 3), dtype=np.uint8)
    first, other = (named(picture, "cats/" * 30 + end) for end in ("1.jpg", "2.jpg"))
    assert first.shape == other.shape and (first[-50:] == picture).all()
    assert (first[:-50] != other[:-50]).any() and (first[:-50, :6] == 255).all()
    assert (first[0] == 255).all() and (first[:-50, -6:] == 255).all()  # not cut off


def test_each_line_of_a_text_is_cut():
    assert shorten(f"cat\n{'W' * 99}\ndog", 100).split("\n")[::2] == ["cat", "dog"]


@pytest.mark.parametrize(
    "name", ["black-footed ferret (Mustela nigripes) in the snow", "$x_{$", "雪"]
)
def test_class_names_of_any_kind_stay_over_their_panel(name):
    picture = draw_attention(
        blue_images(1), torch.zeros(1, 2, 2), [f"true {name}\npredicted {name}"],
        [map_title("relevance", name)],
    )  # fmt: skip
    assert picture.shape == (256, 706, 3)
    head = picture[:42, :642]
    columns = np.flatnonzero((head < 128).any(axis=(0, 2)))
    gaps = (columns >= 216) & (columns < 219), (columns >= 430) & (columns < 433)
    assert len(columns) and not any(gap.any() for gap in gaps)


def test_every_title_fits_above_the_narrowest_map_of_a_sheet():
    for kind in MAP_KINDS:
        title = map_title(kind, "automobile")
        assert shorten(title, TITLE_WIDTH) == title
