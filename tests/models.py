"""Model settings shared by several tests."""

from typing import Any

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
