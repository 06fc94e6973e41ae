"""The synthetic data set "shapes": ten kinds of object on textured clutter, drawn from a seed.

It needs no download, and comes with the masks of the objects, with which attention maps can be
compared. Position, size, rotation and colours are random: only the outline identifies the kind.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from vit.data.config import DATASETS, DataConfig
from vit.data.images import ImageSet
from vit.data.sampling import held_out_beside
from vit.seeding import fold_in

SIZE = DATASETS["shapes"].image_size[0]  # height and width of an image, pixels
SUBSAMPLES = 3  # sample points per pixel and axis; averaged for antialiased edges
CHUNK = 500  # images drawn at once; limits memory and fits into the CPU caches
RADIUS = (9.0, 13.0)  # range of the radius of the circle around an object, pixels
TRAINING, TEST = 10_000, 2_000  # images drawn


def read_shapes(data: DataConfig, train: bool) -> ImageSet:
    """Draw the test images, or the training images: no more than `data.train_size` needs."""
    part, count = ("train", TRAINING) if train else ("test", TEST)
    if train and data.train_size is not None:
        count = data.train_size + held_out_beside(data.train_size, data.val_size)
    images, labels, masks = draw_shapes(count, fold_in(0, "shapes", part))
    return ImageSet(images, labels, KINDS, masks)


def draw_shapes(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw images of random objects; on one machine, the same arguments give the same bytes.

    Returns:
        images: (count, 3, 32, 32) uint8, RGB.
        labels: (count,) int64, indices into KINDS in random order; counts differ by at most one.
        masks: (count, 32, 32) bool, True where the object covers at least half of the pixel.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.arange(count) % len(KINDS))[torch.randperm(count, generator=generator)]
    images = torch.empty(count, 3, SIZE, SIZE, dtype=torch.uint8)
    masks = torch.empty(count, SIZE, SIZE, dtype=torch.bool)
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        images[part], masks[part] = _draw_chunk(labels[part], generator)
    return images, labels, masks


def _draw_chunk(labels: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Return the images (n, 3, 32, 32) uint8 and masks (n, 32, 32) bool for labels (n,)."""
    count = len(labels)
    ground = torch.rand(count, 3, 1, 1, generator=generator)
    # About half of the circular colour range away in every channel: the object always stands out,
    # yet its colour alone is uniformly distributed and carries no information.
    colour = (ground + _uniform((count, 3, 1, 1), 0.35, 0.65, generator)) % 1
    thing = colour + 0.1 * _smooth_noise(count, 4, generator)
    alpha = _draw_coverage(labels, generator)
    image = torch.lerp(_draw_clutter(ground, generator), thing, alpha[:, None])
    image += 0.03 * torch.randn(image.shape, generator=generator)
    return (image.clamp_(0, 1) * 255).round_().to(torch.uint8), alpha >= 0.5


def _draw_coverage(labels: Tensor, generator: Generator) -> Tensor:
    """Return the fraction of each pixel that the object covers, (n, 32, 32), for labels (n,)."""
    shape = (len(labels), 1)
    radius = _uniform(shape, *RADIUS, generator)
    # One pixel of margin on every side, so that no object touches the border.
    centres = _uniform((2, *shape), radius + 1, SIZE - 1 - radius, generator)  # x and y
    angle = _uniform(shape, 0, 2 * math.pi, generator)
    grid = (torch.arange(SIZE * SUBSAMPLES) + 0.5) / SUBSAMPLES
    across, down = (grid - centres) / radius
    coverage = torch.empty(len(labels), SIZE, SIZE)
    for kind, inside in enumerate(_OUTLINES.values()):
        rows = labels == kind
        dx, dy, cos, sin = (part[rows] for part in (across, down, angle.cos(), angle.sin()))
        x = (cos * dx)[:, None, :] + (sin * dy)[:, :, None]
        y = (cos * dy)[:, :, None] - (sin * dx)[:, None, :]
        samples = (inside(x, y) > 0).float()[:, None]
        coverage[rows] = F.avg_pool2d(samples, SUBSAMPLES)[:, 0]
    return coverage


def _draw_clutter(ground: Tensor, generator: Generator) -> Tensor:
    """Return textured backgrounds (n, 3, 32, 32) around the ground colours (n, 3, 1, 1)."""
    count = len(ground)
    clutter = ground + 0.2 * _smooth_noise(count, 7, generator)
    pixel = torch.arange(SIZE) + 0.5
    for _ in range(4):
        x, y = _uniform((2, count, 1, 1), 0, SIZE, generator)
        angle = _uniform((count, 1, 1), 0, math.pi, generator)
        half_length = _uniform((count, 1, 1), 1, 12, generator)
        half_width = _uniform((count, 1, 1), 0.5, 2.5, generator)
        dx, dy = pixel - x, pixel[:, None] - y
        along = dx * angle.cos() + dy * angle.sin()
        across = dy * angle.cos() - dx * angle.sin()
        depth = torch.minimum(half_length - along.abs(), half_width - across.abs())
        # Blended by at most one half, so that no bar can be mistaken for the object.
        alpha = 0.5 * (depth + 0.5).clamp(0, 1)[:, None]
        clutter = torch.lerp(clutter, torch.rand(ground.shape, generator=generator), alpha)
    return clutter


def _smooth_noise(count: int, cells: int, generator: Generator) -> Tensor:
    """Return noise (count, 3, 32, 32) in [-1, 1] that varies over about 32 / cells pixels."""
    coarse = _uniform((count, 3, cells, cells), -1, 1, generator)
    return F.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear", align_corners=True)


def _uniform(
    shape: tuple[int, ...], low: float | Tensor, high: float | Tensor, generator: Generator
) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)


# Outlines are positive inside. x and y are coordinates in which an object just fits the unit
# circle. The proportions keep the kinds distinguishable at 9 pixels radius.


def _fold(x: Tensor, y: Tensor, sectors: int) -> tuple[Tensor, Tensor]:
    """Rotate and mirror every point into the half sector above the x axis."""
    width = 2 * math.pi / sectors
    angle = torch.remainder(torch.atan2(y, x) + width / 2, width) - width / 2
    radius = torch.hypot(x, y)
    return radius * angle.cos(), (radius * angle.sin()).abs()


def _polygon(x: Tensor, y: Tensor, sides: int) -> Tensor:
    return math.cos(math.pi / sides) - _fold(x, y, sides)[0]


def _disc(x: Tensor, y: Tensor, radius: float) -> Tensor:
    return radius**2 - x * x - y * y


def _box(x: Tensor, y: Tensor, half_width: float, half_height: float) -> Tensor:
    return torch.minimum(half_width - x.abs(), half_height - y.abs())


def _star(x: Tensor, y: Tensor) -> Tensor:
    x, y = _fold(x, y, 5)
    notch_x, notch_y = 0.4 * math.cos(math.pi / 5), 0.4 * math.sin(math.pi / 5)
    return notch_y * (1 - x) - (1 - notch_x) * y  # left of the edge from the tip to the notch


def _heart(x: Tensor, y: Tensor) -> Tensor:
    x, y = 1.2 * x, 1.2 * y + 0.36  # puts the middle of the heart at the origin
    return 1 - x * x - (1.2 * y - x.abs().sqrt()) ** 2


def _arrow(x: Tensor, y: Tensor) -> Tensor:
    head = torch.minimum(x, 0.85 * (1 - x) - y.abs())
    return torch.maximum(head, _box(x + 0.45, y, 0.5, 0.2))


_OUTLINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "circle": lambda x, y: _disc(x, y, 1),
    "square": lambda x, y: _polygon(x, y, 4),
    "triangle": lambda x, y: _polygon(x, y, 3),
    "star": _star,
    "cross": lambda x, y: torch.maximum(_box(x, y, 0.96, 0.24), _box(x, y, 0.24, 0.96)),
    "ring": lambda x, y: torch.minimum(_disc(x, y, 1), -_disc(x, y, 0.6)),
    "heart": _heart,
    "crescent": lambda x, y: torch.minimum(_disc(x, y, 1), -_disc(x - 0.4, y, 0.8)),
    "arrow": _arrow,
    "hexagon": lambda x, y: _polygon(x, y, 6),
}
KINDS: tuple[str, ...] = tuple(_OUTLINES)
