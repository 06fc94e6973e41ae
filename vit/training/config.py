"""Settings of training, and the whole config of a run; imported without torch.

Each component's settings are next to it: `vit.data.config`, `vit.model.config`. Annotations state
types and ranges, `__post_init__` the rules between fields. A value that is not allowed raises
ValueError with one line, wherever the config is made: in Python, from the command line or from a
model file.
"""

import dataclasses
import math
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from vit.data.config import AugmentConfig, DataConfig
from vit.model.config import ModelConfig
from vit.registry import OPTIMIZERS
from vit.settings import (
    LARGE,
    AutoOrSwitch,
    Count,
    CountOrZero,
    DeviceName,
    Fraction,
    FractionBelow1,
    NonNegative,
    PathName,
    Positive,
    Precision,
    Seed,
    Switch,
    check,
    divisors,
    require,
    settings,
)

if TYPE_CHECKING:  # a type checker does not look into the registry
    OptimizerName = str
else:
    OptimizerName = Literal[*OPTIMIZERS]

# Keys in files of earlier versions.
RETIRED = {"model": ("attn_kernel",), "train": ("restarts",), "track": ("max_cost",)}


@settings("optim")
class OptimConfig:
    """The optimizer, the learning rate schedule and the loss.

    Attributes:
        name: optimizer: adamw for all parameters, or muon for the weight matrices of the encoder
            blocks and adamw for the rest
        lr: peak learning rate of AdamW
        weight_decay: weight decay of AdamW; norms, biases, tokens and position embeddings are
            exempt
        muon_lr: peak learning rate of Muon
        muon_weight_decay: weight decay of Muon
        muon_momentum: momentum of Muon
        layer_decay: factor of the learning rate from one layer to the layer before it, which keeps
            the first layers of a pretrained model close to what they were (arXiv 2106.08254); null
            gives all layers the same learning rate
        schedule: shape of the learning rate decay to zero after the warmup
        warmup: fraction of the training steps over which the learning rate rises from zero
        label_smoothing: probability mass of the target that is spread over all classes
        clip_grad: maximum norm of the gradient; null disables clipping
        ema_decay: decay of the exponential moving average of the weights, which is then the model
            that is evaluated and saved; null disables averaging
    """

    name: OptimizerName = "muon"
    lr: Positive = 2e-3
    weight_decay: NonNegative = 0.05
    muon_lr: Positive = 0.02
    muon_weight_decay: NonNegative = 0.05
    muon_momentum: FractionBelow1 = 0.85
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    schedule: Literal["linear", "cosine"] = "linear"
    warmup: FractionBelow1 = 0.05
    label_smoothing: FractionBelow1 = 0.1
    clip_grad: Positive | None = None
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None


@settings("train")
class TrainConfig:
    """The training loop.

    Attributes:
        epochs: number of passes over the training images
        budget_minutes: training time in minutes, instead of epochs: a short benchmark sets the
            number of steps; epochs of a second or less make the run longer, because validation and
            a checkpoint follow each; null trains for the given number of epochs
        freeze: what is not trained: none trains all parameters; backbone trains only the head
            (linear probe), with the model in evaluation mode: no dropout or stochastic depth, fixed
            batch-norm statistics
        whiten: initialize the first kernels of the stem with the principal components of training
            patches (arXiv 2404.00498)
        small_scale: at first, train on images whose sides are reduced to this fraction, rounded to
            whole patches, which is faster; 1 keeps the full size
        small_share: fraction of the training steps that use the smaller images
        batch_size: images per optimizer step; fewer in small sets, so that an epoch uses all
        accumulate: number of micro-batches that a batch is split into to save memory; with
            model.stem=conv, batch norm sees one micro-batch at a time
        checkpoint_blocks: save memory by recomputing the activations of the encoder blocks in the
            backward pass instead of storing them (arXiv 1604.06174); same gradients, slower steps
        seed: random seed; a run with the same seed gives the same result
        device: device to run on; auto chooses a GPU if there is one
        processes: number of processes that share each batch on a CPU; null means one per usable
            core, with at least 32 images each; a run keeps its number when it is resumed
        parallel: how several processes share the model: replicate keeps a copy in each of them
            (DistributedDataParallel); shard divides weights and optimizer state among them (FSDP2);
            auto replicates a model that takes up to half of a GPU's memory and shards a larger one
        timeout_minutes: how long a process waits for another one before it gives up
        precision: precision of matrix products: float32 or bfloat16; auto chooses bfloat16 where
            the hardware supports it
        compile: compile the model with torch.compile, which takes half a minute for each image
            size and makes steps faster; auto compiles where the run is long enough to gain from it
            and a compiler is installed
        max_skipped: number of consecutive steps with a non-finite loss or gradient, which are
            skipped, before training stops with an error
    """

    epochs: Count = 10
    budget_minutes: Positive | None = None
    freeze: Literal["none", "backbone"] = "none"
    whiten: Switch = True
    small_scale: Annotated[float, Field(gt=0, le=1)] = 0.75
    small_share: Fraction = 0.75
    batch_size: Count = 128
    accumulate: Count = 1
    checkpoint_blocks: Switch = False
    seed: Seed = 0
    device: DeviceName = "auto"
    processes: Annotated[int, Field(ge=1, le=1000)] | None = None
    parallel: Literal["auto", "replicate", "shard"] = "auto"
    timeout_minutes: Annotated[float, Field(ge=0.01, le=LARGE)] = 30.0
    precision: Precision = "auto"
    compile: AutoOrSwitch = "auto"
    max_skipped: Count = 10

    def __post_init__(self) -> None:
        allowed = f"a divisor of train.batch_size={self.batch_size}: {divisors(self.batch_size)}"
        check(self, "accumulate", self.batch_size % self.accumulate == 0, allowed)
        allowed = "auto or replicate with train.freeze=backbone, where there is little to share"
        check(self, "parallel", self.freeze == "none" or self.parallel != "shard", allowed)


@settings("track")
class TrackConfig:
    """What is logged during training.

    Attributes:
        every: number of steps between two points of the training curves
        probes: number of validation images whose attention maps are logged during training
        milestones: number of steps at which attention is logged: the last, the first, and steps in
            between that are denser at the start
        live_mb: megabytes for the model, which the Attention tab can run at the last of these
            steps; 0 stores none
    """

    every: Count = 50
    probes: CountOrZero = 8
    milestones: Annotated[int, Field(ge=1, le=1000)] = 10
    live_mb: CountOrZero = 20


@settings("")
class Config:
    """The training run.

    Attributes:
        out: folder that the run is written to; where neither --out nor a file names one, runs/ and
            the name of the data set, or of the folder of images; runs/quick is that of cifar10
        deterministic: use deterministic algorithms only, and stop with an error where a GPU has
            none; on a CPU, runs are reproducible in any case
    """

    out: PathName = "runs/quick"
    deterministic: Switch = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        """Check that model and augmentation fit the images of the data set."""
        has_channels = self.data.channels in (None, 1, 3) or self.data.spec.own_files
        check(self.data, "channels", has_channels, f"1 or 3 with data.name={self.data.name}")
        height, width = self.data.spec.image_size
        patch_size = self.model.patch_size
        size = f"{height}" if height == width else f"{height}x{width}"
        common = math.gcd(height, width)
        is_timm = self.model.name != "vit"
        # A pretrained model brings its patch size, and a stem that fits it.
        if self.data.image_size is not None and not is_timm and patch_size is not None:
            nearest = [patch_size * max(1, round(n / patch_size)) for n in (height, width)]
            require(
                common % patch_size == 0,
                "data.image_size",
                size,
                f"a multiple of model.patch_size={patch_size}, e.g. "
                + " ".join(map(str, nearest[:1] if height == width else nearest)),
            )
        divides = is_timm or patch_size is None or common % patch_size == 0
        allowed = f"a divisor of the image size, {size}: {divisors(common)}"
        check(self.model, "patch_size", divides, allowed)
        is_other = self.model.stem == "linear" or self.model.pretrained is not None
        halves = is_other or patch_size is None or patch_size.bit_count() == 1
        check(self.model, "patch_size", halves, "a power of two with model.stem=conv")
        limit = min(height, width) - 1
        fits = self.augment.crop == "resized" or self.augment.crop_padding <= limit
        allowed = f"0 to {limit} pixels with images of {size} pixels"
        check(self.augment, "crop_padding", fits, allowed)


def to_dict(config: Config) -> dict[str, Any]:
    """Return a config as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """Make a config from nested dictionaries as `to_dict` returns them, also by earlier versions.

    Raises:
        ValueError: A key is not known or a value is not allowed.
    """
    for section, retired in RETIRED.items():
        if isinstance(part := values.get(section), dict):
            part = {key: value for key, value in part.items() if key not in retired}
            values = {**values, section: part}
    if isinstance(train := values.get("train"), dict) and train.get("parallel") == "hybrid":
        values = {**values, "train": {**train, "parallel": "shard"}}
    return Config(**values)
