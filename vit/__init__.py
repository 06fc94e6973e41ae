"""Vision Transformers trained from scratch, with attention you can inspect.

The names below are imported when they are first used, so `import vit` is fast.
"""

import importlib

TYPE_CHECKING = False  # as in typing, whose import takes longest of all here
if TYPE_CHECKING:
    from vit.classifier import Classifier
    from vit.explain.rollout import attention_rollout
    from vit.model.attention import MultiHeadSelfAttention, scaled_dot_product_attention
    from vit.model.variants import load_attention
    from vit.model.vit import VisionTransformer
    from vit.model_file import load
    from vit.training.config import Config

__version__ = "0.1.0"

_MODULES = {
    "Classifier": "vit.classifier",
    "Config": "vit.training.config",
    "load": "vit.model_file",
    "attention_rollout": "vit.explain.rollout",
    "MultiHeadSelfAttention": "vit.model.attention",
    "scaled_dot_product_attention": "vit.model.attention",
    "VisionTransformer": "vit.model.vit",
    "load_attention": "vit.model.variants",
}

__all__ = [
    "Classifier",
    "Config",
    "MultiHeadSelfAttention",
    "VisionTransformer",
    "attention_rollout",
    "load",
    "load_attention",
    "scaled_dot_product_attention",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
