"""Augmentation of whole batches on their device, with separate random parameters for each image.

All random numbers come from the generator that is passed in. Shapes: B batch, C classes, H height,
W width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vit.data.preprocess import Preprocess
from vit.data.rand_augment import rand_augment

BOX_ASPECT = 4 / 3  # largest ratio of the sides of a random box


def augment(
    images: Tensor,
    targets: Tensor,
    preprocess: Preprocess,
    generator: Generator,
    crop_padding: int = 0,
    crop_scale: tuple[float, float] | None = None,
    flip: bool = False,
    rand_ops: int = 0,
    rand_magnitude: float = 9.0,
    erasing: float = 0.0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Augment a batch: crop, flip, RandAugment, normalize, erase, mix.

    Args:
        images: (B, channels, height, width) uint8, of any size with crop_scale, else H x W.
        targets: (B, C) float, probabilities of the classes.
        preprocess: Gives H and W, and normalizes the images.
        generator: On the images' device.
        crop_padding: Padding of the random crop in pixels, see `random_crop`; 0 disables it.
        crop_scale: Fractions of the area that are cut out and resized instead, see
            `random_resized_crop`; None disables this.
        flip: Whether to mirror each image with probability 1/2.
        rand_ops: RandAugment operations per image, see `rand_augment`; 0 disables it.
        rand_magnitude: Strength of these operations, 0 to 30.
        erasing: Probability of random erasing, see `random_erasing`; 0 disables it.
        mixup: Alpha of mixup; 0 disables it.
        cutmix: Alpha of cutmix; 0 disables it. With mixup, each image gets one of the two.

    Returns:
        Images (B, channels, H, W) float32, normalized, and targets (B, C).
    """
    if crop_scale is not None:
        images = random_resized_crop(images, preprocess.image_size, crop_scale, generator)
    elif crop_padding:
        images = random_crop(images, crop_padding, generator)
    if flip:
        images = random_flip(images, generator)
    if rand_ops:
        images = rand_augment(images, rand_ops, rand_magnitude, generator)
    images = preprocess.normalize(images)
    if erasing:
        images = random_erasing(images, erasing, generator)
    if mixup and cutmix:
        one = _coin(images, 0.5, generator)
        shares = torch.where(
            one, mixup_shares(images, mixup, generator), cutmix_shares(images, cutmix, generator)
        )
        return mix(images, targets, shares, generator)
    if mixup:
        return mix(images, targets, mixup_shares(images, mixup, generator), generator)
    if cutmix:
        return mix(images, targets, cutmix_shares(images, cutmix, generator), generator)
    return images, targets


def random_crop(images: Tensor, padding: int, generator: Generator) -> Tensor:
    """Shift each image by up to `padding` pixels each way, filling in by reflection.

    Args:
        images: (B, channels, H, W), any dtype.
        padding: Pixels, less than H and W.
        generator: On the images' device.

    Returns:
        Images of the same shape and dtype.
    """
    batch, channels, height, width = images.shape
    shifts = torch.randint(
        -padding, padding + 1, (2, batch, 1), generator=generator, device=images.device
    )
    rows = _reflected(torch.arange(height, device=images.device) + shifts[0], height)
    columns = _reflected(torch.arange(width, device=images.device) + shifts[1], width)
    # Gathering each pixel from its source needs no padded copy and reads every pixel once.
    sources = (rows[:, :, None] * width + columns[:, None, :]).view(batch, 1, -1)
    return images.flatten(2).gather(2, sources.expand(-1, channels, -1)).view_as(images)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Reflect indices below 0 or above size - 1 back inside, without repeating the border."""
    return size - 1 - (size - 1 - places.abs()).abs()


def random_resized_crop(
    images: Tensor, size: tuple[int, int], scale: tuple[float, float], generator: Generator
) -> Tensor:
    """Cut a random box out of each image and resize it, as torchvision's RandomResizedCrop does.

    Args:
        images: (B, channels, height, width) uint8.
        size: H and W of the result.
        scale: Smallest and largest fraction of the image's area, above 0, up to 1.
        generator: On the images' device.

    Returns:
        (B, channels, H, W) uint8.
    """
    boxes = random_boxes(images, scale, generator)
    if images.device.type != "cpu":
        return resized_crop(images, boxes, size)
    from torchvision.transforms.v2 import functional as tv  # imported late because it is slow

    # A CPU is 20 times as fast with one image at a time, and gives torchvision's own bits.
    parts = zip(images, boxes.int().tolist(), strict=True)
    return torch.stack([tv.resized_crop(image, *box, list(size)) for image, box in parts])


def random_boxes(images: Tensor, scale: tuple[float, float], generator: Generator) -> Tensor:
    """Draw a box in each image: uniform in area and, on a log scale, in aspect ratio, 3/4 to 4/3.

    Like torchvision, ten boxes are tried, and the largest central one is taken if none fits.

    Args:
        images: (B, channels, height, width).
        scale: Smallest and largest fraction of the image's area.
        generator: On the images' device.

    Returns:
        (B, 4) float, whole numbers: top, left, height and width in pixels.
    """
    height, width = images.shape[2:]
    drawn = torch.rand(len(images), 10, 4, generator=generator, device=images.device)
    area = (scale[0] + (scale[1] - scale[0]) * drawn[..., 0]) * height * width
    aspect = ((2 * drawn[..., 1] - 1) * math.log(BOX_ASPECT)).exp()
    sides = torch.stack([(area / aspect).sqrt(), (area * aspect).sqrt()], dim=-1).round()
    # Where the product is rounded up, a corner would be one pixel too far.
    free = torch.tensor([height, width], device=images.device) - sides
    corners = ((free + 1) * drawn[..., 2:]).floor().minimum(free)
    fits = ((sides >= 1) & (free >= 0)).all(dim=-1, keepdim=True)
    first = fits.int().argmax(dim=1, keepdim=True)
    boxes = torch.cat([corners, sides], dim=-1).take_along_dim(first, dim=1)[:, 0]
    tall = min(height, round(width * BOX_ASPECT))
    wide = min(width, round(height * BOX_ASPECT))
    central = [(height - tall) // 2, (width - wide) // 2, tall, wide]
    return torch.where(fits.any(dim=1), boxes, torch.tensor(central, device=images.device))


def resized_crop(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Cut a box out of each image and resize it, bilinear with antialiasing, all images at once.

    Args:
        images: (B, channels, height, width) uint8.
        boxes: (B, 4): top, left, height and width in pixels, whole numbers inside the image.
        size: H and W of the result.

    Returns:
        (B, channels, H, W) uint8.
    """
    # Rows and columns are resampled one after the other, each by a matrix for every image, so that
    # boxes of different sizes need no loop and a GPU does not have to tell the host about them.
    down = _resampling(boxes[:, 0], boxes[:, 2], images.shape[2], size[0])
    across = _resampling(boxes[:, 1], boxes[:, 3], images.shape[3], size[1])
    resized = down[:, None] @ images.float() @ across[:, None].mT
    return resized.round_().clamp_(0, 255).to(torch.uint8)


def _resampling(start: Tensor, length: Tensor, pixels: int, target: int) -> Tensor:
    """Return the weights of `pixels` in each of `target` pixels: (B, target, pixels).

    Args:
        start: (B,), the first pixel of each box.
        length: (B,), the pixels in each box.
        pixels: Pixels in a row or a column of an image.
        target: Pixels after resizing the box.
    """
    start, length = start[:, None, None], length[:, None, None]
    numbers = torch.arange(pixels, device=start.device) + 0.5 - start
    step = length / target
    centres = (torch.arange(target, device=start.device)[:, None] + 0.5) * step
    weights = (1 - (numbers - centres).abs() / step.clamp(min=1)).clamp_(min=0)
    weights *= (numbers > 0) & (numbers < length)
    return weights / weights.sum(dim=-1, keepdim=True)


def random_flip(images: Tensor, generator: Generator) -> Tensor:
    """Mirror each image (B, channels, H, W) left to right with probability 1/2."""
    return torch.where(_coin(images, 0.5, generator), images.flip(-1), images)


def shrink(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Shrink images (B, channels, H, W), float, to a height and width, with antialiasing."""
    if images.shape[2:] == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True)


def random_erasing(images: Tensor, probability: float, generator: Generator) -> Tensor:
    """Overwrite a random rectangle with noise (arXiv 1708.04896).

    The rectangle covers 2 to 33% of the image, has an aspect ratio of up to 3.3, and may be cut off
    at the border.

    Args:
        images: (B, channels, H, W) float, normalized.
        probability: Probability that an image is changed, 0 to 1.
        generator: On the images' device.
    """
    height, width = images.shape[2:]
    area = _uniform(images, 0.02, 0.33, generator)
    longest = math.log(3.3) / 2
    stretch = _uniform(images, -longest, longest, generator).exp()
    side = area.sqrt()
    inside = _box(images, side * stretch * height, side / stretch * width, generator)
    erased = inside & _coin(images, probability, generator)
    noise = torch.randn(images.shape, generator=generator, device=images.device)
    return torch.where(erased, noise, images)


def mixup_shares(images: Tensor, alpha: float, generator: Generator) -> Tensor:
    """Draw the weight of each image in mixup (arXiv 1710.09412): (B, 1, H, W), constant."""
    share = _beta(images, alpha, generator)
    return share.expand(-1, 1, *images.shape[2:])


def cutmix_shares(images: Tensor, alpha: float, generator: Generator) -> Tensor:
    """Draw the weights in cutmix (arXiv 1905.04899): (B, 1, H, W), 0 in a random box, else 1."""
    side = (1 - _beta(images, alpha, generator)).sqrt()
    height, width = images.shape[2:]
    return 1 - _box(images, side * height, side * width, generator).float()


def mix(
    images: Tensor, targets: Tensor, shares: Tensor, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Blend each image and its target with a random image of the batch and its target.

    Args:
        images: (B, channels, H, W) float.
        targets: (B, C) float.
        shares: (B, 1, H, W), 0 to 1: weight of the image itself at each pixel.
        generator: On the images' device.

    Returns:
        Images (B, channels, H, W), and targets (B, C) weighted by the mean of each image's shares.
    """
    other = torch.randperm(len(images), generator=generator, device=images.device)
    share = shares.mean(dim=(1, 2, 3))[:, None]
    return torch.lerp(images[other], images, shares), torch.lerp(targets[other], targets, share)


def _uniform(images: Tensor, low: float, high: float, generator: Generator) -> Tensor:
    """Draw a number from low to high for each image: (B, 1, 1, 1)."""
    drawn = torch.rand(len(images), 1, 1, 1, generator=generator, device=images.device)
    return low + (high - low) * drawn


def _coin(images: Tensor, probability: float, generator: Generator) -> Tensor:
    """Draw True with the given probability for each image: (B, 1, 1, 1) bool."""
    return _uniform(images, 0.0, 1.0, generator) < probability


def _beta(images: Tensor, alpha: float, generator: Generator) -> Tensor:
    """Draw from Beta(alpha, alpha) for each image: (B, 1, 1, 1).

    torch.distributions accepts no generator, so this calls the function behind its Dirichlet.
    """
    both = torch.full((len(images), 2), alpha, device=images.device)
    return torch._sample_dirichlet(both, generator=generator)[:, :1, None, None]


def _box(images: Tensor, height: Tensor, width: Tensor, generator: Generator) -> Tensor:
    """Place a box of given height and width, pixels (B, 1, 1, 1), at random: (B, 1, H, W) bool.

    Its centre is anywhere in the image; parts outside are cut off.
    """
    rows, columns = (torch.arange(n, device=images.device) + 0.5 for n in images.shape[2:])
    down = _uniform(images, 0.0, images.shape[2], generator)
    across = _uniform(images, 0.0, images.shape[3], generator)
    return ((rows[:, None] - down).abs() < height / 2) & ((columns - across).abs() < width / 2)
