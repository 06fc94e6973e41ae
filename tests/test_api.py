"""The Python API returns what the commands do; its signatures are pinned."""

import dataclasses
from pathlib import Path

import pytest
import torch

import public_api
import vit
from models import save_untrained
from small_runs import load
from vit.commands.config import ReportConfig
from vit.commands.report import run as evaluate_run

pytestmark = pytest.mark.usefixtures("few_test_images")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"embed_dim": 24, "depth": 1, "num_heads": 2, "patch_size": 8}
    return save_untrained(tmp_path_factory.mktemp("python"), model)


def test_evaluate_gives_the_report_of_the_command(run, tmp_path):
    classifier = vit.load(run, "cpu", "float32")
    options = ReportConfig(out=str(tmp_path), device="cpu", precision="float32")
    expected = evaluate_run(str(run), options)
    test = load("shapes", "", train=False)
    for found in (vit.evaluate(classifier), vit.evaluate(classifier, test)):
        assert (found["n"], found["loss"]) == (200, pytest.approx(expected["loss"], rel=1e-6))
    assert vit.evaluate(classifier, test.select(torch.arange(10)), batch_size=3)["n"] == 10
    with pytest.raises(ValueError, match=r"^classes: .* those of the model, in its order"):
        vit.evaluate(classifier, dataclasses.replace(test, classes=test.classes[::-1]))


def test_exports_are_written_where_results_belong_or_refused(tmp_path, monkeypatch):
    classifier = dataclasses.replace(vit.load("cifar10_quick", "cpu"), home=tmp_path)
    monkeypatch.setattr("vit.commands.export._export", lambda _, name, draft: draft.touch() or name)
    assert vit.export(classifier, "onnx") == tmp_path / "export/model.onnx"  # not in a cache
    assert vit.export(classifier, "onnx", tmp_path / "here") == tmp_path / "here/model.onnx"
    assert (tmp_path / "here/preprocess.py").is_file()
    with pytest.raises(ValueError, match=r"^formats: tmim is not .* must be 'timm', 'onnx'"):
        vit.export(classifier, "tmim")
    classifier.model.train()
    with pytest.raises(ValueError, match=r"training mode"):
        vit.export(classifier, "torch")
    classifier.model.eval()
    fields = (field.name for field in dataclasses.fields(vit.Classifier))
    plain = vit.Classifier(**{name: getattr(classifier, name) for name in fields})
    with pytest.raises(ValueError, match=r"^classifier: .* that vit.load has loaded$"):
        vit.export(plain, "torch")


def test_a_classifier_is_printed_in_a_line():
    shown = str(vit.load("cifar10_quick", "cpu", "float32"))
    assert shown.startswith("Classifier(VisionTransformer, 10 classes, 32x32 pixels, 3 ")


def test_a_config_takes_paths():
    assert vit.Config(out=Path("runs/x"), data={"root": Path("~")}).out == str(Path("runs/x"))


def test_signatures_and_the_api_page_are_up_to_date():
    assert {*vit.__all__} <= {*dir(vit)}
    command = "if the change is intended, run python tests/public_api.py"
    assert public_api.signatures() == public_api.SIGNATURES.read_text(encoding="utf-8"), command
    assert public_api.page() == public_api.PAGE.read_text(encoding="utf-8"), command
