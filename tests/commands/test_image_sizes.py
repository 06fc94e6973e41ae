"""Images of other sizes and channels pass through training, the report and every kind of map."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from small_runs import NO_DROPOUT, load, small
from vit.commands.config import MapsConfig
from vit.commands.maps import run as explain_run
from vit.commands.train import train
from vit.data.config import DataConfig
from vit.data.datasets import load_training
from vit.data.preprocess import Preprocess

CLASSES = ("bottom", "middle", "top")


def save_stripes(root: Path, channels: int, train: int, test: int) -> Path:
    """Save images of 24 x 48 pixels whose class is the row of a bright stripe; return one."""
    for number in range(3 * (train + test)):
        label, part = number % 3, "train" if number < 3 * train else "test"
        pixels = np.random.default_rng(number).integers(100, size=(24, 48, channels))
        pixels[8 * label : 8 * label + 8] += 150
        path = root / part / CLASSES[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.squeeze(pixels.astype(np.uint8))).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "size", "fit", "augment"),
    [
        (1, (16, 24), "squash", {"crop": "resized", "crop_scale": (0.7, 1.0)}),
        (4, (24, 16), "pad", {}),
    ],
)
def test_other_sizes_and_channels_work_from_training_to_maps(
    channels, size, fit, augment, tmp_path, capsys
):
    photo = save_stripes(tmp_path / "images", channels, train=24, test=8)
    folder, grid = tmp_path / "run", (size[0] // 4, size[1] // 4)
    config = small(
        folder,
        data={
            "name": "folder", "root": str(tmp_path / "images"), "image_size": size,
            "channels": channels, "fit": fit, "val_size": 12, "train_size": None,
        },
        model=NO_DROPOUT,
        augment={
            "erasing": 0, "mixup": 0, "cutmix": 0, "rand_ops": 1, "rand_magnitude": 3, **augment
        },
        train={"epochs": 8, "batch_size": 20, "small_scale": 0.75},
    )  # fmt: skip
    report = train(config)
    assert report is not None and report["accuracy"] > 0.6  # chance is 0.33
    assert f"{size[0]} x {size[1]} pixels" in capsys.readouterr().out
    explain_run(str(folder), MapsConfig(device="cpu", probes=2, faithfulness=20))
    assert np.load(folder / "eval/attention/relevance.npy").shape == (2, *grid)
    classifier = vit.load(folder, "cpu")
    preprocess = classifier.preprocess
    found = (preprocess.image_size, preprocess.channels, preprocess.fit)
    assert found == (size, channels, fit)
    explanation = classifier.explain(photo)
    assert explanation.map.shape == grid and explanation.sheet().width > 100


def test_training_images_are_stored_larger_for_resized_crops(tmp_path):
    save_stripes(tmp_path, channels=3, train=4, test=4)
    exact = Preprocess((14, 28), (0.5,) * 3, (0.5,) * 3)
    data = DataConfig(name="folder", root=str(tmp_path), val_size=3)
    training, held_out = load_training(data, 0, exact, exact.stored())
    assert training.images.shape == (9, 3, 16, 32) and held_out.images.shape == (3, 3, 14, 28)
    same, same_held_out = load_training(data, 0, exact)
    assert torch.equal(same.labels, training.labels)
    assert torch.equal(same_held_out.images, held_out.images)


def test_masks_are_resized_with_their_images():
    original = load("shapes", "", train=False, count=20)
    wanted = Preprocess.from_config(DataConfig(name="shapes", image_size=64))
    larger = load("shapes", "", train=False, count=20).resized(wanted)
    assert larger.images.shape == (20, 3, 64, 64)
    assert torch.equal(larger.masks, original.masks.repeat_interleave(2, 1).repeat_interleave(2, 2))
