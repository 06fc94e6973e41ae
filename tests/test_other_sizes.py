"""Images of other sizes and channels pass through training, the report and every kind of map."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from small_runs import small
from vit.data.config import DataConfig
from vit.data.datasets import load, load_training
from vit.data.preprocess import Preprocess
from vit.model_file import load_model
from vit.reporting.attention import explain_run
from vit.reporting.config import MapsConfig, PhotoConfig
from vit.reporting.photos import classify_photos
from vit.training.train import train

CLASSES = ("bottom", "middle", "top")


def draw_stripe(label: int, channels: int, seed: int) -> np.ndarray:
    """Draw an image of 24 x 48 pixels whose class is the row of a bright stripe."""
    noise = np.random.default_rng(seed).integers(100, size=(24, 48, channels), dtype=np.uint8)
    noise[8 * label : 8 * label + 8] += 150
    return noise


def save(pixels: np.ndarray, path: Path) -> Path:
    """Save an image of one to four channels as PNG; return the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path = path.with_suffix(".png")
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(path)
    return path


RESIZED = {"crop": "resized", "crop_scale": (0.7, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "size", "fit", "augment"),
    [
        (1, (16, 24), "squash", RESIZED),
        (4, (24, 16), "pad", {}),
    ],
)
def test_from_training_to_every_way_to_look(
    channels: int,
    size: tuple[int, int],
    fit: str,
    augment: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for split, count in (("train", 24), ("test", 8)):
        for label, name in enumerate(CLASSES):
            for number in range(count):
                pixels = draw_stripe(label, channels, 100 * label + number + (split == "test"))
                save(pixels, tmp_path / f"images/{split}/{name}/{number}")
    folder = tmp_path / "run"
    config = small(
        folder,
        data={
            "name": "folder", "root": str(tmp_path / "images"), "image_size": size,
            "channels": channels, "fit": fit, "val_size": 12, "train_size": None,
        },
        model={"drop_rate": 0, "attn_drop_rate": 0, "proj_drop_rate": 0, "drop_path_rate": 0},
        augment={
            "erasing": 0, "mixup": 0, "cutmix": 0, "flip": True, "rand_ops": 1,
            "rand_magnitude": 3, **augment,
        },
        train={"epochs": 8, "batch_size": 20, "small_scale": 0.75},
    )  # fmt: skip
    report = train(config)
    assert report is not None and report["accuracy"] > 0.6  # chance is 0.33
    assert f"{size[0]} x {size[1]} pixels" in capsys.readouterr().out
    maps, grid = sorted((folder / "attention").glob("step_*.npy")), (size[0] // 4, size[1] // 4)
    assert {np.load(path).shape for path in maps} == {(3, *grid)}

    preprocess = load_model(folder, "cpu", "float32").classifier.preprocess
    assert (preprocess.image_size, preprocess.channels) == (size, channels)
    assert preprocess.fit == fit
    common = {"device": "cpu", "precision": "float32"}
    explain_run(str(folder), MapsConfig(**common, probes=2, faithfulness=20))
    assert np.load(folder / "eval/attention/relevance.npy").shape == (2, *grid)
    photo = save(draw_stripe(1, channels, seed=999), tmp_path / "photo")
    classify_photos(str(folder), PhotoConfig(**common, photos=(str(photo),)))
    assert len(list(folder.glob("eval/photos/photo_*_sheet.png"))) == 1
    classifier = vit.load(folder, "cpu")
    explanation = classifier.explain(photo)
    assert explanation.map.shape == grid
    assert explanation.sheet().width > 100


def test_training_images_are_stored_larger_for_resized_crops(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label, name in enumerate(CLASSES):
            for number in range(4):
                save(draw_stripe(label, 3, number), tmp_path / f"{split}/{name}/{number}")
    exact = Preprocess((14, 28), (0.5,) * 3, (0.5,) * 3)
    data = DataConfig(name="folder", root=str(tmp_path), val_size=3)
    training, held_out = load_training(data, 0, exact, exact.stored())
    assert training.images.shape == (9, 3, 16, 32) and held_out.images.shape == (3, 3, 14, 28)
    same, same_held_out = load_training(data, 0, exact)
    assert torch.equal(same.labels, training.labels)
    assert torch.equal(same_held_out.images, held_out.images)


def test_masks_are_resized_with_their_images() -> None:
    original = load("shapes", "", train=False, count=20)
    wanted = Preprocess.from_config(DataConfig(name="shapes", image_size=64))
    larger = load("shapes", "", train=False, count=20).resized(wanted)
    assert larger.images.shape == (20, 3, 64, 64) and larger.masks is not None
    assert original.masks is not None
    assert torch.equal(larger.masks, original.masks.repeat_interleave(2, 1).repeat_interleave(2, 2))
    assert torch.equal(larger.images[3], wanted.resize(original.images[3].movedim(0, -1).numpy()))
