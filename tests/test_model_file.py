"""Files of earlier versions: what they wrote still loads, and computes what it did."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vit
from models import ONE_BLOCK, save_untrained
from vit.recipes import compose, read_config

VERSIONS = Path(__file__).parent / "versions"


def images() -> torch.Tensor:
    """Three images of smooth colours, from integers alone."""
    image, channel, row, column = torch.meshgrid(
        *(torch.arange(n) for n in (3, 3, 32, 32)), indexing="ij"
    )
    values = row * (5 * image + 2) + column * (3 * channel + 1) + 60 * image
    return (values % 256).to(torch.uint8)


@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_models_and_checkpoints_compute_the_logits_they_did(version):
    for file, logits in json.loads((VERSIONS / version / "logits.json").read_text()).items():
        classifier = vit.load(VERSIONS / version / file, device="cpu", precision="float32")
        torch.testing.assert_close(
            classifier.logits(images()),
            torch.tensor(logits),
            rtol=0,
            atol=1e-5,  # on other processors, sums are rounded differently
        )


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.1", "0.2"])
def test_an_interrupted_run_goes_on(version, tmp_path):
    run, stored = tmp_path / "run", VERSIONS / version
    shutil.copytree(stored, run, ignore=shutil.ignore_patterns("model.safetensors"))
    flags = {"out": str(run), "train": {"processes": "1"}}
    # 0.1 stored neither device nor precision, and drew other random numbers.
    report = vit.train(
        compose([read_config(str(run / "config.yaml"))], flags)[0], allow_changes=version == "0.1"
    )
    assert report is not None and report["n"] == 2000
    weights, expected = (load_file(folder / "model.safetensors") for folder in (run, stored))
    assert weights.keys() == expected.keys()
    if version == "0.2":
        assert all(torch.allclose(weights[k], expected[k], rtol=0, atol=1e-4) for k in expected)


def test_an_included_model_is_found_beside_a_folder_with_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10_quick/train").mkdir(parents=True)
    assert vit.load("cifar10_quick", "cpu").path.name == "cifar10_quick.safetensors"


def test_a_run_may_be_called_like_a_checkpoint(tmp_path: Path) -> None:
    run = save_untrained(tmp_path / "step_1", ONE_BLOCK)
    assert vit.load(run, "cpu").path == run / "model.safetensors"
