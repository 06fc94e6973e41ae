"""The report: its mistakes, and the folder that it is written to."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from models import grey_classifier
from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.canvas import BAR
from vit.explain.lrp import propagate
from vit.reporting.report import (
    _require_own_report,
    contrast,
    draw_gallery,
    report_files,
    worst_mistakes,
    write_report,
)


def test_worst_mistakes_are_wrong_and_the_surest_first():
    logits = torch.tensor([[9.0, 0.0], [0.0, 1.0], [0.0, 5.0], [3.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 0, 0, 1, 1])  # the first and the last are right
    assert worst_mistakes(logits, labels, 2).tolist() == [2, 3]
    assert worst_mistakes(logits, labels, 10).tolist() == [2, 3, 1]
    assert worst_mistakes(logits, logits.argmax(dim=1), 10).tolist() == []


@pytest.fixture(scope="module")
def mistakes() -> tuple[Classifier, ImageSet]:
    """A classifier of grey images that are not square, and images it classifies."""
    classifier = grey_classifier()
    for parameter in classifier.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images = torch.randint(256, (3, 1, 16, 24), dtype=torch.uint8)
    return classifier, ImageSet(images, torch.tensor([0, 1, 2]), classifier.classes)


def test_relevance_for_predicted_and_true_class_has_one_unit(mistakes):
    """So their difference is the relevance of the difference of the two logits."""
    classifier, images = mistakes
    inputs = classifier.normalize(images.pixels())
    logits = classifier.forward(inputs)
    maps = contrast(classifier, images.pixels(), logits.argmax(dim=1), images.labels)
    assert maps.shape == (3, 2, 16, 24)
    _, single = classifier.maps(images.pixels(), ["lrp_pixels"])
    torch.testing.assert_close(maps[:, 0], single["lrp_pixels"])
    right = logits.argmax(dim=1) == images.labels
    assert 0 < right.sum() < 3 and torch.equal(maps[right, 0], maps[right, 1])

    def difference(x: Tensor) -> Tensor:
        found = classifier.model(x)
        return (found.max(dim=1).values - found[torch.arange(3), images.labels])[:, None]

    expected = propagate(difference, inputs)[1].sum(dim=1)[~right]
    found = (maps[:, 0] - maps[:, 1])[~right]
    units = expected.norm(dim=(1, 2), keepdim=True) / found.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(units * found, expected, rtol=1e-3, atol=1e-4)


def test_gallery_shows_both_classes_and_leaves_out_maps_that_do_not_exist(mistakes, monkeypatch):
    classifier, images = mistakes
    logits = classifier.logits(images.pixels())
    with_maps = draw_gallery(classifier, images, logits)
    assert with_maps.shape == (192, 3 * 360 + 12 + BAR, 3)
    swapped = draw_gallery(classifier, replace(images, labels=images.labels.flip(0)), logits)
    changed = np.argwhere((swapped != with_maps).any(-1))
    assert changed[:, 1].min() < 124  # the caption of the first image and its last map
    first = changed[changed[:, 1] < 360]
    assert first[:, 1].max() > 248 and not ((first[:, 1] >= 130) & (first[:, 1] < 248)).any()
    monkeypatch.setattr(Classifier, "has_maps", False)
    assert draw_gallery(classifier, images, logits).shape == (177, 3 * 124 + 12, 3)


def test_a_folder_with_a_part_of_a_report_takes_the_next_one(
    mistakes: tuple[Classifier, ImageSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vit.reporting.report.picture_tag", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(*mistakes, tmp_path, step=1)
    assert report_files(tmp_path)
    _require_own_report(tmp_path)  # raises nothing
