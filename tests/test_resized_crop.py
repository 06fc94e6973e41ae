"""Random resized crops, compared with torchvision's."""

import math

import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from vit.data.augment import augment, random_boxes, random_resized_crop, resized_crop
from vit.data.config import AugmentConfig, DataConfig
from vit.data.draws import Draws
from vit.data.preprocess import Preprocess
from vit.data.shapes import draw_shapes

CIFAR10 = Preprocess.from_config(DataConfig(name="cifar10"))


def test_boxes_are_cut_and_resized_as_in_torchvision() -> None:
    """The way of a GPU, one matrix product for all; a CPU calls torchvision itself."""
    images, _, _ = draw_shapes(40, seed=0)
    images = torch.cat([images, images.flip(2)], dim=3)  # not square
    boxes = random_boxes(images, (0.08, 1.0), Draws(0, 40))
    for size in ((32, 32), (20, 56), (7, 3)):
        found = resized_crop(images, boxes, size)
        pairs = zip(images, boxes.int().tolist(), strict=True)
        expected = torch.stack([tv.resized_crop(image, *box, list(size)) for image, box in pairs])
        assert found.dtype == torch.uint8 and found.shape == expected.shape
        assert (found.int() - expected.int()).abs().max() <= 1  # torchvision rounds twice
        assert torch.equal(random_resized_crop(images, size, (0.08, 1.0), Draws(0, 40)), expected)


@pytest.mark.parametrize(("size", "scale"), [((256, 256), (0.08, 1.0)), ((20, 100), (0.5, 0.9))])
def test_boxes_are_distributed_as_in_torchvision(
    size: tuple[int, int], scale: tuple[float, float]
) -> None:
    count = 2_000
    found = random_boxes(torch.empty(count, 1, *size), scale, Draws(0, count))
    draw, image = v2.RandomResizedCrop(size, scale), torch.empty(1, *size)
    torch.manual_seed(0)
    drawn = [draw.make_params([image]) for _ in range(count)]
    expected = torch.tensor([[p[key] for key in ("top", "left", "height", "width")] for p in drawn])
    whole = torch.tensor([*size, *size])
    assert (found == found.round()).all() and (found >= 0).all() and (found[:, 2:] >= 1).all()
    assert (found[:, :2] + found[:, 2:] <= whole[:2]).all()
    for one, other in zip((found / whole).T, (expected / whole).T, strict=True):
        # The largest distance between the two distributions; Kolmogorov-Smirnov at 1 in 1000.
        places = torch.cat([one, other]).unique()
        below = ((part[:, None] <= places).float().mean(dim=0) for part in (one, other))
        assert (next(below) - next(below)).abs().max() < 1.95 * math.sqrt(2 / count)


def test_an_image_in_which_no_box_fits_is_cropped_at_its_centre() -> None:
    boxes = random_boxes(torch.empty(5, 3, 10, 100), (1.0, 1.0), Draws(0, 5))
    assert boxes.tolist() == [[0, 43, 10, 13]] * 5


def test_training_images_of_any_size_become_those_of_the_model() -> None:
    images = torch.arange(8 * 3 * 37 * 50).view(8, 3, 37, 50).to(torch.uint8)
    settings = AugmentConfig(crop="resized", crop_padding=4, crop_scale=(0.5, 1), flip=False)
    found, _ = augment(images, torch.eye(8), CIFAR10, Draws(0, 8), settings)
    expected = random_resized_crop(images, (32, 32), (0.5, 1), Draws(0, 8))
    assert torch.equal(found, CIFAR10.normalize(expected))
