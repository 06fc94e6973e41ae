"""How severe each corruption of `vit.data.corruptions` is; imported without SciPy."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Corruption:
    """A corruption of ImageNet-C, by the function of its name in `vit.data.corruptions`.

    A parameter is a row of five severities, with the published values for images of 32 and 224
    pixels (hendrycks/robustness, make_cifar_c.py and make_imagenet_c.py).
    """

    group: Literal["noise", "blur", "weather", "digital"]  # in arXiv 1903.12261
    at_32: tuple[tuple[float, ...], ...]
    at_224: tuple[tuple[float, ...], ...]


CORRUPTIONS = {
    "gaussian_noise": Corruption(
        "noise", ((0.04, 0.06, 0.08, 0.09, 0.1),), ((0.08, 0.12, 0.18, 0.26, 0.38),)
    ),
    "shot_noise": Corruption("noise", ((500, 250, 100, 75, 50),), ((60, 25, 12, 5, 3),)),
    "impulse_noise": Corruption(
        "noise", ((0.01, 0.02, 0.03, 0.05, 0.07),), ((0.03, 0.06, 0.09, 0.17, 0.27),)
    ),
    "defocus_blur": Corruption(
        "blur", ((0.3, 0.4, 0.5, 1, 1.5), (0.4, 0.5, 0.6, 0.2, 0.1)),
        ((3, 4, 6, 8, 10), (0.1, 0.5, 0.5, 0.5, 0.5)),
    ),
    "glass_blur": Corruption(
        "blur", ((0.05, 0.25, 0.4, 0.25, 0.4), (1, 1, 1, 1, 1), (1, 1, 1, 2, 2)),
        ((0.7, 0.9, 1, 1.1, 1.5), (1, 2, 2, 3, 4), (2, 1, 3, 2, 2)),
    ),
    "motion_blur": Corruption(
        "blur", ((6, 6, 6, 8, 9), (1, 1.5, 2, 2, 2.5)), ((10, 15, 15, 15, 20), (3, 5, 8, 12, 15))
    ),
    "zoom_blur": Corruption(
        "blur", ((7, 12, 16, 21, 26), (1.06, 1.11, 1.15, 1.2, 1.25)),
        ((12, 16, 11, 13, 11), (1.11, 1.15, 1.2, 1.24, 1.3)),
    ),
    "snow": Corruption(
        "weather",
        ((0.1, 0.1, 0.15, 0.25, 0.3), (0.2, 0.2, 0.3, 0.3, 0.3), (1, 1, 1.75, 2.25, 1.25),
         (0.6, 0.5, 0.55, 0.6, 0.65), (8, 10, 10, 12, 14), (3, 4, 4, 6, 12),
         (0.95, 0.9, 0.9, 0.85, 0.8)),
        ((0.1, 0.2, 0.55, 0.55, 0.55), (0.3, 0.3, 0.3, 0.3, 0.3), (3, 2, 4, 4.5, 2.5),
         (0.5, 0.5, 0.9, 0.85, 0.85), (10, 12, 12, 12, 12), (4, 4, 8, 8, 12),
         (0.8, 0.7, 0.7, 0.65, 0.55)),
    ),
    "frost": Corruption(
        "weather", ((1, 1, 0.9, 0.85, 0.75), (0.2, 0.3, 0.4, 0.4, 0.45)),
        ((1, 0.8, 0.7, 0.65, 0.6), (0.4, 0.6, 0.7, 0.7, 0.75)),
    ),
    "fog": Corruption(
        "weather", ((0.2, 0.5, 0.75, 1, 1.5), (3, 3, 2.5, 2, 1.75)),
        ((1.5, 2, 2.5, 2.5, 3), (2, 2, 1.7, 1.5, 1.4)),
    ),
    "brightness": Corruption(
        "weather", ((0.05, 0.1, 0.15, 0.2, 0.3),), ((0.1, 0.2, 0.3, 0.4, 0.5),)
    ),
    "contrast": Corruption(
        "digital", ((0.75, 0.5, 0.4, 0.3, 0.15),), ((0.4, 0.3, 0.2, 0.1, 0.05),)
    ),
    "elastic": Corruption(  # fractions of the shorter side; the published ones are of 32 and 244
        "digital",
        ((0, 0.05, 0.08, 0.1, 0.1), (0, 0.2, 0.06, 0.04, 0.03), (0.08, 0.07, 0.06, 0.05, 0.03)),
        ((2.17857, 2.17857, 0.054464, 0.07625, 0.130714),
         (0.7625, 0.0871429, 0.0108929, 0.0108929, 0.0108929),
         (0.1089286, 0.217857, 0.0217857, 0.0217857, 0.0217857)),
    ),
    "pixelate": Corruption(
        "digital", ((0.95, 0.9, 0.85, 0.75, 0.65),), ((0.6, 0.5, 0.4, 0.3, 0.25),)
    ),
    "jpeg": Corruption("digital", ((80, 65, 58, 50, 40),), ((25, 18, 15, 10, 7),)),
}  # fmt: skip
