"""Vision Transformers trained from scratch, with attention you can inspect.

The names below are imported when they are first used, so `import vit` is fast.
"""

import importlib

TYPE_CHECKING = False  # as in typing, whose import takes longest of all here
if TYPE_CHECKING:
    from vit.classifier import Classifier as Classifier
    from vit.commands.check import check as check
    from vit.commands.export import export as export
    from vit.commands.report import evaluate as evaluate
    from vit.commands.train import train as train
    from vit.config import Config as Config
    from vit.explain.rollout import attention_rollout as attention_rollout
    from vit.model.attention import MultiHeadSelfAttention as MultiHeadSelfAttention
    from vit.model.attention import causal_mask as causal_mask
    from vit.model.attention import padding_mask as padding_mask
    from vit.model.attention import scaled_dot_product_attention as scaled_dot_product_attention
    from vit.model.attention_model import require_attention as require_attention
    from vit.model.variants import load_attention as load_attention
    from vit.model.vit import VisionTransformer as VisionTransformer
    from vit.pretrained.load import load as load
    from vit.reporting.add_attention import add_attention as add_attention

__version__ = "1.0.1"

_MODULES = {
    "Classifier": "vit.classifier",
    "Config": "vit.config",
    "load": "vit.pretrained.load",
    "train": "vit.commands.train",
    "evaluate": "vit.commands.report",
    "export": "vit.commands.export",
    "check": "vit.commands.check",
    "add_attention": "vit.reporting.add_attention",
    "attention_rollout": "vit.explain.rollout",
    "MultiHeadSelfAttention": "vit.model.attention",
    "causal_mask": "vit.model.attention",
    "padding_mask": "vit.model.attention",
    "scaled_dot_product_attention": "vit.model.attention",
    "VisionTransformer": "vit.model.vit",
    "load_attention": "vit.model.variants",
    "require_attention": "vit.model.attention_model",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
