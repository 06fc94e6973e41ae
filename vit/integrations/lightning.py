"""Logging for the Attention tab from Lightning."""

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from vit.explain.maps import readout_of
from vit.integrations import AttentionLog
from vit.model.attention_model import attention_model, require_attention


class AttentionCallback(AttentionLog, Callback):  # type: ignore[misc]
    """Logs the attention of the model of this project or of timm in a LightningModule."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise a ValueError if a trainer that is no `fast_dev_run` has no TensorBoardLogger."""
        if not trainer.fast_dev_run and not _writers(trainer):
            raise ValueError("AttentionCallback needs a trainer with a TensorBoardLogger")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log to the trainer's first TensorBoardLogger if the step is due."""
        for writer in _writers(trainer)[:1] if trainer.is_global_zero else ():
            self.add(writer, pl_module, trainer.global_step, _read)


def _writers(trainer: Any) -> list[Any]:
    return [each.experiment for each in trainer.loggers if isinstance(each, TensorBoardLogger)]


def _read(module: nn.Module, inputs: Tensor) -> dict[str, Any]:
    model = next((part for part in module.modules() if attention_model(part) is not None), module)
    reader = require_attention(model)
    logits, weights, _ = reader.forward_intermediates(inputs)
    return {
        "weights": weights, "logits": logits, "readout": readout_of(reader),
        "grid": reader.patch_embed.grid(*inputs.shape[-2:]),
        "num_prefix_tokens": reader.num_prefix_tokens,
    }  # fmt: skip
