"""Calibration: the temperature, its intervals, and where it is stored and used."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

import vit
from small_runs import small
from vit.calibration import Calibration, fit_temperature
from vit.data.datasets import load_training
from vit.data.images import ImageSet
from vit.model_file import load_model, save_model
from vit.reporting.calibration import calibration_table, intervals, measure_calibration
from vit.reporting.config import ReportConfig
from vit.reporting.loading import load_test
from vit.reporting.report import evaluate_run
from vit.training.train import calibrate, train


def calibrated_case(count: int, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits whose softmax is the true distribution of the labels, and the labels."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=random)
    return logits, torch.multinomial(logits.softmax(dim=1), 1, generator=random).squeeze(1)


@pytest.mark.parametrize("scale", [0.2, 5.0])
def test_temperature_is_that_of_a_grid_search(scale: float) -> None:
    logits, labels = calibrated_case(2000)
    grid = np.geomspace(0.1, 10, 501)
    losses = [F.cross_entropy(scale * logits.double() / t, labels).item() for t in grid]
    found = fit_temperature(scale * logits, labels)
    assert found == pytest.approx(grid[np.argmin(losses)], rel=0.01)  # between two of the grid
    assert F.cross_entropy(scale * logits.double() / found, labels) < min(losses) + 1e-6
    assert found == pytest.approx(scale, rel=0.05)


def test_temperature_is_finite_without_mistakes_and_without_hits() -> None:
    labels = torch.arange(98) % 4
    certain = 7 * F.one_hot(labels, 4).float()
    confidence = (certain / fit_temperature(certain, labels)).softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(confidence, torch.full((98,), 0.99 + 0.01 / 4))
    assert fit_temperature(-certain, labels) == pytest.approx(100)


def test_interval_of_loss_is_that_of_a_mean() -> None:
    logits, labels = calibrated_case(1000)
    losses = F.cross_entropy(logits, labels, reduction="none")
    half = 1.96 * losses.std().item() / 1000**0.5
    mean = losses.mean().item()
    expected = pytest.approx((mean - half, mean + half), abs=0.15 * half)
    assert intervals(logits, labels)["loss_95"] == expected


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_interval_of_calibration_error_contains_the_true_one(scale: float) -> None:
    """Percentiles of bootstrap samples would never contain the 0 of a calibrated model."""
    logits, labels = calibrated_case(50_000)
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


def test_saved_weights_are_calibrated_on_held_out_images(run: Path) -> None:
    saved = load_model(run, "cpu", "float32")
    _, held_out = load_training(saved.config.data, saved.config.train.seed)
    logits = saved.classifier.logits(held_out.pixels())
    assert saved.classifier.calibration == Calibration.fit(logits, held_out.labels)
    assert saved.classifier.calibration.temperature != 1
    none = held_out.select(torch.arange(0))
    assert calibrate(replace(saved.classifier, calibration=None), none).calibration is None


def test_report_and_predictions_use_the_temperature(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vit.reporting.unfamiliar.bootstrap", lambda *_: [[0.0, 1.0]] * 3)
    saved = load_model(run, "cpu", "float32")
    classifier, test = saved.classifier, load_test(saved)
    logits = classifier.logits(test.pixels())
    temperature = classifier.calibration.temperature
    trained = json.loads((run / "eval/report.json").read_text())
    same = {"device": "cpu", "precision": "float32"}
    options = ReportConfig(out=str(tmp_path), coverage=0.9, unfamiliar="digits", **same)
    evaluate_run(str(run), options)
    printed = capsys.readouterr().out
    again = json.loads((tmp_path / "report.json").read_text())
    assert again["calibration"] == trained["calibration"]
    assert again.keys() - trained.keys() == {"sets", "unfamiliar"}
    assert "LAC coverage" in printed
    (line,) = (line for line in printed.splitlines() if line.startswith("energy "))
    assert f" {again['unfamiliar']['energy']['auroc']:.3f} (" in line
    assert (tmp_path / "unfamiliar.png").exists()
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
    with (run / "eval/predictions.csv").open(newline="") as file:
        row = next(csv.DictReader(file))
    assert float(row["probability"]) == pytest.approx(best[0], rel=1e-5)


def test_model_file_keeps_the_calibration_and_older_ones_have_none(tmp_path: Path) -> None:
    saved = load_model("cifar10_quick", "cpu", "float32")
    assert saved.classifier.calibration is None
    logits, labels = calibrated_case(50)
    calibration = Calibration.fit(3 * logits, labels)
    classifier = replace(saved.classifier, calibration=calibration)
    save_model(tmp_path / "model.safetensors", classifier, saved.config, saved.step)
    assert load_model(tmp_path).classifier.calibration == calibration
    images = ImageSet(torch.zeros(50, 3, 32, 32, dtype=torch.uint8), labels, classifier.classes)
    table = calibration_table(measure_calibration(classifier, images, logits)).splitlines()
    assert len(table) == 3 and f" {calibration.temperature:.3f}   " in table[2]
    table = calibration_table(measure_calibration(saved.classifier, images, logits)).splitlines()
    assert len(table) == 3 and table[2].startswith("not calibrated: no images were held out")
