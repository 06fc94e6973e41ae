"""The state of a training run."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vit.classifier import build_model
from vit.console import note, say, shorten
from vit.data.images import ImageSet
from vit.data.layout import join
from vit.distributed.shard import gathered, needs_shards, shard, to_local
from vit.model.copying import copy_module
from vit.model.embed import image_conv, whiten
from vit.model.timm_model import classifier_layers
from vit.pretrained.adapt import Pretrained
from vit.run.checkpoint import Checkpoint
from vit.run.length import Length
from vit.run.sharded import read_tensors, stored_tensors
from vit.seeding import fold_in
from vit.training.optim import build_optimizers, set_lr
from vit.training.start import Run
from vit.training.teacher import warn_of_seen_images

WHITENING_IMAGES = 500  # training images whose patches whiten the stem
# Plain values of a TrainState.
COUNTS = ("step", "seconds", "flop", "skipped", "skipped_in_a_row", "unevaluated")


@dataclass
class TrainState:
    """The state of a run: everything that changes from step to step."""

    model: nn.Module
    optimizers: list[Optimizer]
    ema: Any = None  # moving average of the weights (timm's ModelEmaV3), or None
    step: int = 0  # optimizer steps done
    seconds: float = 0.0  # of training, including the time before the run was interrupted
    length: Length = field(default_factory=Length)  # of the run
    flop: float | None = 0.0  # of training so far, see `vit.training.flop`; None if unknown
    skipped: int = 0  # steps skipped because loss or gradient was not finite
    skipped_in_a_row: int = 0  # how many of the latest steps were skipped
    unevaluated: bool = False  # a signal broke off the evaluation at this step
    points: list[Tensor] = field(default_factory=list)  # loss and accuracy in the epoch, (2,) each
    frozen: bool = False  # only the head is trained, and the model is always in evaluation mode
    # A whole copy of a sharded model, with weights in the first process only; None if not sharded.
    copy: nn.Module | None = None

    def evaluated(self) -> nn.Module:
        """Return the model to evaluate, in evaluation mode: the moving average if there is one.

        If it is sharded, all processes have to call this, and the first one gets a whole copy.
        """
        model: nn.Module = self.model if self.ema is None else self.ema.module
        if self.copy is not None:
            model = gathered(model, self.copy)
        return model.eval()

    def structure(self) -> nn.Module:
        """Return a whole model in evaluation mode, with weights of any value."""
        return (self.model if self.copy is None else self.copy).eval()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, named as the fields of `Checkpoint`."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            **self.counts(),
        }

    def counts(self) -> dict[str, Any]:
        """Return what `tensors` leaves out: the counts, and the points as a tensor (N, 2)."""
        points = torch.stack(self.points) if self.points else torch.empty(0, 2)
        counts = {name: getattr(self, name) for name in COUNTS}
        return {**counts, **vars(self.length), "points": points}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; settings of the optimizers stay as configured."""
        self.model.load_state_dict(state["model"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            configured = [dict(group) for group in optimizer.param_groups]
            optimizer.load_state_dict(values)
            for group, settings in zip(optimizer.param_groups, configured, strict=True):
                group.update(settings, lr=group["lr"])
            for parameter, stored in optimizer.state.items():
                if any(v.numel() not in (1, parameter.numel()) for v in stored.values()):
                    raise ValueError("the state of an optimizer has other shapes than its weights")
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"] or state["model"])
        self._load_counts(state)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, the optimizers' by the names of their parameters."""
        named: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": v for name, v in self.ema.module.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for parameter, values in optimizer.state.items():
                for key, value in values.items():
                    tensors[f"optimizers.{number}.{key}.{named[parameter]}"] = value
        # Scalars cannot be sliced, so store them as vectors of length 1.
        return {name: value if value.ndim else value.view(1) for name, value in tensors.items()}

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint; called by all processes.

        Raises:
            ValueError, RuntimeError: The checkpoint has other tensors than the state.
        """
        if checkpoint.folder is None:
            self.load_state_dict(vars(checkpoint))
            return
        stored = stored_tensors(checkpoint.folder)
        moved = {name.split(".", 3)[3] for name in stored if name.startswith("optimizers.")}
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.zeros_like(parameter) if name in moved else None
        set_lr(self.optimizers, 0.0)
        for optimizer in self.optimizers:
            optimizer.step()  # moves nothing, but makes the tensors of its state
            optimizer.zero_grad(set_to_none=True)
        has_ema = any(name.startswith("ema.") for name in stored)
        left_out = () if has_ema else ("ema.",)
        wanted = {k: v for k, v in self.tensors().items() if not k.startswith(left_out)}
        read_tensors(checkpoint.folder, wanted)
        if self.ema is not None and not has_ema:  # the run began without
            self.ema.module.load_state_dict(self.model.state_dict())
        self._load_counts(vars(checkpoint))

    def _load_counts(self, state: dict[str, Any]) -> None:
        self.points = list(state["points"].to(next(self.model.parameters()).device))
        for name in COUNTS:
            setattr(self, name, state[name])
        vars(self.length).update({name: state[name] for name in vars(self.length)})

    def is_finite(self) -> bool:
        """Tell whether all weights and their moving averages are finite, in this process's part.

        A buffer may hold the -inf of a mask, but nothing undefined.
        """
        models = [self.model] if self.ema is None else [self.model, self.ema.module]
        weights = (to_local(weight) for model in models for weight in model.parameters())
        buffers = (buffer for model in models for buffer in model.buffers())
        finite = all(weight.isfinite().all() for weight in weights)
        return finite and not any(buffer.isnan().any() for buffer in buffers)


def _load_pretrained(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load weights, of which a new head has none; buffers of another size stay as built."""
    sizes = {key: buffer.shape for key, buffer in model.named_buffers()}
    if other := [key for key in weights.keys() & sizes if weights[key].shape != sizes[key]]:
        note(f"model.pretrained: new for images of this size: {join(sorted(other))}")
        weights = {key: weight for key, weight in weights.items() if key not in other}
    try:
        model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # such as a table of the user's attention for another grid
        raise ValueError(
            "model.pretrained: the weights do not fit a model for these images: "
            f"{shorten(error, 200)}; use images of the size that it was trained on"
        ) from None


def build_state(
    run: Run, classes: int, sample: Tensor | None = None, weights: dict[str, Tensor] | None = None
) -> TrainState:
    """Build the untrained state of a run; the same arguments give the same weights.

    A sample of training images (B, channels, H, W) uint8 whitens the first kernels.
    """
    config, world, device = run.config, run.world, run.device
    torch.manual_seed(fold_in(config.train.seed, "init"))
    model: Any = build_model(config.model, run.preprocess, classes)  # ours or timm's
    if sample is not None:
        first = image_conv(model, run.preprocess.channels)
        assert first is not None, "vit.training.start refuses it"
        whiten(first, run.preprocess.normalize(sample))
    if weights is not None:
        _load_pretrained(model, weights)
    frozen = config.train.freeze == "backbone"
    if frozen:
        model.requires_grad_(False)
        for head in classifier_layers(model):
            head.requires_grad_(True)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    # A head is small, and features are computed without the wrapper of a model.
    sharded = not frozen and needs_shards(config.train.parallel, world, device, num_weights)
    if not sharded:  # otherwise only a part of it goes to the device
        model.to(device)
    ema, complete = None, None
    if config.optim.ema_decay is not None:
        from timm.utils.model_ema import ModelEmaV3  # here, because importing timm takes seconds

        # Sharded weights and complete buffers cannot be updated in one operation.
        decay, masks = config.optim.ema_decay, any(b.isinf().any() for b in model.buffers())
        # The average of -inf and -inf would be NaN.
        ema = ModelEmaV3(model, decay, use_warmup=True, foreach=not sharded, exclude_buffers=masks)
    if sharded:
        complete = copy_module(model).to("cpu" if world.main else "meta")
        for part in [model] if ema is None else [model, ema.module]:
            shard(part, device, run.precision)
    optimizers = build_optimizers(model, config.optim, run.precision)
    return TrainState(model, optimizers, ema, frozen=frozen, copy=complete)


def start_state(run: Run, training: ImageSet, source: Pretrained | None) -> TrainState:
    """Build the state that training starts from: new, pretrained or resumed.

    Raises:
        ValueError: The checkpoint does not fit the model.
    """
    config, checkpoint = run.config, run.checkpoint
    weights, sample = None, None
    if source is not None and checkpoint is None:
        weights, account = source.adapted(training.classes)
        if run.world.main:
            say(account)
        if {*(source.classes or ())} & {*training.classes}:
            warn_of_seen_images("model.pretrained", source.name, source, config, training)
    elif config.train.whiten and checkpoint is None:  # pretrained weights bring their own kernels
        first = torch.arange(min(WHITENING_IMAGES, len(training)))
        sample = training.select(first).pixels().cpu()
    state = build_state(run, len(training.classes), sample, weights)
    if config.train.checkpoint_blocks:
        cast(Any, state.model).set_grad_checkpointing()
    if checkpoint is None:
        return state
    if checkpoint.folder is None and state.copy is not None:
        raise ValueError(
            f"train.parallel: {config.train.parallel} cannot resume the run in {config.out}, "
            "whose checkpoints are not sharded; resume it with --train.parallel replicate"
        )
    try:
        state.load_checkpoint(checkpoint)
    except Exception as error:  # a state of another form leads to all kinds
        raise ValueError(
            f"model.attention: the checkpoint of the run in {config.out} does not fit the "
            f"parameters of {config.model.attention} ({shorten(error, 200)}); restore the code it "
            "was trained with, or train in another folder with --out"
        ) from None
    for copied in (checkpoint.model, checkpoint.ema or {}, checkpoint.optimizers):
        copied.clear()  # or they would fill memory for the whole run
    return state
