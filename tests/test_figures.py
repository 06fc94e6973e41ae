"""Pictures: read back from their pixels."""

import matplotlib
import numpy as np
import pytest
import torch
from torch import Tensor

from vit.data.datasets import ImageSet
from vit.explain.charts import confusion_picture, reliability_picture
from vit.explain.figures import (
    COLOURS,
    SCALE,
)
from vit.explain.figures import attention_picture as draw_attention
from vit.explain.rollout import map_title
from vit.model.vit import VisionTransformer
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
    vit = VisionTransformer(num_classes=1, embed_dim=12, depth=1).eval()
    probes = ImageSet(blue_images(1), torch.zeros(1, dtype=torch.int64), (name,))
    (picture,) = draw_probes(vit, probes, torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
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


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("num_classes", [2, 10, 100])
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


BINS = [
    {"n": 10, "confidence": 0.35, "accuracy": 0.4},
    {"n": 100, "confidence": 0.72, "accuracy": 0.6},
    {"n": 400, "confidence": 0.97, "accuracy": 0.9},
]


@pytest.mark.parametrize("bins", [BINS, BINS[:1]])
def test_reliability_picture_renders(bins):
    picture = reliability_picture(bins, 0.123)
    assert_is_picture(picture)
    assert picture.shape == (520, 460, 3)


BAR = np.array([31, 119, 180])  # matplotlib's first colour


def test_reliability_picture_puts_accuracy_over_confidence():
    def marks(confidence: float, accuracy: float, n: int) -> np.ndarray:
        bins = [{"n": n, "confidence": confidence, "accuracy": accuracy}]
        found = places(reliability_picture(bins, 0.1), BAR)
        return found[(found[:, 0] < 350) & (found[:, 0] > 70)]

    def marker(confidence: float, accuracy: float) -> np.ndarray:
        return np.median(marks(confidence, accuracy, 1_000_000), axis=0)  # its interval is a point

    low, high, off = marker(0.25, 0.25), marker(0.75, 0.75), marker(0.25, 0.75)
    assert low[0] - high[0] > 100 and high[1] - low[1] > 100
    assert abs(off[0] - high[0]) < 3 and abs(off[1] - low[1]) < 3
    heights = [np.ptp(marks(0.5, 0.5, n)[:, 0]) for n in (10, 100, 1000)]
    assert heights[0] > 2 * heights[1] > 4 * heights[2]  # the interval narrows with √n


def test_reliability_picture_counts_images_in_bars():
    bins = [
        {"n": 100, "confidence": 0.3, "accuracy": 0.3},
        {"n": 400, "confidence": 0.8, "accuracy": 0.8},
    ]
    bars = places(reliability_picture(bins, 0.1), BAR)
    bars = bars[bars[:, 0] > 360]
    low, high = (np.ptp(bars[side, 0]) for side in (bars[:, 1] < 250, bars[:, 1] > 250))
    assert high / low == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("hits", [0, 1])
def test_reliability_of_bins_all_right_or_all_wrong_is_drawn(hits):
    bins = [{"n": n, "confidence": 0.5, "accuracy": float(hits)} for n in range(1, 200)]
    assert reliability_picture(bins, 0.5).shape[2] == 3
