"""Callbacks of other training loops, for the Attention tab; each needs the package of its name."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vit.console import shorten, warn
from vit.data.preprocess import Preprocess
from vit.reporting.add_attention import add_attention, check_reading
from vit.settings import require

HALF = (0.5, 0.5, 0.5)


class AttentionLog:
    """Logs the attention of a model for a few images, without changing its training.

    Args:
        images: (B, 3 or 1, height, width) uint8, of the size that the model takes.
        every: Number of optimizer steps from one log to the next.
        mean: Mean of each channel that the model's images are normalized with, 0 to 1.
        std: Standard deviation of each channel, likewise.
        model: The model to log, if a module contains several that are trained.
        **shown: Arguments of `add_attention`, such as labels and classes.
    """

    def __init__(
        self, images: Tensor, every: int = 100, mean: tuple[float, ...] = HALF,
        std: tuple[float, ...] = HALF,
        model: nn.Module | None = None, **shown: Any,
    ) -> None:  # fmt: skip
        require(every >= 1, "every", every, "at least 1")
        # A TypeError names what is unknown, or what the callback itself passes.
        inspect.signature(add_attention).bind_partial(None, images=images, step=0, **shown)
        size = (images.shape[-2], images.shape[-1])
        mean, std = (tuple(values)[: images.shape[1]] for values in (mean, std))
        self.inputs = Preprocess(size, mean, std).normalize(images)
        self.images, self.every, self.shown, self.last = images, every, shown, 0
        self.model = model

    def start(self, model: nn.Module, read: Callable[..., Any]) -> None:
        """Raise a ValueError if the attention of a model cannot be read."""
        self.last = 0
        try:
            check_reading(self.images, **{**self._see(model, read), **self.shown})
        except Exception as error:  # of many kinds, depending on the model
            reason = f"{type(model).__name__} cannot be logged: {shorten(error, 300)}"
            raise ValueError(f"{reason}; leave out AttentionCallback, or name a model=") from error

    def add(self, writer: Any, model: nn.Module, step: int, read: Callable[..., Any]) -> None:
        """Log at a step that is due; `read` returns what `add_attention` takes.

        All processes call this, because they may share the weights; one of them has a writer.
        """
        if step % self.every or step == self.last:  # the same in parts of an accumulated batch
            return
        self.last = step
        seen = self._see(model, read)
        if writer is None:
            return
        try:
            shown = {"tag": "attention", **seen, **self.shown}
            add_attention(writer, images=self.images, step=step, **shown)
        except ValueError as error:  # such as rows that do not sum to 1
            warn(f"the attention of step {step} is not logged: {error}")

    @torch.no_grad()
    def _see(self, model: nn.Module, read: Callable[..., Any]) -> Any:
        modes = {module: module.training for module in model.modules()}
        try:
            seen = read(model.eval(), self.inputs.to(next(model.parameters())))
            logits = seen.get("logits")
            if logits is not None and logits.shape[-1] < 2:  # which are no classes
                seen["logits"] = None
            return seen
        finally:
            for module, mode in modes.items():
                module.training = mode
