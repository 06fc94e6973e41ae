"""Model settings shared by several tests."""

from typing import Any

import torch

from vit.classifier import Classifier
from vit.data.preprocess import Preprocess
from vit.model.vit import VisionTransformer

# The plain Vision Transformer with timm's defaults, for images with three channels.
PLAIN: dict[str, Any] = {
    "in_chans": 3,
    "stem": "linear",
    "mlp_ratio": 4.0,
    "mlp_conv": False,
    "zero_init": False,
    "class_token": True,
    "global_pool": "token",
}


def grey_classifier() -> Classifier:
    """Build an untrained classifier of grey images that are not square."""
    torch.manual_seed(0)
    sizes = {"img_size": (16, 24), "num_classes": 3, "embed_dim": 12, "depth": 2}
    model = VisionTransformer(**PLAIN | sizes | {"in_chans": 1}).eval()
    preprocess = Preprocess((16, 24), (0.5,), (0.25,))
    return Classifier(model, preprocess, ("a", "b", "c"), torch.device("cpu"), torch.float32)
