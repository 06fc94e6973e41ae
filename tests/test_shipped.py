"""The bundled models load by name from any folder and reach the stated accuracy."""

import re
from pathlib import Path

import pytest
from PIL import Image

from command_line import Call
from vit.data.config import DataConfig
from vit.data.datasets import load
from vit.data.preprocess import Preprocess
from vit.model_file import BUNDLED, load_model
from vit.training.config import from_dict, to_dict

ROOT = Path(__file__).resolve().parent.parent
CIFAR = ROOT / "data" / "cifar-10-batches-py"
needs_cifar = pytest.mark.skipif(not CIFAR.exists(), reason="data/cifar-10-batches-py is missing")


def test_quick_model_is_small_and_carries_its_config():
    assert (BUNDLED / "cifar10_quick.safetensors").stat().st_size < 3e6
    saved, same = load_model("cifar10_quick"), load_model(Path("cifar10_quick"))
    assert saved.path == same.path and saved.name == "cifar10_quick"
    assert saved.run == Path("runs/cifar10_quick") and saved.finished
    assert saved.path == BUNDLED / "cifar10_quick.safetensors"
    assert saved.config == from_dict(to_dict(saved.config)) and saved.config.data.name == "cifar10"
    classes = saved.classifier.classes
    assert classes[8] == "ship" and len(classes) == 10
    assert saved.classifier.preprocess == Preprocess.from_config(DataConfig(name="cifar10"))


@pytest.mark.slow
@needs_cifar
def test_quick_model_is_as_good_as_readme_says():
    classifier = load_model("cifar10_quick", precision="float32").classifier
    test = load("cifar10", ROOT / "data", train=False, download=False)
    logits = classifier.logits(test.images).cpu()
    accuracy = (logits.argmax(dim=1) == test.labels).double().mean().item()
    readme = (ROOT / "README.md").read_text()
    (stated,) = re.findall(r"`cifar10_quick` is[^.]*; it reaches ([\d.]+)%\s+test", readme)
    # Other kernels round differently.
    assert accuracy == pytest.approx(float(stated) / 100, abs=5e-4)


def test_a_photo_is_named_and_nothing_is_written_beside_the_model(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((60, 40), 100).save("photo.png")
    before = sorted(BUNDLED.iterdir())
    ended = call("cifar10_quick", "photo", "photo.png")
    assert len(re.findall(r"^  \w+ +[\d.]+%$", ended.out, re.MULTILINE)) == 5
    (written,) = Path("runs/cifar10_quick/eval/photos").iterdir()
    assert f"wrote {written}" in ended.out
    assert sorted(BUNDLED.iterdir()) == before
