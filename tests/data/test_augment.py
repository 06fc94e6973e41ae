"""Augmentation: the effect of each function on every single image; RandAugment is torchvision's."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare, ks_2samp, kstest
from torch import Generator, Tensor
from torch.testing import assert_close
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.autoaugment import RandAugment, _apply_op
from torchvision.transforms.v2 import functional as tv

from vit.data.augment import (
    OPERATIONS,
    apply_operations,
    augment,
    cutmix_weights,
    mix,
    mixup_weights,
    rand_augment,
    random_boxes,
    random_crop,
    random_erasing,
    random_flip,
    random_resized_crop,
    resized_crop,
    shrink,
)
from vit.data.config import STRONGEST, AugmentConfig, DataConfig
from vit.data.preprocess import Preprocess
from vit.data.shapes import draw_shapes
from vit.seeding import Draws

CIFAR10 = Preprocess.from_config(DataConfig(name="cifar10"))
ALL = {
    "crop_padding": 4, "flip": True, "rand_ops": 2, "erasing": 0.5, "mixup": 0.8, "cutmix": 1.0
}  # fmt: skip


def only(**options: Any) -> AugmentConfig:
    """Settings that do nothing but what they are asked to."""
    return AugmentConfig(**{"crop_padding": 0, "flip": False, **options})


def seeded(seed: int = 0) -> Generator:
    return torch.Generator().manual_seed(seed)


def draw_images(count: int, height: int = 32, width: int = 32) -> Tensor:
    shape = (count, 3, height, width)
    return torch.randint(256, shape, dtype=torch.uint8, generator=seeded(99))


def draw_targets(count: int, classes: int = 10) -> Tensor:
    return F.one_hot(torch.arange(count) % classes, classes).float()


@pytest.mark.parametrize("crop", [{}, {"crop": "resized", "crop_scale": (0.3, 1)}])
def test_results_depend_on_draws_alone_and_parts_of_a_batch_are_like_the_whole(crop):
    """Also where a part begins within a block of the noise of random erasing."""
    count, parts, settings = 48, 3, only(**ALL, **crop)
    images, targets = draw_images(count), draw_targets(count)
    torch.manual_seed(0)
    whole = augment(images, targets, CIFAR10, Draws(0, count), settings)
    state = torch.manual_seed(1).get_state()
    for start in range(0, count, count // parts):
        part = slice(start, start + count // parts)
        draws = Draws(0, count, part)
        results = augment(images[part], targets[part], CIFAR10, draws, settings)
        for result, expected in zip(results, whole, strict=True):
            assert torch.equal(result, expected[part])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(
        augment(images, targets, CIFAR10, Draws(1, count), settings)[0], whole[0]
    )
    assert torch.equal(images, draw_images(count)) and torch.equal(targets, draw_targets(count))


def test_calls_draw_what_torchs_generator_draws():
    """Runs of earlier versions, and those that augment in the same way, keep their numbers."""
    draws, generator = Draws(3, 50), torch.Generator().manual_seed(3)
    shifts = torch.randint(-2, 3, (2, 50, 1), generator=generator)
    assert torch.equal(draws.integers(-2, 3, (2, -1, 1)), shifts)
    coins = torch.rand(50, 1, 1, 1, generator=generator)
    assert torch.equal(draws.uniform(0, 1), coins)
    noise = torch.corrcoef(Draws(0, 100).noise((3, 16, 16)).flatten(1)).fill_diagonal_(0)
    assert noise.abs().max() < 0.2  # 5.5 standard deviations: each image has its own


def test_random_crop_is_a_crop_of_the_reflected_image():
    count, size, padding = 4000, (6, 7), 2
    images = draw_images(count, *size)
    result = random_crop(images, padding, Draws(0, count))
    assert result.dtype == torch.uint8 and result.shape == images.shape
    padded = F.pad(images.float(), [padding] * 4, mode="reflect")
    windows = padded.unfold(2, size[0], 1).unfold(3, size[1], 1)  # (B, 3, down, across, H, W)
    matches = (windows == result[:, :, None, None]).all(dim=(1, 4, 5)).flatten(1)
    assert (matches.sum(1) == 1).all()
    assert chisquare(matches.sum(0)).pvalue > 1e-4  # every offset is as likely as another


def test_boxes_are_cut_and_resized_as_in_torchvision():
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


@pytest.mark.parametrize(
    ("size", "scale"),
    [((256, 256), (0.08, 1)), ((20, 100), (0.5, 0.9)), ((10, 100), (1, 1))],  # in which none fits
)
def test_boxes_are_distributed_as_in_torchvision(size, scale):
    count = 2_000
    found = random_boxes(torch.empty(count, 1, *size), scale, Draws(0, count))
    draw, image = v2.RandomResizedCrop(size, scale), torch.empty(1, *size)
    torch.manual_seed(0)
    drawn = [draw.make_params([image]) for _ in range(count)]
    expected = torch.tensor([[p[key] for key in ("top", "left", "height", "width")] for p in drawn])
    whole = torch.tensor([*size, *size])
    assert (found == found.round()).all() and (found >= 0).all() and (found[:, 2:] >= 1).all()
    assert (found[:, :2] + found[:, 2:] <= whole[:2]).all()
    pairs = zip(found.T, expected.T, strict=True)
    assert all(ks_2samp(one, other).pvalue > 0.001 for one, other in pairs)


def test_random_flip_mirrors_half_of_the_images():
    images = draw_images(2000, 3, 4)
    result = random_flip(images, Draws(0, 2000))
    same = (result == images).flatten(1).all(1)
    mirrored = (result == images.flip(3)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 900 < mirrored.sum() < 1100
    assert 900 < (mirrored[1:] == mirrored[:-1]).sum() < 1100


def uncut_sides(inside: Tensor) -> tuple[Tensor, Tensor]:
    """Check that (B, H, W) bool are boxes; return height and width of those that no border cuts."""
    rows, columns = inside.any(2), inside.any(1)
    assert torch.equal(inside, rows[:, :, None] & columns[:, None, :])
    for line in (rows, columns):  # without gaps
        assert (F.pad(line.float(), (1, 1)).diff(dim=1).abs().sum(1) <= 2).all()
    uncut = ~(rows[:, 0] | rows[:, -1] | columns[:, 0] | columns[:, -1])
    return rows.sum(1)[uncut], columns.sum(1)[uncut]


def simulate_boxes(sides: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return the visible fraction of boxes of (count, 2) pixels, centred anywhere in a square."""
    middles = rng.uniform(0, size, sides.shape)
    pixels = np.arange(size) + 0.5
    inside = np.abs(pixels - middles[..., None]) < sides[..., None] / 2
    return inside.sum(-1).prod(-1) / size**2


def test_random_erasing_fills_boxes_of_the_papers_areas_and_shapes_with_noise():
    count, size, probability = 8000, 48, 0.25
    result = random_erasing(torch.full((count, 2, size, size), 100.0), probability, Draws(0, count))
    changed = result != 100
    assert (changed == changed[:, :1]).all()
    hit = changed.flatten(1).any(1)
    assert hit.float().mean().item() == pytest.approx(probability, abs=0.03)
    noise = result[changed]
    assert kstest(noise, "norm").pvalue > 0.001
    assert len(noise[:1000].unique()) == 1000  # each pixel and channel has its own
    boxes = changed[hit, 0]
    rng = np.random.default_rng(0)
    area = rng.uniform(0.02, 0.33, 40_000) * size**2
    ratio = np.exp(rng.uniform(-math.log(3.3), math.log(3.3), 40_000))
    sides = np.stack([np.sqrt(area * ratio), np.sqrt(area / ratio)], axis=1)
    expected = simulate_boxes(sides, size, rng)
    visible = boxes.float().mean((1, 2))
    assert ks_2samp(visible, expected).pvalue > 0.001
    # Boxes that no border cuts keep their proportions, upright as often as lying.
    high, wide = uncut_sides(boxes)
    proportions = (high / wide).log()
    assert proportions.abs().max() < math.log(3.3) + 0.3
    assert proportions.mean().item() == pytest.approx(0, abs=0.1)


@pytest.mark.parametrize("alpha", [0.7, 4.0])
def test_mixup_weights_are_beta_distributed_and_constant(alpha):
    shares = mixup_weights(torch.zeros(20_000, 3, 2, 3), alpha, Draws(0, 20_000))
    assert shares.shape == (20_000, 1, 2, 3)
    assert (shares == shares[:, :, :1, :1]).all()
    drawn = shares[:, 0, 0, 0]
    assert kstest(drawn, "beta", (alpha, alpha)).pvalue > 0.001


def test_cutmix_weights_are_zero_in_one_box():
    count, size, alpha = 4000, 32, 0.5
    shares = cutmix_weights(torch.zeros(count, 3, size, size), alpha, Draws(0, count))
    assert shares.shape == (count, 1, size, size)
    assert ((shares == 0) | (shares == 1)).all()
    box = shares[:, 0] == 0
    rng = np.random.default_rng(0)
    side = np.sqrt(1 - rng.beta(alpha, alpha, (40_000, 1))) * size
    expected = simulate_boxes(np.repeat(side, 2, axis=1), size, rng)
    visible = box.float().mean((1, 2))
    assert ks_2samp(visible, expected).pvalue > 0.001
    high, wide = uncut_sides(box)
    assert len(high) > 200 and ((high - wide).abs() <= 1).all()  # square like the image


@pytest.mark.parametrize("count", [50, 7, 1])
def test_mix_blends_each_image_and_target_with_its_neighbour(count):
    images, targets = draw_images(count, 4, 5).double(), draw_targets(count).double()
    shares = torch.rand(count, 1, 4, 5, generator=seeded(1), dtype=torch.float64)
    mixed, mixed_targets = mix(images, targets, shares)
    partners = []
    for image, target, share, result, result_target in zip(
        images, targets, shares, mixed, mixed_targets, strict=True
    ):
        blends = share * image + (1 - share) * images
        (partner,) = (blends - result).abs().flatten(1).amax(1).lt(1e-9).nonzero().flatten()
        partners.append(partner.item())
        expected = share.mean() * target + (1 - share.mean()) * targets[partner]
        torch.testing.assert_close(result_target, expected, rtol=0, atol=1e-12)
    pairs = {50: [n + 1 - 2 * (n % 2) for n in range(50)], 7: [1, 0, 3, 2, 5, 4, 5], 1: [0]}
    assert partners == pairs[count]


@pytest.mark.parametrize("mixed", [(), ("mixup",), ("cutmix",), ("mixup", "cutmix")])
def test_augment_crops_flips_normalises_erases_mixes(mixed):
    """With mixup and CutMix, each image gets one of the two; resized crops set the size."""
    images, targets = draw_images(30), draw_targets(30)
    size = only(crop="resized", crop_padding=4, crop_scale=(0.5, 1))
    found, _ = augment(draw_images(8, 37, 50), torch.eye(8), CIFAR10, Draws(0, 8), size)
    expected = random_resized_crop(draw_images(8, 37, 50), (32, 32), (0.5, 1), Draws(0, 8))
    assert torch.equal(found, CIFAR10.normalize(expected))
    options = {"crop_padding": 3, "flip": True, "rand_ops": 1, "erasing": 0.4}
    settings = AugmentConfig(**options, **dict.fromkeys(mixed, 0.7))
    result, result_targets = augment(images, targets, CIFAR10, Draws(0, 30), settings)
    draws = Draws(0, 30)
    x = random_flip(random_crop(images, 3, draws), draws)
    x = rand_augment(x, 1, 9.0, draws)
    x = random_erasing(CIFAR10.normalize(x), 0.4, draws)
    if mixed:
        one = draws.uniform(0, 1) < 0.5 if len(mixed) == 2 else None
        functions = {"mixup": mixup_weights, "cutmix": cutmix_weights}
        shares = [functions[name](x, 0.7, draws) for name in mixed]
        x, targets = mix(x, targets, shares[0] if one is None else torch.where(one, *shares))
    assert torch.equal(result, x) and torch.equal(result_targets, targets)


def test_shrinking_is_torchvisions_antialiased_resize():
    images = torch.randn(4, 3, 32, 32)
    expected = tv.resize(images, [8, 24], antialias=True)
    assert_close(shrink(images, (8, 24)), expected, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def images() -> Tensor:
    """Drawn shapes, noise, and one plain image, which has no contrast to stretch."""
    noise = draw_images(15)
    plain = torch.full((1, 3, 32, 32), 77, dtype=torch.uint8)
    return torch.cat([draw_shapes(16, seed=0)[0], noise, plain])


def by_torchvision(image: Tensor, operation: str, magnitude: int, sign: int) -> Tensor:
    """Change one image as torchvision's RandAugment does once it has drawn."""
    name = "AutoContrast" if operation == "autocontrast" else operation.title().replace("_", "")
    amounts, signed = RandAugment()._augmentation_space(STRONGEST + 1, image.shape[1:])[name]
    amount = (float(amounts[magnitude]) if amounts.ndim else 0.0) * (sign if signed else 1)
    return _apply_op(image, name, amount, InterpolationMode.NEAREST, None)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (3, 50, 20), (1, 24, 40)])
def test_operation_is_torchvisions(images, operation, shape):
    square = shape == (3, 32, 32)
    if not square:
        images = torch.randint(256, (4, *shape), dtype=torch.uint8, generator=seeded())
    operations = torch.full((len(images),), OPERATIONS.index(operation))
    for magnitude, sign in itertools.product((0, 9, 23, 30), (1, -1)):
        signs = torch.full((len(images),), sign)
        found = apply_operations(images, operations, magnitude, signs)
        expected = torch.stack([by_torchvision(i, operation, magnitude, sign) for i in images])
        assert found.dtype == torch.uint8 and found.shape == images.shape
        # One level of 255, where rounding falls the other way; in images that are not square, a
        # pixel on the border between two sources may take the other one.
        apart = (found.int() - expected.int()).abs()
        assert (apart > 1).float().mean() <= (0 if square else 0.005)
        assert (apart > 0).float().mean() < (0.05 if square else 0.3)


def test_operations_are_drawn_evenly_both_ways():
    """Of one image many times: each operation and way leaves its own picture."""
    image, count = draw_shapes(1, seed=0)[0][..., :16, :16], 2_800
    changed = rand_augment(image.expand(count, -1, -1, -1), 1, 9, Draws(0, count))
    numbers = torch.arange(len(OPERATIONS)).repeat(2)
    signs = torch.tensor([1, -1]).repeat_interleave(len(OPERATIONS))
    ways = apply_operations(image.expand(len(numbers), -1, -1, -1), numbers, 9, signs)
    expected, found = (Counter(p.numpy().tobytes() for p in each) for each in (ways, changed))
    assert len(expected) > 18 and found.keys() <= expected.keys()
    likely = np.array([*expected.values()]) * count / len(ways)
    assert chisquare([found[key] for key in expected], likely).pvalue > 1e-6
