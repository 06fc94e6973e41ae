"""The models that come along: read by name, from anywhere, without data, and as good as stated."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit.checkpoint import SHIPPED, load_model
from vit.config import from_dict, to_dict
from vit.data.datasets import load, normalization
from vit.evaluation import predict

ROOT = Path(__file__).resolve().parent.parent
CIFAR = ROOT / "data" / "cifar-10-batches-py"
needs_cifar = pytest.mark.skipif(not CIFAR.exists(), reason="data/cifar-10-batches-py is missing")


def test_quick_model_is_small_and_carries_its_config():
    assert (SHIPPED / "cifar10_quick.safetensors").stat().st_size < 3e6
    saved = load_model(Path("cifar10_quick"))
    assert saved.path == SHIPPED / "cifar10_quick.safetensors"
    assert saved.config == from_dict(to_dict(saved.config)) and saved.config.data.name == "cifar10"
    assert saved.classes[8] == "ship" and len(saved.classes) == 10


@pytest.mark.slow
@needs_cifar
def test_quick_model_is_as_good_as_readme_says():
    saved = load_model(Path("cifar10_quick"))
    test = load("cifar10", ROOT / "data", train=False, download=False)
    logits = predict(saved.model, test.images, *normalization("cifar10", torch.device("cpu")))
    accuracy = (logits.argmax(dim=1) == test.labels).double().mean().item()
    readme = (ROOT / "README.md").read_text()
    (stated,) = re.findall(r"`cifar10_quick` is .*it gets ([\d.]+) % of the test images", readme)
    assert accuracy == pytest.approx(
        float(stated) / 100, abs=5e-4
    )  # other kernels, other roundings


def test_without_data_a_photo_is_named_and_nothing_is_written_beside_the_model(tmp_path):
    draw = np.random.default_rng(0)
    photo = Image.fromarray(draw.integers(256, size=(40, 60, 3), dtype=np.uint8))
    photo.save(tmp_path / "photo.png")
    before = sorted(SHIPPED.iterdir())
    done = subprocess.run(
        [sys.executable, ROOT / "eval.py", "cifar10_quick", "--image", "photo.png"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^  \w+ +[\d.]+%$", done.stdout, re.MULTILINE)) == 5
    overlays = sorted((tmp_path / "runs/cifar10_quick/eval/photos").iterdir())
    assert len(overlays) == 2 and all(str(path.name) in done.stdout for path in overlays)
    assert sorted(SHIPPED.iterdir()) == before


def test_unknown_name_is_refused_with_those_that_are_known(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "eval.py", "cifar10_quik"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "cifar10_quick" in done.stderr
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []
