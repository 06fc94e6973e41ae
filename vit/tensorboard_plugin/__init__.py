"""The Attention tab of TensorBoard: the plugin, and the function that logs what it shows.

TensorBoard imports this package whenever it starts, so torch is imported only by those who log.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit.tensorboard_plugin.summary import add_attention

__all__ = ["add_attention"]


def __getattr__(name: str) -> Any:
    if name != "add_attention":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vit.tensorboard_plugin.summary import add_attention

    return add_attention
