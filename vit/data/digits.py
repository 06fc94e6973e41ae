"""scikit-learn's digits: 1,797 handwritten digits of 8 x 8 pixels, which come with the package."""

import numpy as np
import torch

from vit.data.config import DataConfig
from vit.data.installed import require_package
from vit.data.listing import Source
from vit.data.splits import fraction_per_class

TEST_FRACTION = 0.2
BRIGHTEST = 16  # pixel values are 0 to 16: how many of 4 x 4 smaller pixels are ink


def read_digits(data: DataConfig, train: bool) -> Source:
    """Read the training images, or the test images: a fifth of each digit, always the same.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    require_package("digits", "sklearn", "scikit-learn")
    from sklearn.datasets import load_digits  # imported late because it is optional

    raw = load_digits()
    images = torch.from_numpy(np.round(raw.images * 255 / BRIGHTEST).astype(np.uint8))[:, None]
    labels = torch.from_numpy(raw.target).long()
    chosen = torch.full((len(labels),), train)
    chosen[fraction_per_class(labels, TEST_FRACTION, 0, "digits")] = not train
    return Source(images[chosen], labels[chosen], tuple(str(name) for name in raw.target_names))
