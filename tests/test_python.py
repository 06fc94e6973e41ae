"""The package from Python: what `vit` offers is what the commands call."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vit
from vit.data.datasets import load
from vit.reporting.config import ReportConfig
from vit.reporting.report import evaluate_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, which is trained by what a user types."""
    out = tmp_path_factory.mktemp("python") / "run"
    config = vit.Config(
        out=str(out),
        data={"name": "shapes", "train_size": 256, "val_size": 32},
        model={"embed_dim": 24, "depth": 1, "num_heads": 2, "patch_size": 8},
        train={"epochs": 1, "device": "cpu", "precision": "float32"},
        track={"probes": 0},
    )
    report = vit.train(config)
    assert json.loads((out / "eval/report.json").read_text())["loss"] == report["loss"]
    return out


def test_every_name_of_the_package_is_imported_when_it_is_used() -> None:
    for name in vit.__all__:
        assert getattr(vit, name) is getattr(importlib.import_module(vit._MODULES[name]), name)
    assert {*vit.__all__} <= {*dir(vit)}


@pytest.mark.slow
def test_evaluate_gives_the_report_of_the_command(run: Path, tmp_path: Path) -> None:
    classifier = vit.load(run, "cpu", "float32")
    options = ReportConfig(out=str(tmp_path), device="cpu", precision="float32")
    expected = evaluate_run(str(run), options)
    test = load("shapes", "", train=False)
    for found in (classifier.evaluate(), classifier.evaluate(test)):
        assert (found["n"], found["loss"]) == (2000, pytest.approx(expected["loss"], rel=1e-6))
    few = classifier.evaluate(test.select(torch.arange(10)), batch_size=3)
    assert few["n"] == 10


@pytest.mark.slow
def test_export_is_that_of_the_command(run: Path, tmp_path: Path) -> None:
    classifier = vit.load(run)
    file = classifier.export("torch", tmp_path)
    assert file == tmp_path / "model.pt2" and file.is_file()
    assert (tmp_path / "preprocess.py").is_file()
    with pytest.raises(ValueError, match=r"^formats: tmim is not .* must be 'timm', 'onnx'"):
        classifier.export("tmim")
    with pytest.raises(ValueError, match=r"^only for a model that vit.load has loaded$"):
        replace(classifier, file=None).export("torch")


def test_a_classifier_is_printed_in_a_line() -> None:
    shown = str(vit.load("cifar10_quick", "cpu", "float32"))
    assert shown.startswith("Classifier(VisionTransformer, 10 classes, 32x32 pixels, 3 ")
