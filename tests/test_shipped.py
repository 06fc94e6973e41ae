"""The bundled models load by name from any folder and reach the stated accuracy."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

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


@pytest.mark.slow
def test_without_data_a_photo_is_named_and_nothing_is_written_beside_the_model(tmp_path):
    draw = np.random.default_rng(0)
    photo = Image.fromarray(draw.integers(256, size=(40, 60, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    before = sorted(BUNDLED.iterdir())
    done = subprocess.run(
        [sys.executable, ROOT / "eval.py", "cifar10_quick", "photo", "photo.png"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^  \w+ +[\d.]+%$", done.stdout, re.MULTILINE)) == 5
    (written,) = (tmp_path / "runs/cifar10_quick/eval/photos").iterdir()
    assert f"wrote {written.relative_to(tmp_path)}" in done.stdout
    assert sorted(BUNDLED.iterdir()) == before
