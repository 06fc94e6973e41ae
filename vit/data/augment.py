"""Augmentation of whole batches on their device, with separate random parameters for each image.

Shapes: B batch, C classes, H height, W width. Unless stated otherwise, images are (B, channels, H,
W) of any dtype and the result has the same shape and dtype. `draws` are for these images.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.config import STRONGEST, AugmentConfig
from vit.data.preprocess import Preprocess
from vit.seeding import Draws

BOX_ASPECT = 4 / 3  # largest ratio of the sides of a random box
OPERATIONS = (  # of RandAugment
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color",
    "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip


def augment(
    images: Tensor,
    targets: Tensor,
    preprocess: Preprocess,
    draws: Draws,
    settings: AugmentConfig,
    mixes: bool = True,
) -> tuple[Tensor, Tensor]:
    """Augment a batch: crop, flip, RandAugment, normalize, erase, mix.

    Args:
        images: (B, channels, height, width) uint8, of any size with resized crops, else H x W.
        targets: (B, C) float, probabilities of the classes.
        preprocess: Gives H and W, and normalizes the images.
        settings: What to do. With both mixup and cutmix, each image gets one of the two.
        mixes: Whether to use mixup and cutmix.

    Returns:
        Images (B, channels, H, W) float32, normalized, and targets (B, C).
    """
    assert len(images) == len(draws.part)
    if settings.crop == "resized":
        images = random_resized_crop(images, preprocess.image_size, settings.crop_scale, draws)
    elif settings.crop_padding:
        images = random_crop(images, settings.crop_padding, draws)
    if settings.flip:
        images = random_flip(images, draws)
    if settings.rand_ops:
        images = rand_augment(images, settings.rand_ops, settings.rand_magnitude, draws)
    images = preprocess.normalize(images)
    if settings.erasing:
        images = random_erasing(images, settings.erasing, draws)
    if not (mixes and settings.mixes):
        return images, targets
    if settings.mixup and settings.cutmix:
        is_mixup = draws.uniform(0, 1) < 0.5
        weights = mixup_weights(images, settings.mixup, draws)
        weights = weights.where(is_mixup, cutmix_weights(images, settings.cutmix, draws))
    elif settings.mixup:
        weights = mixup_weights(images, settings.mixup, draws)
    else:
        weights = cutmix_weights(images, settings.cutmix, draws)
    return mix(images, targets, weights)


def random_crop(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Shift each image by up to `padding` pixels each way, filling in by reflection."""
    batch, channels, height, width = images.shape
    shifts = draws.integers(-padding, padding + 1, (2, -1, 1))
    rows = _reflected(torch.arange(height, device=images.device) + shifts[0], height)
    columns = _reflected(torch.arange(width, device=images.device) + shifts[1], width)
    # Gathering each pixel from its source needs no padded copy and reads every pixel once.
    sources = (rows[:, :, None] * width + columns[:, None, :]).view(batch, 1, -1)
    return images.flatten(2).gather(2, sources.expand(-1, channels, -1)).view_as(images)


def _reflected(indices: Tensor, size: int) -> Tensor:
    """Reflect indices below 0 or above size - 1 back inside, without repeating the border."""
    return size - 1 - (size - 1 - indices.abs()).abs()


def random_resized_crop(
    images: Tensor, size: tuple[int, int], scale: tuple[float, float], draws: Draws
) -> Tensor:
    """Cut a random box out of each uint8 image and resize it, as torchvision's RandomResizedCrop.

    The size is H and W of the result, the scale the smallest and largest fraction of the area.
    """
    boxes = random_boxes(images, scale, draws)
    if images.device.type != "cpu":
        return resized_crop(images, boxes, size)
    from torchvision.transforms.v2 import functional as tv  # imported late because it is slow

    # A CPU is 20 times as fast with one image at a time, and gives torchvision's bits.
    parts = zip(images, boxes.int().tolist(), strict=True)
    return torch.stack([tv.resized_crop(image, *box, list(size)) for image, box in parts])


def random_boxes(images: Tensor, scale: tuple[float, float], draws: Draws) -> Tensor:
    """Draw boxes: top, left, height and width in pixels, whole numbers (B, 4) float.

    Area and, on a log scale, aspect ratio, 3/4 to 4/3, are uniform. Like torchvision, try ten boxes
    for each image, and take the largest central one if none fits.
    """
    height, width = images.shape[2:]
    drawn = draws.uniform(0, 1, (-1, 10, 4))
    area = (scale[0] + (scale[1] - scale[0]) * drawn[..., 0]) * height * width
    aspect = ((2 * drawn[..., 1] - 1) * math.log(BOX_ASPECT)).exp()
    sides = torch.stack([(area / aspect).sqrt(), (area * aspect).sqrt()], dim=-1).round()
    # Where the product is rounded up, a corner would be one pixel too far.
    free = torch.stack([height - sides[..., 0], width - sides[..., 1]], dim=-1)
    corners = ((free + 1) * drawn[..., 2:]).floor().minimum(free)
    fits = ((sides >= 1) & (free >= 0)).all(dim=-1, keepdim=True)
    first = fits.int().argmax(dim=1, keepdim=True)
    boxes = torch.cat([corners, sides], dim=-1).take_along_dim(first, dim=1)[:, 0]
    tall, wide = min(height, round(width * BOX_ASPECT)), min(width, round(height * BOX_ASPECT))
    central = [(height - tall) // 2, (width - wide) // 2, tall, wide]
    # Numbers, not a tensor: copying one to a GPU would wait for it.
    columns = zip(boxes.unbind(dim=1), central, strict=True)
    any_fits = fits.any(dim=1).squeeze(1)
    return torch.stack([torch.where(any_fits, column, side) for column, side in columns], dim=1)


def resized_crop(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut boxes (B, 4) out of images and resize them, bilinear with antialiasing, all at once.

    Rows and columns are resampled one after the other, each by a matrix for every image, so that
    boxes of different sizes need no loop and a GPU does not have to tell the host about them.
    """
    down = _resampling(boxes[:, 0], boxes[:, 2], images.shape[2], size[0])
    across = _resampling(boxes[:, 1], boxes[:, 3], images.shape[3], size[1])
    resized = down[:, None] @ images.float() @ across[:, None].mT
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _resampling(start: Tensor, length: Tensor, pixels: int, target: int) -> Tensor:
    """Return weights (B, target, pixels) of the pixels of boxes with `start` and `length` (B,)."""
    start, length = start[:, None, None], length[:, None, None]
    numbers = torch.arange(pixels, device=start.device) + 0.5 - start
    step = length / target
    centres = (torch.arange(target, device=start.device)[:, None] + 0.5) * step
    weights = (1 - (numbers - centres).abs() / step.clamp(min=1)).clamp_(min=0)
    weights *= (numbers > 0) & (numbers < length)
    return weights / weights.sum(dim=-1, keepdim=True)


def random_flip(images: Tensor, draws: Draws) -> Tensor:
    """Mirror each image left to right with probability 1/2."""
    return torch.where(draws.uniform(0, 1) < 0.5, images.flip(-1), images)


def shrink(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Shrink float images to a height and width, with antialiasing."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True)


def rand_augment(images: Tensor, num_ops: int, magnitude: float, draws: Draws) -> Tensor:
    """Apply `num_ops` random operations to each uint8 image (arXiv 1909.13719).

    Operations and magnitudes, 0 to `STRONGEST`, are torchvision's, whose RandAugment processes one
    image at a time. Each image of a batch gets other operations, unlike in kornia.
    """
    for _ in range(num_ops):
        operations = draws.integers(0, len(OPERATIONS))
        signs = 2 * draws.integers(0, 2) - 1
        images = apply_operations(images, operations, magnitude, signs)
    return images


def apply_operations(images: Tensor, operations: Tensor, magnitude: float, signs: Tensor) -> Tensor:
    """Apply to each image its operation (B,) int64, an index into `OPERATIONS`.

    The signs (B,) int64, 1 or -1, are the direction of the operations that have two.
    """
    from torchvision.transforms.v2 import functional as tv  # imported late because it is slow

    strength = magnitude / STRONGEST
    # Every operation runs on every image and `where` keeps the right result, so that a GPU does not
    # have to tell the host which image needs which operation.
    planes = images.flatten(0, 1)[:, None]  # torchvision takes one or three channels
    changed = {
        "posterize": tv.posterize(images, 8 - round(4 * strength)),
        "solarize": tv.solarize(images, 255 * (1 - strength)),
        "autocontrast": tv.autocontrast(planes).view_as(images),
        "equalize": tv.equalize(images),
    }
    rgb = images.shape[1] == 3  # the mean stands for the grey of other channels
    grey = tv.rgb_to_grayscale(images).float() if rgb else images.mean(1, True, dtype=torch.float)
    others = {
        "brightness": torch.zeros_like(grey),
        "color": grey,
        "contrast": grey.mean(dim=(1, 2, 3), keepdim=True),
        "sharpness": tv.adjust_sharpness(planes, 0.0).view_as(images).float(),
    }
    factors = 1 + 0.9 * strength * signs[:, None, None, None]
    for name, other in others.items():
        blended = factors * images + (1 - factors) * other
        changed[name] = blended.clamp(0, 255).to(torch.uint8)
    result = warp(images, operations, strength, signs)
    for name, values in changed.items():
        is_chosen = (operations == OPERATIONS.index(name))[:, None, None, None]
        result = torch.where(is_chosen, values, result)
    return result


def warp(images: Tensor, operations: Tensor, strength: float, signs: Tensor) -> Tensor:
    """Shear, translate or rotate the images with such an operation, filling with black.

    A strength of 1 shears by 0.3, translates by 150 / 331 of a side, and rotates by 30 degrees.
    """
    height, width = images.shape[2:]
    aspect, shear = height / width, 0.3 * strength
    shift_x, shift_y = (2 * int(strength * 150 / 331 * side) / side for side in (width, height))
    amounts = {
        name: signs * (operations == OPERATIONS.index(name))
        for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
    }
    angle = math.radians(30 * strength) * amounts["rotate"]
    # The source of each pixel, x and y from -1 to 1; shearing keeps the upper left corner.
    shear_x, shear_y = aspect * shear * amounts["shear_x"], shear / aspect * amounts["shear_y"]
    matrix = [
        [angle.cos(), -aspect * angle.sin() + shear_x, shear_x - shift_x * amounts["translate_x"]],
        [angle.sin() / aspect + shear_y, angle.cos(), shear_y - shift_y * amounts["translate_y"]],
    ]
    sources = torch.stack([torch.stack(row, dim=1) for row in matrix], dim=1)
    grid = F.affine_grid(sources, list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="nearest", align_corners=False)
    return moved.to(torch.uint8)


def random_erasing(images: Tensor, probability: float, draws: Draws) -> Tensor:
    """Overwrite a random rectangle of normalized images with noise (arXiv 1708.04896).

    It covers 2 to 33% of the image, with an aspect ratio of up to 3.3, and may be cut off.
    """
    height, width = images.shape[2:]
    side = draws.uniform(0.02, 0.33).sqrt()
    longest = math.log(3.3) / 2
    stretch = draws.uniform(-longest, longest).exp()
    inside = _box(images, side * stretch * height, side / stretch * width, draws)
    erased = inside & (draws.uniform(0, 1) < probability)
    return torch.where(erased, draws.noise(images.shape[1:]), images)


def mixup_weights(images: Tensor, alpha: float, draws: Draws) -> Tensor:
    """Draw the weight of each image in mixup (arXiv 1710.09412): (B, 1, H, W), constant."""
    return draws.beta(alpha).expand(-1, 1, *images.shape[2:])


def cutmix_weights(images: Tensor, alpha: float, draws: Draws) -> Tensor:
    """Draw the weights in cutmix (arXiv 1905.04899): (B, 1, H, W), 0 in a random box, else 1."""
    side = (1 - draws.beta(alpha)).sqrt()
    height, width = images.shape[2:]
    return 1 - _box(images, side * height, side * width, draws).float()


def mix(images: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Blend each image and its target (B, C) with a neighbour in the batch and its target.

    Images are paired two by two, as in timm, and the last of an odd number is mixed with the one
    before it. A batch is in random order, so partners are random, and its parts, of an even number
    of images each, are mixed like the whole. The weights (B, 1, H, W), 0 to 1, are the image's own
    at each pixel; targets are weighted by their mean.
    """
    other = torch.arange(len(images), device=images.device) ^ 1
    other = torch.where(other < len(images), other, max(len(images) - 2, 0))
    weight = weights.mean(dim=(1, 2, 3))[:, None]
    return torch.lerp(images[other], images, weights), torch.lerp(targets[other], targets, weight)


def _box(images: Tensor, height: Tensor, width: Tensor, draws: Draws) -> Tensor:
    """Return where a box of a height and width (B, 1, 1, 1) is, with a centre anywhere inside."""
    rows, columns = (torch.arange(n, device=images.device) + 0.5 for n in images.shape[2:])
    down, across = (draws.uniform(0, n) for n in images.shape[2:])
    return ((rows[:, None] - down).abs() < height / 2) & ((columns - across).abs() < width / 2)
