"""Logging for the Attention tab from Lightning, https://lightning.ai."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vit.explain.maps import readout_of
from vit.integrations import AttentionLog
from vit.model.attention_model import prefix_names, require_attention

try:
    from lightning.pytorch import Callback
except ImportError:
    raise ImportError("vit.integrations.lightning: run pip install lightning") from None


class AttentionCallback(AttentionLog, Callback):  # type: ignore[misc]
    """Logs the attention of a model of this project or of timm to the trainer's TensorBoardLogger.

    Args:
        images: See `AttentionLog`, like the other arguments.
        find: Returns the model in a LightningModule.
    """

    def __init__(
        self, images: Tensor, find: Callable[[Any], nn.Module] = lambda x: x.model, **options: Any
    ) -> None:
        super().__init__(images, **options)
        self.find = find

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log if the step is due."""
        if trainer.is_global_zero:
            writer, step = trainer.logger.experiment, trainer.global_step
            self.add(writer, self.find(pl_module), step, _read)


def _read(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    readable = require_attention(model)
    logits, weights, _ = readable.forward_intermediates(inputs)
    return {
        "weights": weights, "logits": logits, "readout": readout_of(readable),
        "grid": readable.patch_embed.grid(*inputs.shape[-2:]),
        "num_prefix_tokens": readable.num_prefix_tokens, "prefix_names": prefix_names(model),
    }  # fmt: skip
