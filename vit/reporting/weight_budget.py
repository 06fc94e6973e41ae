"""How many images can have their attention weights in the records of the Attention tab."""

import torch
from torch import Tensor, nn

from vit.model.attention_model import require_attention
from vit.tensorboard_plugin.records import MAX_WEIGHTS

WEIGHT_BYTES = 256_000_000  # of the attention weights of a run, one byte each, uncompressed


@torch.no_grad()
def count_weights(model: nn.Module, image: Tensor) -> int:
    """Count the attention weights of an image, L * H * N * N.

    Args:
        model: In evaluation mode, with maps.
        image: (1, channels, H, W), normalized, on the model's device.
    """
    _, weights, _ = require_attention(model).forward_intermediates(image)
    return sum(layer.numel() for layer in weights)


def images_with_weights(num_weights: int, count: int, steps: int = 1) -> int:
    """Return how many of `count` images can have their attention weights logged at so many steps.

    Args:
        num_weights: Of an image, see `count_weights`.
        count: Number of images.
        steps: Number of steps.
    """
    if num_weights > MAX_WEIGHTS:
        return 0
    return min(count, WEIGHT_BYTES // (num_weights * steps))


def left_out_text(weighted: int, count: int) -> str:
    """Say that not all images have attention weights in the Attention tab."""
    return (
        f"the Attention tab has the attention weights of {weighted} of {count} images (at most "
        f"{WEIGHT_BYTES / 1e6:.0f} MB in all and {MAX_WEIGHTS / 1e6:.3g} MB for each, before "
        "compression), and the maps of all"
    )
