"""RandAugment (arXiv 1909.13719) for whole batches on their device.

Operations and magnitudes are torchvision's, whose RandAugment processes one image at a time. Each
image of a batch gets other operations, unlike in kornia. Images and results are (B, channels, H, W)
uint8, B batch, H height, W width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vit.data.config import STRONGEST
from vit.data.draws import Draws

OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color",
    "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip


def rand_augment(images: Tensor, num_ops: int, magnitude: float, draws: Draws) -> Tensor:
    """Apply `num_ops` random operations of a magnitude, 0 to `STRONGEST`, to each image."""
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
    zero = torch.zeros(len(images), device=images.device)
    amounts = {
        name: torch.where(operations == OPERATIONS.index(name), signs, zero)
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
