"""The config of a run, composed of the settings of its parts; imported without torch.

A value that is not allowed raises ValueError with one line. `vit.training.start` checks the model.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from vit import settings
from vit.data.config import AugmentConfig, DataConfig
from vit.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer."""

    name: str  # of a class in torch.optim, which takes parameter groups and `lr`
    arguments: dict[str, Any] = field(default_factory=dict)  # its other arguments
    muon: bool = False  # whether Muon replaces it for the matrices of stem and blocks


OPTIMIZERS = {
    "adamw": OptimizerSpec("AdamW", {"fused": True}),
    "muon": OptimizerSpec("AdamW", {"fused": True}, muon=True),
}

OptimizerName: TypeAlias = Literal[*OPTIMIZERS]  # type: ignore[valid-type]

# Keys in files of earlier versions.
RETIRED = (("model", "attn_kernel"), ("train", "restarts"), ("track", "max_cost"))


@settings.group("optim")
class OptimConfig:
    """The optimizer, the learning rate schedule and the loss.

    Attributes:
        name: optimizer: adamw for all parameters, or muon for the weight matrices of stem and
            encoder blocks and adamw for the rest
        lr: peak learning rate of AdamW
        weight_decay: weight decay of AdamW; not of norms, biases, tokens and positions
            at the input
        muon_lr: peak learning rate of Muon
        muon_weight_decay: weight decay of Muon
        muon_momentum: momentum of Muon
        layer_decay: factor of the learning rate from a layer to the one before, which keeps the
            first layers of a pretrained model as they were (arXiv 2106.08254); null is 1
        schedule: shape of the learning rate decay to zero after the warmup
        warmup: fraction of the training steps over which the learning rate rises from zero
        label_smoothing: probability mass of the target that is spread over all classes
        teacher: trained model whose probabilities the targets are mixed with (distillation, arXiv
            1503.02531): a run, a model file or an included model, with the same classes and image
            size
        teacher_share: fraction of the target that is the teacher's
        clip_grad: maximum norm of the gradient; null disables clipping
        ema_decay: decay of a moving average of the weights, which is then evaluated and saved
            instead; at step t, it is at most 1 - t^(-2/3); null disables it
    """

    name: OptimizerName = "muon"
    lr: settings.Positive = 2e-3
    weight_decay: settings.NonNegative = 0.05
    muon_lr: settings.Positive = 0.02
    muon_weight_decay: settings.NonNegative = 0.05
    muon_momentum: settings.FractionBelow1 = 0.85
    layer_decay: settings.FractionAbove0 | None = None
    schedule: Literal["linear", "cosine"] = "linear"
    warmup: settings.FractionBelow1 = 0.05
    label_smoothing: settings.FractionBelow1 = 0.1
    teacher: settings.PathName | None = None
    teacher_share: settings.Fraction = 0.5
    clip_grad: settings.Positive | None = None
    ema_decay: settings.Between0And1 | None = None


@settings.group("train")
class TrainConfig:
    """The training loop.

    Attributes:
        epochs: number of passes over the training images
        budget_minutes: training time in minutes, for which a short benchmark sets the number of
            steps, corrected after each tenth; null trains for the given number of epochs
        freeze: backbone trains only the classifier (linear probe), in evaluation mode
        whiten: initialize the first kernels of the stem with the principal components of training
            patches (arXiv 2404.00498)
        small_scale: at first, train on images reduced to this fraction of their sides, rounded to
            whole patches, which is faster; 1 keeps the full size
        small_share: fraction of the training steps that use the smaller images; null is 0.75, or 0
            with pretrained weights or a frozen backbone, which it would hurt
        batch_size: images per optimizer step; fewer in small sets, so that an epoch uses all
        accumulate: number of micro-batches that a batch is split into, to save memory; batch norm
            of model.stem=conv sees one at a time
        checkpoint_blocks: save memory by recomputing activations in the backward pass (arXiv
            1604.06174); same gradients, slower steps
        seed: random seed; the same seed gives the same result on the same machine, unless the run
            has a time budget
        device: device to run on; auto chooses a GPU if there is one
        processes: number of processes that share each batch on a CPU; null means one per usable
            core, with at least 32 images and 0.6 GB each; a run keeps its number when it is resumed
        parallel: how processes share the model: replicate keeps a copy in each (DDP); shard
            divides weights and optimizer state (FSDP2); auto shards a model that takes more than
            half of a GPU's memory
        timeout_minutes: how long a process waits for another one before it gives up
        precision: precision of matrix products: float32 or bfloat16; auto chooses bfloat16 where
            the hardware is fast at it
        compile: use torch.compile, which takes half a minute to two minutes and makes steps
            faster; auto does where a run is long enough and there is a compiler
        max_skipped: number of consecutive steps with a non-finite loss or gradient, which are
            skipped, before training stops
    """

    epochs: settings.Count = 10
    budget_minutes: settings.Positive | None = None
    freeze: Literal["none", "backbone"] = "none"
    whiten: bool = True
    small_scale: settings.FractionAbove0 = 0.75
    small_share: settings.Fraction | None = None
    batch_size: settings.Count = 128
    accumulate: settings.Count = 1
    checkpoint_blocks: bool = False
    seed: settings.Seed = 0
    device: settings.DeviceName = "auto"
    processes: Annotated[int, Field(ge=1, le=1000)] | None = None
    parallel: Literal["auto", "replicate", "shard"] = "auto"
    timeout_minutes: Annotated[float, Field(ge=0.01, le=settings.LARGE)] = 30.0
    precision: settings.Precision = "auto"
    compile: settings.AutoOrSwitch = "auto"
    max_skipped: settings.Count = 10

    def __post_init__(self) -> None:
        allowed = f"a divisor of train.batch_size={self.batch_size}"
        settings.check(self, "accumulate", self.batch_size % self.accumulate == 0, allowed)
        allowed = "auto or replicate with train.freeze=backbone, where there is little to share"
        replicates = self.freeze == "none" or self.parallel != "shard"
        settings.check(self, "parallel", replicates, allowed)


@settings.group("track")
class TrackConfig:
    """What is logged during training.

    Attributes:
        every: number of steps between two points of the training curves
        probes: largest number of validation images whose attention maps are logged during training
        milestones: largest number of steps at which attention is logged, denser at the start
        live_mb: megabytes for the model at the last of these steps, which the Attention tab can
            run; 0 stores none
    """

    every: settings.Count = 50
    probes: settings.CountOrZero = 8
    milestones: Annotated[int, Field(ge=1, le=1000)] = 10
    live_mb: settings.CountOrZero = 20


@settings.group("")
class Config:
    """The training run.

    Attributes:
        out: folder that the run is written to; on the command line, runs/ and the data set, or the
            folder of images, unless named; runs/quick for cifar10
        deterministic: use deterministic algorithms only, on a GPU; on a CPU, runs are reproducible
            in any case
    """

    out: settings.PathName = "runs/quick"
    deterministic: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        least = min(self.data.spec.image_size)
        fits = self.augment.crop == "resized" or self.augment.crop_padding < least
        settings.check(
            self.augment, "crop_padding", fits, f"less than the images' {least} pixels, such as 0"
        )
        if self.train.small_share is None:
            scratch = self.model.pretrained is None and self.train.freeze == "none"
            train = dataclasses.replace(self.train, small_share=0.75 if scratch else 0.0)
            object.__setattr__(self, "train", train)  # the dataclass is frozen


Plans: TypeAlias = Mapping[float, Config]  # by the epochs that a time budget has to buy


to_dict = dataclasses.asdict  # a config as nested dictionaries of plain values


def translated(values: Any) -> Any:
    """Return nested dictionaries that an earlier version wrote as this one writes them."""
    if not isinstance(values, dict):
        return values
    for section, key in RETIRED:
        if isinstance(part := values.get(section), dict):
            values = {**values, section: {k: v for k, v in part.items() if k != key}}
    if isinstance(train := values.get("train"), dict) and train.get("parallel") == "hybrid":
        values = {**values, "train": {**train, "parallel": "shard"}}
    return values


# A config in a file of this or an earlier version.
StoredConfig: TypeAlias = Annotated[Config, BeforeValidator(translated)]
