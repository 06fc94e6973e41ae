"""Models of the Hugging Face Hub, in its cache; model cards; included models."""

import dataclasses
import json
import re
import textwrap
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import timm
import torch
import yaml
from huggingface_hub import snapshot_download

import vit
from small_runs import load
from vit.config import Config, to_dict
from vit.data.config import DataConfig
from vit.data.preprocess import Preprocess
from vit.evaluation import report
from vit.hub import FILES
from vit.model.config import ModelConfig
from vit.model_file import BUNDLED, weights_digest
from vit.pretrained.load import load as load_model
from vit.pretrained.sources import find_source
from vit.reporting.loading import load_test
from vit.reporting.model_card import model_card, write_hub
from vit.reporting.tables import metrics_table

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0" * 40


def test_a_model_of_the_hub_is_loaded_from_its_cache_and_exported_by_name(tmp_path, monkeypatch):
    """The files that are downloaded and no others are there, as links to files of other names."""
    saved = load_model("cifar10_quick", "cpu", "float32")
    repository = tmp_path / "models--me--model"
    for folder in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (repository / folder).mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    write_hub(saved, tmp_path / "hub")
    for number, file in enumerate(sorted((tmp_path / "hub").iterdir())):
        if any(map(file.match, FILES)):
            blob = file.rename(repository / f"blobs/{number}")
            (repository / "snapshots" / COMMIT / file.name).symlink_to(blob)
    cache = partial(snapshot_download, cache_dir=tmp_path, local_files_only=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", cache)
    monkeypatch.chdir(tmp_path)
    classifier = vit.load("hf-hub:me/model", "cpu", "float32")
    source = find_source("hf-hub:me/model", ModelConfig())
    for key, value in saved.model.state_dict().items():
        assert torch.equal(classifier.model.state_dict()[key], value), key
        assert torch.equal(source.weights[key], value), key
    assert classifier.run == Path("runs/me-model")
    card = (vit.export(classifier, "hub") / "README.md").read_text()
    assert re.findall("^# (.*)", card, flags=re.MULTILINE) == ["me-model"]
    with pytest.raises(ValueError, match=r"^hf-hub:me/other is not in the cache, and the Hub"):
        vit.load("hf-hub:me/other")
    failed = Mock(side_effect=OSError("404"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", failed)
    with pytest.raises(ValueError, match=r"^hf-hub:me/other cannot be downloaded \(404"):
        vit.load("hf-hub:me/other")


def test_the_card_says_what_was_measured_and_no_paths(tmp_path):
    saved = load_model("cifar10_quick", "cpu", "float32")
    data = dataclasses.replace(saved.config.data, root="/home/ada/photos")
    config = dataclasses.replace(saved.config, data=data, out="/home/ada/runs/quick")
    saved = dataclasses.replace(saved, config=config, home=tmp_path)
    (tmp_path / "eval").mkdir()
    result = report(torch.eye(10), torch.arange(10), saved.classes) | {"images_per_second": 1.0}

    def card(**changes: Any) -> str:
        (tmp_path / "eval/report.json").write_text(json.dumps(result | changes))
        return model_card(saved)

    assert "Not measured." not in card()
    write_hub(saved, tmp_path / "hub")
    assert b"/home/ada" not in b"".join(file.read_bytes() for file in (tmp_path / "hub").iterdir())
    _, metadata, text = (tmp_path / "hub/README.md").read_text().split("---\n", 2)
    (measured,) = yaml.safe_load(metadata)["model-index"][0]["results"]
    assert measured["metrics"] == [{"type": "accuracy", "value": 1.0}]
    assert measured["dataset"]["name"] == "cifar10"
    assert textwrap.indent(metrics_table(result), "    ") in text
    assert f"{saved.step:,} optimizer steps on `cifar10`" in text
    assert "Not measured." in card(flip=True)  # not as the code in the card classifies
    assert "Not measured." in card(weights="0")  # of another model in this folder
    assert "Not measured." not in card(weights=weights_digest(saved.model))
    assert "A Vision Transformer with" in text and "classifier.explain" in text
    config = dataclasses.replace(config, model=ModelConfig(name="timm:test_resnet"))
    network = timm.create_model("test_resnet", num_classes=10).eval()
    text = model_card(dataclasses.replace(saved, model=network, config=config))
    assert "A test_resnet with" in text and "explain" not in text and "Transformer" not in text


# Bundled models.


CIFAR = ROOT / "data" / "cifar-10-batches-py"
needs_cifar = pytest.mark.skipif(not CIFAR.exists(), reason="data/cifar-10-batches-py is missing")


@pytest.mark.parametrize("name", ["cifar10", "cifar10_quick"])
def test_included_models_are_small_and_carry_their_config_and_test_images(
    name, tmp_path, monkeypatch, capsys
):
    assert (BUNDLED / f"{name}.safetensors").stat().st_size < 4e6
    saved, same = load_model(name, "cpu", "float32"), load_model(Path(name))
    assert saved.path == same.path and saved.name == name
    assert saved.run == Path("runs/included") / name and saved.finished
    assert saved.path == BUNDLED / f"{name}.safetensors"
    assert saved.config == Config(**to_dict(saved.config)) and saved.config.data.name == "cifar10"
    assert saved.classes[8] == "ship" and len(saved.classes) == 10
    assert saved.preprocess == Preprocess.from_config(DataConfig(name="cifar10"))
    assert (saved.calibration is not None) == (name == "cifar10")
    monkeypatch.chdir(tmp_path)
    test = load_test(saved)
    right = saved.logits(test).argmax(dim=1) == test.labels
    assert len(test) == 8 and right.sum() >= 7
    assert "only the 8 test images" in capsys.readouterr().err


@needs_cifar
def test_included_test_images_are_those_of_the_data_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = load_model("cifar10", "cpu", "float32")
    test = load_test(saved)
    (tmp_path / "data").symlink_to(ROOT / "data")
    everything = load_test(saved)
    assert len(everything) == 10_000
    same = everything.select(torch.tensor(test.origins))
    assert torch.equal(test.pixels(), same.pixels())
    assert torch.equal(test.labels, same.labels)


@pytest.mark.slow
@needs_cifar
@pytest.mark.parametrize("name", ["cifar10", "cifar10_quick"])
def test_included_models_are_as_good_as_readme_says(name):
    classifier = load_model(name, precision="float32")
    test = load("cifar10", ROOT / "data", train=False, download=False)
    logits = classifier.logits(test.images).cpu()
    accuracy = (logits.argmax(dim=1) == test.labels).double().mean().item()
    readme = (ROOT / "README.md").read_text()
    (stated,) = re.findall(rf"`{name}`\s+by the [^()]*recipe[^()]*\(([\d.]+)%", readme)
    # Other kernels round differently.
    assert accuracy == pytest.approx(float(stated) / 100, abs=5e-4)
