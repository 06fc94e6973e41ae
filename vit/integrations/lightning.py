"""Logging for the Attention tab from Lightning."""

from dataclasses import asdict
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn

from vit.explain.maps import layout_of
from vit.integrations import AttentionLog
from vit.model.attention_model import attention_model, require_attention


class AttentionCallback(AttentionLog, Callback):  # type: ignore[misc]
    """Logs the attention of the model of this project or of timm in a LightningModule."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Raise a ValueError if nothing could be logged; a `fast_dev_run` has no loggers."""
        if not trainer.fast_dev_run and not _writers(trainer):
            raise ValueError("AttentionCallback needs a trainer with a TensorBoardLogger")
        self.trained = self.model or _trained(pl_module)
        self.start(self.trained, _read)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log to the trainer's first TensorBoardLogger if the step is due."""
        for writer in _writers(trainer)[:1]:
            writer = writer if trainer.is_global_zero else None
            self.add(writer, self.trained, trainer.global_step, _read)


def _writers(trainer: Any) -> list[Any]:
    return [log.experiment for log in trainer.loggers if isinstance(log, TensorBoardLogger)]


def _trained(module: nn.Module) -> nn.Module:
    """Return the model in a module whose attention can be read; of several, the trained one."""
    readable = {name: part for name, part in module.named_modules() if attention_model(part)}
    inner = {part for model in readable.values() for part in [*model.modules()][1:]}
    models = {name: model for name, model in readable.items() if model not in inner}
    trained = {k: v for k, v in models.items() if any(p.requires_grad for p in v.parameters())}
    first, *others = trained or models or {"": module}
    if others:
        raise ValueError(
            f"{', '.join([first, *others])} are all trained; choose the one to log, for example "
            f"AttentionCallback(..., model=module.{first}), or freeze the others"
        )
    return module.get_submodule(first)


def _read(model: nn.Module, inputs: Tensor) -> dict[str, Any]:
    reader = require_attention(model)
    logits, weights, _ = reader.forward_intermediates(inputs)
    layout = layout_of(reader, *inputs.shape[-2:])
    has_head = getattr(model, "num_classes", 1) != 0  # else it returns features, for a head outside
    return {"weights": weights, "logits": logits if has_head else None, **asdict(layout)}
