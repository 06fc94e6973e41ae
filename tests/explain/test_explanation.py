"""Photos in Python: predict, explain, and the sheet of an explanation."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from models import PLAIN, names, randomize
from vit.classifier import Classifier
from vit.colours import colour_map
from vit.data.config import DataConfig
from vit.data.preprocess import Preprocess
from vit.explain.canvas import fit, overlay, resize
from vit.explain.explanation import NARROWEST, PANEL, ZOOM, Explanation
from vit.explain.maps import MAP_KINDS, attention_maps, bar_of
from vit.model.vit import VisionTransformer

CLASSES = names(7)


def draw_photo(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def classifier() -> Classifier:
    sizes = {"img_size": 32, "num_classes": 7, "embed_dim": 24, "depth": 2, "num_heads": 2}
    model = randomize(VisionTransformer(**PLAIN | sizes), 0.2)
    preprocess = Preprocess.from_config(DataConfig(name="cifar10"))
    return Classifier(model, preprocess, CLASSES, torch.device("cpu"), torch.float32)


# Predictions.


def test_a_photo_is_a_path_an_image_or_an_array(classifier, tmp_path):
    photo = draw_photo(40, 60)
    path = tmp_path / "some photo.png"
    Image.fromarray(photo).save(path)
    seen = Image.open(path)
    expected = classifier.predict(photo)
    for same in (str(path), path, seen, Image.fromarray(photo)):
        assert classifier.predict(same) == expected
    several = classifier.predict([path, draw_photo(8, 8), seen])
    assert [len(found) for found in several] == [5, 5, 5]
    assert several[0] == pytest.approx(expected) and several[2] == several[0]
    assert classifier.predict([]) == [] and classifier.explain([]) == []
    explained = classifier.explain([path, draw_photo(30, 10)])
    assert [list(found.maps) for found in explained] == [["rollout", "lrp_pixels"]] * 2
    assert explained[0].name == "some photo.png"


def test_invalid_photos_and_arguments_are_refused(classifier):
    for photo, words in (
        (Image.new("RGB", (0, 0)), "the image has no pixels"),
        (Image.new("F", (8, 8)), "the image has floating-point pixels"),
        (b"bytes", "a bytes is not allowed"),
    ):
        for method in (classifier.predict, classifier.explain):
            with pytest.raises(ValueError, match=words):
                method(photo)
    photo = draw_photo(8, 8)
    with pytest.raises(ValueError, match="top: 0"):
        classifier.predict(photo, top=0)
    with pytest.raises(ValueError, match=r"^kinds: .* one or more of .* relevance"):
        classifier.explain(photo, kinds=[])
    with pytest.raises(ValueError, match="kinds: 'rolout'"):
        classifier.explain(photo, kinds="rolout")
    with pytest.raises(ValueError, match="target: dog is not allowed; it must be a class of"):
        classifier.explain(photo, target="dog")
    with pytest.raises(ValueError, match="precision: fp16"):
        vit.load("cifar10_quick", "cpu", "fp16")


# Explanations.


def test_explain_returns_the_maps_of_the_model(classifier, tmp_path):
    photo = draw_photo(50, 90)
    found = classifier.explain(photo, kinds=tuple(MAP_KINDS))
    assert isinstance(found, Explanation) and list(found.maps) == list(MAP_KINDS)
    inputs = classifier.normalize(classifier.preprocess.resize(photo)[None])
    logits, maps = attention_maps(classifier.model, inputs, list(MAP_KINDS))
    for kind, heat in maps.items():
        torch.testing.assert_close(found.maps[kind], heat[0], rtol=1e-5, atol=1e-6)
    assert (found.kind, found.map.shape) == ("rollout", (8, 8))
    assert torch.equal(found.map, found.maps["rollout"])
    best = CLASSES[int(logits.argmax())]
    assert found.predicted == found.target == best == next(iter(classifier.predict(photo)))
    assert len(found.probabilities) == 7
    assert found.seen == (slice(0, 50), slice(19, 69))
    assert np.array_equal(found.photo, photo)


def test_maps_of_many_images_are_made_in_batches(classifier):
    images = torch.stack([classifier.preprocess.resize(draw_photo(32, n)) for n in range(30, 35)])
    target = torch.tensor([0, 3, 1, 2, 4])
    logits, whole = classifier.maps(images, ("relevance",), target)
    parted_logits, parted = classifier.maps(images, ("relevance",), target, batch_size=2)
    torch.testing.assert_close(parted_logits, logits)
    torch.testing.assert_close(parted["relevance"], whole["relevance"], rtol=0, atol=1e-4)


# Sheets.


def sheet(explanation: Explanation) -> np.ndarray:
    return np.asarray(explanation.sheet())


@pytest.mark.parametrize("size", [(32, 32), (300, 40), (600, 900)])
@pytest.mark.parametrize("how", ["crop", "pad"])
def test_sheet_shows_map_and_overlay_of_what_the_model_sees(classifier, size, how):
    preprocess, photo = replace(classifier.preprocess, fit=how), draw_photo(*size)
    kinds = ("rollout", "lrp", "lrp_pixels")
    found = replace(classifier, preprocess=preprocess).explain(photo, kinds)
    (above, below), (left, right) = found.padding
    view = np.full((size[0] + above + below, size[1] + left + right, 3), preprocess.fill, np.uint8)
    view[above : above + size[0], left : left + size[1]] = photo
    if how == "crop":
        view = photo[found.seen]
        assert view.shape[0] == view.shape[1] == min(size)
    assert abs(view.shape[0] - view.shape[1]) <= 0.1 * max(size)
    height, width = fit(view.shape, (PANEL, PANEL))
    view = resize(view, (ZOOM * height, ZOOM * width))
    drawn = sheet(found)
    first = ZOOM * (24 + max(fit(size, (PANEL, 2 * PANEL))[1], NARROWEST))
    for row, (kind, heat) in enumerate(found.maps.items()):
        bar, top = bar_of(kind), ZOOM * (84 + row * (height + 42))
        for column, expected in enumerate((colour_map(heat, bar), overlay(view, heat, bar))):
            x = first + column * ZOOM * (PANEL + 6)
            panel = drawn[top : top + ZOOM * height, x : x + ZOOM * width]
            np.testing.assert_array_equal(panel, resize(expected, view.shape))


def test_photo_keeps_its_aspect_ratio_and_what_the_model_sees_is_framed(classifier):
    photo = np.full((100, 200, 3), (200, 30, 30), np.uint8)
    drawn = sheet(classifier.explain(photo, "relevance"))
    panel = drawn[ZOOM * 84 :, ZOOM * 12 :][: ZOOM * PANEL, : 2 * ZOOM * PANEL]
    inside = (panel == (200, 30, 30)).all(axis=2)
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    assert columns.mean() == pytest.approx(ZOOM * PANEL, abs=2)  # in the middle
    assert len(columns) == len(rows) == pytest.approx(ZOOM * PANEL, abs=8)
    black = (panel == 0).all(axis=2)
    assert black[0].sum() == pytest.approx(ZOOM * PANEL, abs=2) and black[5].sum() <= 8
    faded = panel[5, 5].astype(int)
    assert faded[0] > 200 and faded[1] == faded[2] > 150  # paler than the photo


def test_a_frame_may_be_narrower_than_a_pixel(classifier):
    for size in ((20, 20_000), (9000, 16), (2, 3000)):
        found = classifier.explain(np.full((*size, 3), 200, np.uint8), "relevance")
        assert sheet(found).shape[2] == 3


def test_sheet_is_saved_and_shown_in_notebooks(classifier, tmp_path, monkeypatch):
    found = classifier.explain(draw_photo(32, 32))
    found.save(tmp_path / "sheet.png")
    for file in (tmp_path / "sheet.png", BytesIO(found._repr_png_())):
        with Image.open(file) as saved:
            np.testing.assert_array_equal(np.asarray(saved), sheet(found))
    shown = []
    monkeypatch.setattr(Image.Image, "show", lambda image: shown.append(image))
    found.show()
    assert len(shown) == 1
    assert len(repr(found)) < 500 and found.predicted in repr(found)
