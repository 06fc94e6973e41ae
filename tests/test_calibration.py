"""Calibration: the temperature, its intervals, sets of classes, and where they are used."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from scipy.stats import betabinom, binom
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

import vit
from small_runs import draw_pictures, rows_of, small
from vit.calibration import Calibration, fit_temperature, set_scores
from vit.commands.config import ReportConfig
from vit.commands.report import run as evaluate_run
from vit.commands.train import calibrate, train
from vit.data.datasets import load_training
from vit.data.images import ImageSet
from vit.evaluation import intervals
from vit.model_file import save_model
from vit.pretrained.load import load as load_model
from vit.reporting.calibration import make_sets, measure_sets, sets_table
from vit.reporting.loading import load_test

pytestmark = pytest.mark.usefixtures("few_test_images")


def draw(
    count: int, classes: int, random: torch.Generator, scale: float = 1.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of a model, right on about 55% of images at a scale of 1.5, labels, fractions.

    The softmax of the logits by the scale is the true distribution of the labels.
    """
    logits = 2 * torch.randn(count, classes, generator=random)
    labels = torch.multinomial((logits / scale).softmax(dim=1), 1, generator=random).squeeze(1)
    return logits, labels, torch.rand(count, generator=random)


def draw_calibrated(count: int) -> tuple[Tensor, Tensor]:
    """Return logits of a calibrated model, and the labels."""
    return draw(count, 10, torch.Generator().manual_seed(0), scale=1)[:2]


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_temperature_is_that_of_a_grid_search(scale):
    logits, labels = draw_calibrated(2000)
    grid = np.geomspace(0.1, 10, 501)
    losses = [F.cross_entropy(scale * logits.double() / t, labels).item() for t in grid]
    found = fit_temperature(scale * logits, labels)
    assert found == pytest.approx(grid[np.argmin(losses)], rel=0.01)  # between two of the grid
    assert F.cross_entropy(scale * logits.double() / found, labels) < min(losses) + 1e-6
    assert found == pytest.approx(scale, rel=0.05)


def test_temperature_is_finite_without_mistakes_and_without_hits():
    labels = torch.arange(98) % 4
    certain = 7 * F.one_hot(labels, 4).float()
    confidence = (certain / fit_temperature(certain, labels)).softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(confidence, torch.full((98,), 0.99 + 0.01 / 4))
    assert fit_temperature(-certain, labels) == pytest.approx(100)


def test_interval_of_loss_is_that_of_a_mean():
    logits, labels = draw_calibrated(1000)
    losses = F.cross_entropy(logits, labels, reduction="none")
    half = 1.96 * losses.std().item() / 1000**0.5
    mean = losses.mean().item()
    expected = pytest.approx((mean - half, mean + half), abs=0.15 * half)
    assert intervals(logits, labels)["loss_95"] == expected


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_interval_of_calibration_error_contains_the_true_one(scale):
    """Percentiles of bootstrap samples would never contain the 0 of a calibrated model."""
    logits, labels = draw_calibrated(50_000)
    error = multiclass_calibration_error(scale * logits, labels, 10).item() if scale > 1 else 0
    hits = 0
    for part, of_part in list(zip(logits.split(400), labels.split(400), strict=True))[:25]:
        low, high = intervals(scale * part, of_part)["ece_95"]
        hits += low <= error <= high
    assert hits >= 21  # 95% of 25 is 23.75


# In a run.


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run whose weights are moving averages."""
    out = tmp_path_factory.mktemp("calibration") / "run"
    train(small(out, train={"epochs": 1}, track={"probes": 0, "milestones": 1}))
    return out


def test_saved_weights_are_calibrated_on_held_out_images(run):
    saved = load_model(run, "cpu", "float32")
    _, held_out = load_training(saved.config.data, saved.config.train.seed)
    logits = saved.logits(held_out.pixels())
    assert saved.calibration == Calibration.fit(logits, held_out.labels)
    assert saved.calibration.temperature != 1
    none = held_out.select(torch.arange(0))
    assert calibrate(replace(saved, calibration=None), none).calibration is None


def test_report_and_predictions_use_the_temperature(run, tmp_path, capsys):
    saved = load_model(run, "cpu", "float32")
    classifier, test = saved, load_test(saved)
    logits = classifier.logits(test.pixels())
    temperature = classifier.calibration.temperature
    trained = json.loads((run / "eval/report.json").read_text())
    same = {"device": "cpu", "precision": "float32"}
    options = ReportConfig(out=str(tmp_path), coverage=0.9, **same)
    evaluate_run(str(run), options)
    printed = capsys.readouterr().out
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["calibration"] == trained["calibration"]
    assert again.keys() - trained.keys() == {"sets"}
    assert "LAC coverage" in printed
    rows = rows_of(tmp_path / "predictions.csv")
    for kind in ("lac", "raps"):
        sets = [row[f"set_{kind}"].split("|") for row in rows]
        hits = [row["label"] in inside for row, inside in zip(rows, sets, strict=True)]
        found = again["sets"][kind][0]
        assert found["coverage"] == pytest.approx(np.mean(hits))
        assert found["size"] == pytest.approx(np.mean([len(inside) for inside in sets]))
    with pytest.raises(ValueError, match=r"^coverage: 0\.99 is not allowed; .* at most 0\.983"):
        evaluate_run(str(run), replace(options, coverage=0.99))
    expected = {"as trained": 1.0, "calibrated": temperature}
    assert trained["calibration"].keys() == expected.keys()
    for name, scale in expected.items():
        found = trained["calibration"][name]
        assert f"{found['loss']:.4f} (" in printed and f"{found['ece']:.4f} (" in printed
        assert found["temperature"] == scale
        assert found["loss"] == pytest.approx(F.cross_entropy(logits / scale, test.labels).item())
        ece = multiclass_calibration_error(logits / scale, test.labels, 10, n_bins=15).item()
        assert found["ece"] == pytest.approx(ece, abs=1e-5)
    assert trained["accuracy"] == (logits.argmax(dim=1) == test.labels).double().mean().item()
    opened = vit.load(run, "cpu", "float32")
    photo = test.pixels()[0].movedim(0, -1).numpy()
    best = (logits[0] / temperature).softmax(dim=0).topk(5).values.tolist()
    for found in (opened.predict(photo), opened.explain(photo).probabilities):
        assert list(found.values())[:5] == pytest.approx(best, rel=1e-5)


# Sets of classes.


def test_scores_are_those_of_the_papers():
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


@pytest.mark.parametrize("classes", [2, 10])
def test_lac_sets_are_those_of_mapie_with_the_most_probable_class(classes):
    """MAPIE leaves some sets empty."""
    mapie = pytest.importorskip("mapie.classification")
    inputs, labels = make_classification(1200, n_informative=8, n_classes=classes, random_state=0)
    model = LogisticRegression().fit(inputs[:300], labels[:300])
    logits = torch.from_numpy(model.predict_log_proba(inputs))
    calibration = Calibration.fit(logits[300:800], torch.from_numpy(labels[300:800]))
    best = np.eye(classes, dtype=bool)[model.predict(inputs[800:])]
    for coverage in (0.8, 0.9, 0.95):
        oracle = mapie.SplitConformalClassifier(model, confidence_level=coverage)
        oracle.conformalize(inputs[300:800], labels[300:800])
        expected = oracle.predict_set(inputs[800:])[1][..., 0] | best
        found = calibration.sets(logits[800:], torch.rand(400), coverage)["lac"]
        np.testing.assert_array_equal(found.numpy(), expected)


def test_coverage_and_familiarity_have_their_exact_distribution():
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


def test_familiarity_of_many_is_from_quantiles_and_of_good_models_sets_have_one_class():
    """For fewer it is exact, see the test of coverage."""
    labels = torch.arange(100) % 5
    logits = 3 * F.one_hot(labels, 5) + 0.1 * torch.rand(100, 5)
    for inside in Calibration.fit(logits, labels).sets(logits, torch.rand(100), 0.8).values():
        assert (inside.sum(dim=1) == 1).all()
    logits, labels, _ = draw(5000, 6, torch.Generator().manual_seed(0))
    calibration, others = Calibration.fit(logits, labels), logits[:50] / 2
    energies, found = np.exp(logits.double().numpy()).sum(1), np.exp(others.double().numpy()).sum(1)
    expected = [(energies <= one).mean() for one in found]
    assert len(calibration.energies) == 1000
    np.testing.assert_allclose(calibration.familiarity(others), expected, atol=2e-3)


def test_table_counts_coverage_and_classes():
    logits, labels, uniform = draw(300, 10, torch.Generator().manual_seed(1))
    labels[labels == 9] = 8  # a class without images
    calibration = Calibration.fit(logits, labels)
    classifier = replace(load_model("cifar10_quick", "cpu"), calibration=calibration)
    images = ImageSet(torch.zeros(300, 3, 32, 32, dtype=torch.uint8), labels, classifier.classes)
    measured = measure_sets(make_sets(classifier, logits, uniform, 0.9), images)
    inside = calibration.sets(logits, uniform, 0.9)["lac"].numpy()
    hits, sizes = inside[np.arange(300), labels], inside.sum(axis=1)
    for rows, found in zip((slice(None), labels == 3), measured["lac"][::4], strict=False):
        assert found["coverage"] == pytest.approx(hits[rows].mean())
        assert found["size"] == pytest.approx(sizes[rows].mean())
        half = stats.t.ppf(0.975, len(sizes[rows]) - 1) * stats.sem(sizes[rows])
        assert found["size_95"] == pytest.approx((found["size"] - half, found["size"] + half), 1e-3)
    assert [row["class"] for row in measured["lac"]] == ["all", *classifier.classes[:9]]
    lines = sets_table(measured, 0.9).splitlines()
    assert len(lines) == 1 + 1 + (1 + 9) + 1
    assert lines[2].startswith("all ") and f" {hits.mean():.1%} (" in lines[2]


def test_predict_writes_sets_that_do_not_depend_on_other_photos(tmp_path, call):
    saved = load_model("cifar10_quick", "cpu", "float32")
    logits, labels, _ = draw(99, 10, torch.Generator().manual_seed(0))
    calibrated = replace(saved, calibration=Calibration.fit(logits, labels))
    save_model(tmp_path / "model.safetensors", calibrated, saved.config, saved.step)
    draw_pictures(tmp_path / "photos", 4, [""])
    columns = []
    for photos in (tmp_path / "photos", tmp_path / "photos/3.png"):
        assert call(tmp_path, "predict", photos, "--coverage", "0.95").code == 0
        columns.append(rows_of(tmp_path / "eval/photos.csv"))
    (several, (alone,)) = columns
    shown = torch.stack([saved.preprocess.resize(tmp_path / "photos/3.png")])
    familiarity = Calibration.fit(logits, labels).familiarity(saved.logits(shown))
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
        ("cifar10_quick", ("0.9",), "coverage: the model is not calibrated: it is a"),
        (tmp_path, ("0.995",), "coverage: 0.995 is not allowed; it must be at most 0.99 for a"),
        (tmp_path, ("0.9", "--flip"), "coverage: not together with --flip"),
        (tmp_path, ("1.5",), "coverage: 1.5 is not allowed; it must be"),
    ]:
        ended = call(model, "predict", tmp_path / "photos", "--coverage", *flags)
        assert ended.code == 2 and message in ended.error
