"""Sets of classes: their scores, how often they contain the true class, and predict's columns."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import betabinom, binom
from torch import Tensor

from command_line import Call
from vit.calibration import Calibration, set_scores
from vit.data.images import ImageSet
from vit.model_file import load_model, save_model
from vit.reporting.calibration import measure_sets, sets_table


def draw(count: int, classes: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of a model that is right on about 55% of images, labels, and fractions."""
    logits = 2 * torch.randn(count, classes, generator=random)
    labels = torch.multinomial((logits / 1.5).softmax(dim=1), 1, generator=random).squeeze(1)
    return logits, labels, torch.rand(count, generator=random)


def test_scores_are_those_of_the_papers() -> None:
    logits, _, uniform = draw(20, 8, torch.Generator().manual_seed(0))
    found = set_scores(logits, uniform)
    for image, row in enumerate(logits.double().numpy()):
        p = np.exp(row) / np.exp(row).sum()
        for label in range(8):
            larger = p[p > p[label]]
            rank, best = len(larger) + 1, len(larger) == 0
            raps = larger.sum() + uniform[image].item() * p[label] + 0.01 * max(0, rank - 5)
            assert found["lac"][image, label].item() == pytest.approx(0 if best else 1 - p[label])
            assert found["raps"][image, label].item() == pytest.approx(0 if best else raps)


def test_coverage_and_familiarity_have_their_exact_distribution() -> None:
    """The number of images is beta-binomial, over held-out and test images.

    A set contains the true class; a familiarity, a p-value, is at most 6 / (N + 1).
    """
    held_out, images, coverage, splits = 119, 200, 0.9, 200
    random = torch.Generator().manual_seed(0)
    counts: dict[str, list[int]] = {"lac": [], "raps": [], "familiarity": []}
    for _ in range(splits):
        logits, labels, uniform = draw(held_out + images, 6, random)
        calibration = Calibration.fit(logits[:held_out], labels[:held_out])
        for kind, inside in calibration.sets(
            logits[held_out:], uniform[held_out:], coverage
        ).items():
            assert inside.any(dim=1).all()
            counts[kind].append(int(inside.gather(1, labels[held_out:, None]).sum()))
        low = calibration.familiarity(logits[held_out:]) <= 6 / (held_out + 1)
        counts["familiarity"].append(int(low.sum()))
    for kind, rank in (("lac", 108), ("raps", 108), ("familiarity", 6)):  # 108: 0.9 x 120
        expected = betabinom(images, rank, held_out + 1 - rank)
        error = 3 * expected.std() / splits**0.5
        assert np.mean(counts[kind]) == pytest.approx(expected.mean(), abs=error)
        low, high = expected.interval(0.9)
        usual = sum(low <= count <= high for count in counts[kind])
        probability = expected.cdf(high) - expected.cdf(low - 1)
        at_least, at_most = binom(splits, probability).ppf([0.005, 0.995])
        assert at_least <= usual <= at_most


def test_familiarity_of_many_held_out_images_is_from_quantiles() -> None:
    """For fewer it is exact, see the test of coverage."""
    logits, labels, _ = draw(5000, 6, torch.Generator().manual_seed(0))
    calibration, others = Calibration.fit(logits, labels), logits[:50] / 2
    energies, found = np.exp(logits.double().numpy()).sum(1), np.exp(others.double().numpy()).sum(1)
    expected = [(energies <= one).mean() for one in found]
    assert len(calibration.energies) == 1000
    np.testing.assert_allclose(calibration.familiarity(others), expected, atol=2e-3)


def test_a_model_right_often_enough_gets_sets_of_one_class() -> None:
    labels = torch.arange(100) % 5
    logits = 3 * torch.nn.functional.one_hot(labels, 5) + 0.1 * torch.rand(100, 5)
    for inside in Calibration.fit(logits, labels).sets(logits, torch.rand(100), 0.8).values():
        assert (inside.sum(dim=1) == 1).all()


def test_table_counts_coverage_and_classes() -> None:
    logits, labels, uniform = draw(300, 10, torch.Generator().manual_seed(1))
    labels[labels == 9] = 8  # a class without images
    calibration = Calibration.fit(logits, labels)
    classifier = replace(load_model("cifar10_quick", "cpu").classifier, calibration=calibration)
    images = ImageSet(torch.zeros(300, 3, 32, 32, dtype=torch.uint8), labels, classifier.classes)
    measured = measure_sets(classifier, images, logits, 0.9)
    inside = calibration.sets(logits, uniform, 0.9)["lac"].numpy()
    hits, sizes = inside[np.arange(300), labels], inside.sum(axis=1)
    for rows, found in zip((slice(None), labels == 3), measured["lac"][::4], strict=False):
        assert found["coverage"] == pytest.approx(hits[rows].mean())
        assert found["size"] == pytest.approx(sizes[rows].mean())
        half = 1.96 * sizes[rows].std(ddof=1) / len(sizes[rows]) ** 0.5
        assert found["size_95"] == pytest.approx((found["size"] - half, found["size"] + half), 1e-3)
    assert [row["class"] for row in measured["lac"]] == ["all", *classifier.classes[:9]]
    lines = sets_table(measured, 0.9).splitlines()
    assert len(lines) == 1 + 1 + (1 + 9)
    assert lines[2].startswith("all ") and f" {hits.mean():.1%} (" in lines[2]


def test_predict_writes_sets_that_do_not_depend_on_other_photos(tmp_path: Path, call: Call) -> None:
    saved = load_model("cifar10_quick", "cpu", "float32")
    logits, labels, _ = draw(99, 10, torch.Generator().manual_seed(0))
    calibrated = replace(saved.classifier, calibration=Calibration.fit(logits, labels))
    save_model(tmp_path / "model.safetensors", calibrated, saved.config, saved.step)
    (tmp_path / "photos").mkdir()
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(256, size=(32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"photos/{seed}.png")
    columns = []
    for photos in (tmp_path / "photos", tmp_path / "photos/3.png"):
        assert call(tmp_path, "predict", photos, "--coverage", "0.95").code == 0
        with (tmp_path / "eval/photos.csv").open(newline="") as file:
            columns.append(list(csv.DictReader(file)))
    (several, (alone,)) = columns
    shown = torch.stack([saved.classifier.preprocess.resize(tmp_path / "photos/3.png")])
    familiarity = Calibration.fit(logits, labels).familiarity(saved.classifier.logits(shown))
    for row in (several[3], alone):
        assert float(row["familiarity"]) == pytest.approx(familiarity.item(), abs=0.011)
    assert (several[3]["set_lac"], several[3]["set_raps"]) == (alone["set_lac"], alone["set_raps"])
    for row in several:
        best = [row[f"class_{rank}"] for rank in range(1, 6)]
        for kind in ("set_lac", "set_raps"):
            inside = row[kind].split("|")
            assert inside[:5] == best[: len(inside)] and {*inside} <= {*calibrated.classes}
    assert call(tmp_path, "predict", tmp_path / "photos").code == 0  # replaces the table
    for model, flags, message in [
        ("cifar10_quick", ("0.9",), "coverage: the model is not calibrated: no images were held"),
        (tmp_path, ("0.995",), "coverage: 0.995 is not allowed; it must be at most 0.99 for a"),
        (tmp_path, ("0.9", "--flip"), "coverage: not together with --flip"),
        (tmp_path, ("1.5",), "coverage: 1.5 is not allowed; it must be"),
    ]:
        ended = call(model, "predict", tmp_path / "photos", "--coverage", *flags)
        assert ended.code == 2 and message in ended.error
