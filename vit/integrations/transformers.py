"""Logging for the Attention tab from the Trainer of transformers."""

from typing import Any

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback

from vit.integrations import AttentionLog

# Classifiers that read the mean of the patches, without a setting that says so.
MEANS = ("CLIPForImageClassification", "MetaClip2ForImageClassification")


class AttentionCallback(AttentionLog, TrainerCallback):  # type: ignore[misc]
    """Logs the attention of a Vision Transformer of transformers; see `AttentionLog`."""

    def __init__(self, writer: SummaryWriter, images: Tensor, **options: Any) -> None:
        super().__init__(images, **options)
        self.writer = writer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Raise a ValueError if the model is not one of those that return attention."""
        self.start(self.model or kwargs["model"], _read)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log if the step is due."""
        writer = self.writer if state.is_world_process_zero else None
        self.add(writer, self.model or kwargs["model"], state.global_step, _read)


def _read(model: Any, inputs: Tensor) -> dict[str, Any]:
    kernel = model.config._attn_implementation
    model.set_attn_implementation("eager")  # others do not return weights
    try:
        output = model(pixel_values=inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(kernel)
    config = getattr(model.config, "vision_config", model.config)
    grid = tuple(n // config.patch_size for n in inputs.shape[-2:])
    prefix = output.attentions[0].shape[-1] - grid[0] * grid[1]
    mean = prefix == 0 or getattr(config, "use_mean_pooling", False)
    mean = mean or type(model).__name__ in MEANS
    return {
        "weights": output.attentions, "logits": output.get("logits"), "grid": grid,
        "num_prefix_tokens": prefix, "readout": "mean" if mean else "class_token",
    }  # fmt: skip
