"""The 15 corruptions of ImageNet-C (arXiv 1903.12261), for any image size and number of channels.

Each function takes images of 0 to 1, a random generator for each image, and the parameters of its
entry in `vit.registry.CORRUPTIONS`. All but frost, which is drawn rather than cut out of photos,
follow the published generators. In double precision, batches of any size give the same pixels.

Shapes: B images, C channels, H height, W width.
"""

import io
import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vit.registry import CORRUPTIONS
from vit.seeding import generator

Generators = Sequence[torch.Generator]
SMALL, LARGE = 32, 224  # pixels of the images that parameters are published for


def corrupt(images: Tensor, kind: str, severity: int, seed: int = 0) -> Tensor:
    """Corrupt images (B, C, H, W) uint8 with a severity of 1 to 5; the result is on the CPU.

    The random numbers for each image depend on its pixels, the kind and the seed.
    """
    images = images.cpu().contiguous()
    generators = [generator(seed, kind, zlib.crc32(image.numpy())) for image in images]
    values = parameters(kind, severity, min(images.shape[2:]))
    changed = globals()[kind](images.double() / 255, generators, *values)
    return (255 * _truncate(changed)).round().to(torch.uint8)


def parameters(kind: str, severity: int, size: int) -> list[float]:
    """Return the parameters of a kind for images whose shorter side has `size` pixels.

    Those for 32 and 224 pixels are interpolated in the logarithm of the size, and constant beyond.
    """
    entry = CORRUPTIONS[kind]
    weight = math.log(min(max(size, SMALL), LARGE) / SMALL) / math.log(LARGE / SMALL)
    rows = zip(entry.at_32, entry.at_224, strict=True)
    return [(1 - weight) * a[severity - 1] + weight * b[severity - 1] for a, b in rows]


def gaussian_noise(x: Tensor, generators: Generators, deviation: float) -> Tensor:
    """Add normal noise to each value."""
    return x + deviation * _draw(torch.randn, generators, *x.shape[1:])


def shot_noise(x: Tensor, generators: Generators, photons: float) -> Tensor:
    """Count photons; a white pixel has `photons` of them on average."""
    pairs = zip(x, generators, strict=True)
    return torch.stack([torch.poisson(photons * image, rng) for image, rng in pairs]) / photons


def impulse_noise(x: Tensor, generators: Generators, fraction: float) -> Tensor:
    """Set a fraction of the values to 0 or 1."""
    drawn = _draw(torch.rand, generators, *x.shape[1:])
    return x.masked_fill(drawn < fraction / 2, 0).masked_fill(drawn > 1 - fraction / 2, 1)


def defocus_blur(x: Tensor, generators: Generators, radius: float, deviation: float) -> Tensor:
    """Convolve with a disk that is itself blurred."""
    reach, blurred = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    squares = torch.arange(-reach, reach + 1, dtype=x.dtype) ** 2
    disk = (squares[:, None] + squares <= radius**2).to(x)
    kernel = _gaussian(disk[None, None] / disk.sum(), deviation, blurred, repeat=0)
    rows, columns = (_reflect(torch.arange(-reach, n + reach), n, 0) for n in x.shape[2:])
    size = (len(rows), len(columns))
    spectrum = torch.fft.rfft2(x[:, :, rows[:, None], columns]) * torch.fft.rfft2(kernel, size)
    return torch.fft.irfft2(spectrum, size)[..., 2 * reach :, 2 * reach :]


def glass_blur(
    x: Tensor, generators: Generators, deviation: float, reach: float, rounds: float
) -> Tensor:
    """Blur, copy neighbours into pixels, and blur again.

    The published loop, from the last pixel to the first, means to swap pixels; in NumPy it copies,
    and a neighbour that comes first has its new value by then. So a pixel's value is found along a
    chain of neighbours, at an old pixel (number + H * W); links double in length until it ends.
    """
    height, width = x.shape[2:]
    count, reach, width_of_blur = height * width, round(reach), int(4 * deviation + 0.5)
    x = _truncate(_gaussian(x, deviation, width_of_blur))
    numbers, inside = torch.arange(count), torch.zeros(height, width, dtype=torch.bool)
    inside[reach + 1 : height - reach + 1, reach + 1 : width - reach + 1] = True
    for _ in range(round(rounds)):
        shifts = [torch.randint(-reach, reach, (2, count), generator=each) for each in generators]
        across, down = torch.stack(shifts, dim=1)
        chosen = torch.where(inside.flatten(), numbers + down * width + across, numbers)
        renewed = inside.flatten()[chosen] & (chosen > numbers)
        links = torch.cat([chosen + count * ~renewed, (numbers + count).expand_as(chosen)], dim=1)
        while (links[:, :count] < count).any():
            links = links.gather(1, links)
        x = _take(x, links[:, :count] - count)
    return _gaussian(x, deviation, width_of_blur)


def motion_blur(x: Tensor, generators: Generators, radius: float, deviation: float) -> Tensor:
    """Blur in a direction within 45° of the horizontal."""
    return _motion(x, radius, deviation, 90 * _draw(torch.rand, generators, 1) - 45)


def _motion(x: Tensor, radius: float, deviation: float, degrees: Tensor) -> Tensor:
    """Blur with half a Gaussian in a direction for each image, (B, 1), as ImageMagick does."""
    height, width = x.shape[2:]
    steps = torch.arange(2 * math.ceil(radius) + 1).to(x)
    weights = (-((steps / deviation) ** 2) / 2).exp()
    steps, weights = steps[weights > 1e-6], weights[weights > 1e-6]  # others do not show
    angle, total = degrees.deg2rad(), torch.zeros_like(x)
    downs, acrosses = ((steps * part - 0.5).ceil().long().mT for part in (angle.sin(), angle.cos()))
    for weight, down, across in zip(weights / weights.sum(), downs, acrosses, strict=True):
        rows = (torch.arange(height) + down[:, None]).clamp(0, height - 1)
        columns = (torch.arange(width) + across[:, None]).clamp(0, width - 1)
        total += weight * _take(x, rows[:, :, None] * width + columns[:, None])
    return _truncate(total)


def zoom_blur(x: Tensor, generators: Generators, count: float, largest: float) -> Tensor:
    """Average the image with enlarged ones."""
    # The published factors are a little above these numbers, which decides how some are rounded.
    factors = torch.linspace(1, largest + 1e-9, round(count), dtype=torch.float64).tolist()
    return (x + sum(_zoom(x, factor) for factor in factors)) / (len(factors) + 1)


def _zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge the centre of images, bilinear, as scipy.ndimage.zoom does."""
    size = x.shape[2:]
    kept = [math.ceil(round(n / factor, 9)) for n in size]
    enlarged = [round(factor * n) for n in kept]
    x = F.interpolate(_centre(x, kept), enlarged, mode="bilinear", align_corners=True)
    return _centre(x, size)


def _centre(x: Tensor, size: Sequence[int]) -> Tensor:
    top, left = ((n - part) // 2 for n, part in zip(x.shape[2:], size, strict=True))
    return x[..., top : top + size[0], left : left + size[1]]


def snow(x: Tensor, generators: Generators, *values: float) -> Tensor:
    """Whiten the image and add flakes: noise that is enlarged, cut off and blurred by motion."""
    mean, deviation, zoom, threshold, radius, blur, kept = values
    flakes = _zoom(mean + deviation * _draw(torch.randn, generators, 1, *x.shape[2:]), zoom)
    flakes = _truncate(flakes.masked_fill(flakes < threshold, 0))
    flakes = _motion(flakes, radius, blur, 90 * _draw(torch.rand, generators, 1) - 135)
    luma = x.new_tensor([0.299, 0.587, 0.114]) if x.shape[1] == 3 else x.new_ones(x.shape[1])
    grey = torch.einsum("bchw,c->bhw", x, luma / luma.sum())[:, None]
    x = kept * x + (1 - kept) * x.maximum(1.5 * grey + 0.5)
    return x + flakes + flakes.rot90(2, (2, 3))


def frost(x: Tensor, generators: Generators, kept: float, ice: float) -> Tensor:
    """Lay a fractal with stars of six needles over the image, bluish if it has three channels."""
    length, degrees = max(1, min(x.shape[2:]) / 10), 60 * _draw(torch.rand, generators, 1)
    stars = (_draw(torch.rand, generators, 1, *x.shape[2:]) < 0.05 / length).to(x)
    turned = [_motion(stars, 3 * length, length, degrees + 60 * turn) for turn in range(6)]
    needles = _zoom(torch.stack(turned).amax(dim=0) * length, max(1, length / 10))
    layer = (0.9 * _plasma(x, generators, 1.5) + 0.7 * needles).clamp(max=1)
    colour = x.new_tensor([0.85, 0.95, 1]) if x.shape[1] == 3 else x.new_ones(x.shape[1])
    return kept * x + ice * layer * colour[:, None, None]


def fog(x: Tensor, generators: Generators, amount: float, decay: float) -> Tensor:
    """Add a fractal, and scale the image to its former maximum."""
    largest = x.amax(dim=(1, 2, 3), keepdim=True)
    return (x + amount * _plasma(x, generators, decay)) * largest / (largest + amount)


def _plasma(x: Tensor, generators: Generators, decay: float) -> Tensor:
    """Draw a fractal for each image with the diamond-square algorithm: (B, 1, H, W), 0 to 1."""
    step = 1 << (max(x.shape[2:]) - 1).bit_length()
    drawn = 2 * _draw(torch.rand, generators, step, step) - 1
    field, amplitude = torch.zeros_like(drawn), 1.0
    while step >= 2:
        half = step // 2
        near, mid = slice(None, None, step), slice(half, None, step)
        corners, noise = field[:, near, near], amplitude**2 * drawn
        pairs = corners + corners.roll(-1, 1)
        field[:, mid, mid] = (pairs + pairs.roll(-1, 2)) / 4 + noise[:, mid, mid]
        centres, across = field[:, mid, mid], corners + corners.roll(-1, 2)
        field[:, near, mid] = (centres + centres.roll(1, 1) + across) / 4 + noise[:, near, mid]
        field[:, mid, near] = (centres + centres.roll(1, 2) + pairs) / 4 + noise[:, mid, near]
        step, amplitude = half, amplitude / decay
    field = field - field.amin(dim=(1, 2), keepdim=True)
    field = field / field.amax(dim=(1, 2), keepdim=True).clamp(min=1e-30)
    return field[:, None, : x.shape[2], : x.shape[3]]


def brightness(x: Tensor, generators: Generators, amount: float) -> Tensor:
    """Increase the value of hue, saturation and value."""
    value = x.amax(dim=1, keepdim=True)
    raised = (value + amount).clamp(max=1)
    return torch.where(value > 0, x * raised / value.clamp(min=1e-9), raised)


def contrast(x: Tensor, generators: Generators, factor: float) -> Tensor:
    """Move each value towards the mean of its channel."""
    return x.mean(dim=(2, 3), keepdim=True).lerp(x, factor)


def elastic(
    x: Tensor, generators: Generators, length: float, deviation: float, shift: float
) -> Tensor:
    """Move three points, then each pixel by a smooth field; in fractions of the shorter side."""
    side, (height, width) = min(x.shape[2:]), x.shape[2:]
    corners, centre = x.new_tensor([[1, 1], [1, -1], [-1, -1]]), (width // 2, height // 2)
    points = corners * max(1, side // 3) + x.new_tensor(centre)
    moved = points + shift * side * (2 * _draw(torch.rand, generators, 3, 2) - 1)
    affine = torch.cat([moved, torch.ones_like(moved[..., :1])], dim=-1)
    back = torch.linalg.solve(affine, points.expand_as(moved))
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack([columns, rows, torch.ones_like(rows)], dim=-1).to(x)
    x = _bilinear(x, torch.einsum("hwk,bkc->bhwc", places, back), repeat=0)
    drawn = 2 * _draw(torch.rand, generators, 2, height, width) - 1
    field = _gaussian(drawn, deviation * side, int(3 * deviation * side + 0.5), repeat=1)
    return _bilinear(x, places[..., :2] + length * side * field.movedim(1, -1), repeat=1)


def pixelate(x: Tensor, generators: Generators, fraction: float) -> Tensor:
    """Shrink and enlarge with Pillow's box filter."""
    height, width = x.shape[2:]
    small = max(1, int(fraction * width)), max(1, int(fraction * height))
    box = Image.Resampling.BOX
    return _by_pillow(x, lambda image: image.resize(small, box).resize((width, height), box))


def jpeg(x: Tensor, generators: Generators, quality: float) -> Tensor:
    """Compress with Pillow."""

    def compress(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=round(quality))
        return Image.open(file)

    return _by_pillow(x, compress)


def _by_pillow(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Change images with Pillow; unless there are three channels, each on its own."""
    colour = x.shape[1] == 3
    pixels = (255 * x).round().to(torch.uint8)
    images = pixels.movedim(1, -1) if colour else pixels.flatten(0, 1)
    changed = [np.asarray(change(Image.fromarray(image))) for image in images.numpy()]
    stacked = torch.from_numpy(np.stack(changed)).to(x) / 255
    return stacked.movedim(-1, 1) if colour else stacked.view_as(x)


def _draw(sample: Callable[..., Tensor], generators: Generators, *shape: int) -> Tensor:
    """Draw numbers of a shape for each image: (B, *shape)."""
    return torch.stack([sample(shape, generator=each, dtype=torch.float64) for each in generators])


def _truncate(x: Tensor) -> Tensor:
    """Cut values to 0 to 1, and down to a 255th; 1e-6 makes up for rounding errors."""
    return (255 * x.clamp(0, 1) + 1e-6).floor() / 255


def _take(x: Tensor, places: Tensor) -> Tensor:
    """Replace each pixel by the one with a number: places (B, H, W) or (B, H * W), int64."""
    return x.flatten(2).gather(2, places.flatten(1)[:, None].expand(-1, x.shape[1], -1)).view_as(x)


def _bilinear(x: Tensor, places: Tensor, repeat: int) -> Tensor:
    """Interpolate at columns and rows (B, H, W, 2), reflected as in `_reflect`."""
    size = places.new_tensor(x.shape[2:]).flip(0)
    grid = (2 * places + repeat) / (size - 1 + repeat).clamp(min=1) - 1
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=not repeat)


def _gaussian(x: Tensor, deviation: float, reach: int, repeat: int | None = None) -> Tensor:
    """Blur images; the border is reflected as in `_reflect`, or continued without `repeat`."""
    steps = torch.arange(-reach, reach + 1).to(x)
    kernel, weights = (-((steps / max(deviation, 1e-9)) ** 2) / 2).exp(), []
    for size in x.shape[2:]:
        places = torch.arange(size)[:, None] + torch.arange(-reach, reach + 1)
        places = places.clamp(0, size - 1) if repeat is None else _reflect(places, size, repeat)
        matrix = torch.zeros(size, size, dtype=x.dtype)
        weights.append(matrix.scatter_add(1, places, (kernel / kernel.sum()).expand(size, -1)))
    return weights[0] @ x @ weights[1].mT


def _reflect(places: Tensor, size: int, repeat: int) -> Tensor:
    """Reflect indices back inside, the border pixel repeated (1) or not (0), as often as needed."""
    period = max(1, 2 * (size - 1 + repeat))
    places = places % period
    return places.minimum(period - repeat - places)
