"""Preprocessing of images of any size."""

import json
import typing

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

from vit.config import DataConfig, DataName
from vit.data.preprocess import Preprocess
from vit.data.specs import DATASETS

CIFAR10 = Preprocess.from_config(DataConfig(name="cifar10"))
WIDE = Preprocess((16, 64), (0.5,), (0.25,))


def photo(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(0).integers(256, size=(height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_has_its_preprocessing(name: str) -> None:
    spec, preprocess = DATASETS[name], Preprocess.from_config(DataConfig(name=name))
    assert preprocess.image_size == spec.image_size
    assert preprocess.channels == spec.channels == len(spec.std)
    assert (preprocess.mean, preprocess.std) == (spec.mean, spec.std)


def test_every_registered_data_set_can_be_chosen() -> None:
    assert typing.get_args(DataName) == tuple(DATASETS)


@pytest.mark.parametrize("preprocess", [CIFAR10, WIDE])
def test_it_survives_json(preprocess: Preprocess) -> None:
    again = Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict())))
    assert again == preprocess and hash(again) == hash(preprocess)


@pytest.mark.parametrize(
    ("preprocess", "size", "rows", "columns"),
    [
        (CIFAR10, (40, 100), (0, 40), (30, 70)),
        (CIFAR10, (101, 40), (30, 70), (0, 40)),
        (CIFAR10, (32, 32), (0, 32), (0, 32)),
        (WIDE, (100, 100), (37, 62), (0, 100)),
        (WIDE, (20, 500), (0, 20), (210, 290)),
    ],
)
def test_crop_is_central_with_the_aspect_of_the_model(
    preprocess: Preprocess, size: tuple[int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    assert preprocess.crop(*size) == (slice(*rows), slice(*columns))


def test_resize_is_pillows_bicubic_filter_on_the_crop() -> None:
    whole = photo(50, 80)
    square = Image.fromarray(whole[:, 15:65])
    expected = pil_to_tensor(square.resize((32, 32), Image.Resampling.BICUBIC))
    assert torch.equal(CIFAR10.resize(whole), expected)


def test_image_of_the_right_size_passes_unchanged() -> None:
    assert torch.equal(
        CIFAR10.resize(photo(32, 32)), torch.from_numpy(photo(32, 32)).permute(2, 0, 1)
    )


def test_model_with_one_channel_gets_grey() -> None:
    image = WIDE.resize(photo(100, 100))
    assert image.shape == (1, 16, 64) and image.dtype == torch.uint8
    expected = Image.fromarray(photo(100, 100)[37:62]).convert("L").resize((64, 16), 3)
    assert torch.equal(image, pil_to_tensor(expected))


@pytest.mark.parametrize("preprocess", [CIFAR10, WIDE])
def test_normalize_is_the_formula_per_channel(preprocess: Preprocess) -> None:
    size = (4, preprocess.channels, *preprocess.image_size)
    images = torch.randint(256, size, dtype=torch.uint8)
    mean, std = (np.array(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
    expected = (images.numpy() / 255.0 - mean) / std
    result = preprocess.normalize(images)
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, atol=2e-6)


def test_constants_are_moved_to_a_device_once() -> None:
    images = torch.zeros(1, 3, 32, 32, dtype=torch.uint8, device="meta")
    assert CIFAR10.normalize(images).is_meta and CIFAR10.normalize(images).is_meta
    assert CIFAR10.normalize(torch.zeros(1, 3, 32, 32, dtype=torch.uint8)).device.type == "cpu"
