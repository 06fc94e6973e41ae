"""Images of another size and with one channel pass through training and every kind of map."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import vit
from small_runs import small
from vit.config import EvalConfig
from vit.data import datasets
from vit.data.specs import DATASETS, DatasetSpec
from vit.model_file import load_model
from vit.reporting.attention import explain_run
from vit.reporting.comparison import compare_runs
from vit.reporting.photos import classify_photos
from vit.reporting.report import evaluate_run
from vit.training.trainer import train

GREY = DatasetSpec((16, 24), (0.5,), (0.3,))


def draw_stripes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw grey images of 16 x 24 pixels: the class is the column of a bright stripe."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 10
    images = torch.randint(100, (count, 1, 16, 24), generator=draw, dtype=torch.uint8)
    masks = torch.zeros(count, 16, 24, dtype=torch.bool)
    for number, label in enumerate(labels.tolist()):
        masks[number, :, 2 * label : 2 * label + 4] = True
    return (images + 150 * masks[:, None]).to(torch.uint8), labels, masks


@pytest.mark.slow
def test_grey_images_that_are_not_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DATASETS, "shapes", GREY)
    monkeypatch.setattr(datasets, "draw_shapes", draw_stripes)
    run = tmp_path / "run"
    config = small(
        run,
        model={"drop_rate": 0, "attn_drop_rate": 0, "proj_drop_rate": 0, "drop_path_rate": 0},
        augment={"erasing": 0, "mixup": 0, "cutmix": 0, "flip": False, "rand_ops": 1},
        train={"epochs": 20, "small_scale": 0.75},
    )
    report = train(config)
    assert report is not None and report["accuracy"] > 0.5  # chance is 0.1
    assert "16 x 24 pixels" in capsys.readouterr().out
    maps = sorted((run / "attention").glob("step_*.npy"))
    assert {np.load(path).shape for path in maps} == {(3, 4, 6)}

    saved = load_model(run, "cpu", "float32")
    assert saved.classifier.preprocess.image_size == (16, 24)
    assert saved.classifier.preprocess.channels == 1
    options = EvalConfig(device="cpu", precision="float32", probes=2)
    again = evaluate_run(str(run), options)
    assert again["accuracy"] == report["accuracy"]
    explain_run(str(run), dataclasses.replace(options, attention=True, faithfulness=20))
    assert np.load(run / "eval/attention/relevance.npy").shape == (2, 4, 6)
    compare_runs(str(run), dataclasses.replace(options, compare=str(run)))
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(256, size=(50, 40, 3), dtype=np.uint8)).save(
        photo
    )
    classify_photos(str(run), dataclasses.replace(options, image=(str(photo),)))
    explanation = vit.load(run, "cpu").explain(photo)
    assert explanation.map.shape == (4, 6)
    assert explanation.sheet().width > 100
