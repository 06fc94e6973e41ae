"""What a run is made of: frozen dataclasses, filled from YAML files and flags by jsonargparse.

Values out of range and impossible combinations are refused when the objects are made, with one
line that names key, value and what is allowed. Heavy libraries are not imported here, so that
`--help` and a mistyped flag answer at once.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

DataName = Literal["cifar10", "cifar100", "shapes", "folder"]

IMAGE_SIZE = 32  # pixels; the images of every data set here are 32 x 32
STRONGEST = 30  # magnitude of RandAugment
DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "quick.yaml"


# More than any run can use, and little enough that nothing computed from it overflows.
LARGE = 1_000_000


def shorten(value: object, length: int = 60) -> str:
    """Return a value as a text of one line, cut where it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= length else text[:length] + "..."


def _require(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise ValueError(f"{key}: {shorten(value)} is not allowed; it must be {allowed}")


def _is_path(text: str) -> bool:
    return bool(text.strip()) and "\0" not in text


def _divisors(number: int) -> str:
    return shorten(", ".join(str(n) for n in range(1, number + 1) if number % n == 0))


@dataclass(frozen=True)
class DataConfig:
    """Which images.

    Attributes:
        name: data set; "shapes" is drawn on the fly and needs no download, "folder" is pictures of
            one's own in root
        root: folder that holds, or will hold, the downloaded data; with name=folder it holds
            train/<class>/ and test/<class>/ with pictures
        download: fetch the data set if it is not in root
        on_bad_image: with name=folder, whether a picture that cannot be read is an error or is
            listed and left out
        val_size: training images held out for the curves; 0 holds out none
        train_size: use only so many training images (after holding out); null uses all
    """

    name: DataName = "cifar10"
    root: str = "data"
    download: bool = True
    on_bad_image: Literal["error", "skip"] = "error"
    val_size: int = 1000
    train_size: int | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.val_size <= LARGE, "data.val_size", self.val_size, f"0 to {LARGE}")
        _require(_is_path(self.root), "data.root", repr(self.root), "the name of a folder")
        _require(
            self.train_size is None or 1 <= self.train_size <= LARGE,
            "data.train_size",
            self.train_size,
            f"1 to {LARGE}, or null",
        )


@dataclass(frozen=True)
class ModelConfig:
    """The Vision Transformer; names are timm's.

    Attributes:
        patch_size: pixels on a side of a patch
        stem: how patches become tokens: one linear map, or a few 3 x 3 convolutions
        embed_dim: width of a token
        depth: encoder blocks
        num_heads: attention heads; 1 is single-head attention
        head_dim: width of a head; null means embed_dim / num_heads
        mlp_ratio: hidden width of the MLP over embed_dim
        mlp_conv: depthwise 3 x 3 convolution over neighbouring patches in the MLP
            (arXiv 2210.05844)
        qkv_bias: bias in the query, key and value projections
        qk_norm: layer norm on queries and keys
        init_values: initial layer scale; null leaves layer scale out
        zero_init: start the output projections of attention and MLP at zero
        class_token: prepend a learned class token
        reg_tokens: register tokens (arXiv 2309.16588)
        global_pool: classify from the class token or from the mean of the patch tokens
        pos_embed: position embedding
        drop_rate: dropout before the head
        attn_drop_rate: dropout on attention weights
        proj_drop_rate: dropout after the projections of attention and MLP
        drop_path_rate: stochastic depth of the last block, rising linearly from 0
        attn_kernel: math is written out by hand, fused is torch's kernel (same result), auto takes
            what is faster on the device
    """

    patch_size: int = 4
    stem: Literal["linear", "conv"] = "conv"
    embed_dim: int = 96
    depth: int = 4
    num_heads: int = 3
    head_dim: int | None = None
    mlp_ratio: float = 2.0
    mlp_conv: bool = True
    qkv_bias: bool = True
    qk_norm: bool = False
    init_values: float | None = None
    zero_init: bool = True
    class_token: bool = False
    reg_tokens: int = 0
    global_pool: Literal["token", "avg"] = "avg"
    pos_embed: Literal["learned", "sincos", "none"] = "learned"
    drop_rate: float = 0.0
    attn_drop_rate: float = 0.0
    proj_drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    attn_kernel: Literal["auto", "math", "fused"] = "auto"

    def __post_init__(self) -> None:
        largest = {"embed_dim": 10_000, "depth": 1000, "num_heads": 1000, "reg_tokens": 1000}
        for name, limit in largest.items():
            value, least = getattr(self, name), 0 if name == "reg_tokens" else 1
            _require(least <= value <= limit, f"model.{name}", value, f"{least} to {limit}")
        _require(
            self.head_dim is None or 1 <= self.head_dim <= 1000,
            "model.head_dim",
            self.head_dim,
            "1 to 1000, or null",
        )
        _require(
            1 <= self.mlp_ratio * self.embed_dim <= LARGE,
            "model.mlp_ratio",
            self.mlp_ratio,
            f"{1 / self.embed_dim:.3g} to {LARGE / self.embed_dim:.3g} "
            f"with model.embed_dim={self.embed_dim}",
        )
        _require(
            self.init_values is None or abs(self.init_values) <= LARGE,
            "model.init_values",
            self.init_values,
            f"-{LARGE} to {LARGE}, or null",
        )
        for name in ("drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"model.{name}", value, "from 0 up to, not including, 1")
        _require(
            self.patch_size >= 1 and IMAGE_SIZE % self.patch_size == 0,
            "model.patch_size",
            self.patch_size,
            f"a divisor of the image size, {IMAGE_SIZE}: {_divisors(IMAGE_SIZE)}",
        )
        _require(
            self.stem == "linear" or self.patch_size in (1, 2, 4, 8, 16, 32),
            "model.patch_size",
            self.patch_size,
            "a power of two with model.stem=conv",
        )
        _require(
            self.stem == "linear" or self.embed_dim >= self.patch_size.bit_length(),
            "model.embed_dim",
            self.embed_dim,
            f"{self.patch_size.bit_length()} or more with model.stem=conv and "
            f"model.patch_size={self.patch_size}",
        )
        _require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            "model.num_heads",
            self.num_heads,
            f"a divisor of model.embed_dim={self.embed_dim}: {_divisors(self.embed_dim)}; "
            "or set model.head_dim",
        )
        _require(
            self.class_token or self.global_pool != "token",
            "model.global_pool",
            self.global_pool,
            "avg where model.class_token=false; or set model.class_token=true",
        )
        _require(
            self.pos_embed != "sincos" or self.embed_dim % 4 == 0,
            "model.embed_dim",
            self.embed_dim,
            "a multiple of 4 with model.pos_embed=sincos",
        )


@dataclass(frozen=True)
class AugmentConfig:
    """Changes to training images; every image draws its own.

    Attributes:
        crop_padding: random crop after padding so many reflected pixels on each side
        flip: mirror half of the images
        rand_ops: operations of RandAugment for each image (arXiv 1909.13719); 0 is off
        rand_magnitude: how strong they are, of 30
        erasing: probability of overwriting a random rectangle with noise (arXiv 1708.04896)
        mixup: alpha of mixup (arXiv 1710.09412); 0 is off
        cutmix: alpha of cutmix (arXiv 1905.04899); 0 is off; with both on, each image takes one
        mix_share: share of all steps with mixup and cutmix; after that images are whole
    """

    crop_padding: int = 2
    flip: bool = True
    rand_ops: int = 0
    rand_magnitude: float = 9.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_share: float = 1.0

    def __post_init__(self) -> None:
        _require(
            0 <= self.crop_padding < IMAGE_SIZE,
            "augment.crop_padding",
            self.crop_padding,
            f"0 to {IMAGE_SIZE - 1} pixels",
        )
        _require(0 <= self.rand_ops <= 100, "augment.rand_ops", self.rand_ops, "0 to 100")
        _require(
            0 <= self.rand_magnitude <= STRONGEST,
            "augment.rand_magnitude",
            self.rand_magnitude,
            f"0 to {STRONGEST}",
        )
        for name in ("erasing", "mix_share"):
            value = getattr(self, name)
            _require(0 <= value <= 1, f"augment.{name}", value, "0 to 1")
        _require(0 <= self.mixup <= LARGE, "augment.mixup", self.mixup, f"0 to {LARGE}")
        _require(0 <= self.cutmix <= LARGE, "augment.cutmix", self.cutmix, f"0 to {LARGE}")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule.

    Attributes:
        name: adamw for everything, or muon for the blocks' matrices and adamw for the rest
        lr: peak learning rate of AdamW
        weight_decay: of AdamW; norms, biases, tokens and positions have none
        muon_lr: peak learning rate of Muon
        muon_weight_decay: of Muon
        muon_momentum: of Muon, whose average of gradients reaches back about 1 / (1 - it) steps
        schedule: how the learning rate falls to zero after the warm-up
        warmup: share of all steps in which the learning rate rises
        label_smoothing: share of the target spread over all classes
        clip_grad: largest norm of the gradient; null does not clip
        ema_decay: keep and use an exponential moving average of the weights; null does not
    """

    name: Literal["adamw", "muon"] = "muon"
    lr: float = 2e-3
    weight_decay: float = 0.05
    muon_lr: float = 0.02
    muon_weight_decay: float = 0.05
    muon_momentum: float = 0.85
    schedule: Literal["linear", "cosine"] = "linear"
    warmup: float = 0.05
    label_smoothing: float = 0.1
    clip_grad: float | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "muon_lr"):
            value = getattr(self, name)
            _require(0 < value <= LARGE, f"optim.{name}", value, f"above 0, up to {LARGE}")
        for name in ("weight_decay", "muon_weight_decay"):
            value = getattr(self, name)
            _require(0 <= value <= LARGE, f"optim.{name}", value, f"0 to {LARGE}")
        for name in ("warmup", "label_smoothing", "muon_momentum"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optim.{name}", value, "from 0 up to, not including, 1")
        _require(
            self.clip_grad is None or 0 < self.clip_grad <= LARGE,
            "optim.clip_grad",
            self.clip_grad,
            f"above 0, up to {LARGE}, or null",
        )
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            "optim.ema_decay",
            self.ema_decay,
            "between 0 and 1, or null",
        )


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained.

    Attributes:
        epochs: passes over the training images
        budget_minutes: minutes to train in place of epochs: trial steps fix how many steps fit;
            null goes by epochs
        whiten: start the stem's first kernels from the principal components of training patches
            (arXiv 2404.00498)
        small_scale: images are at first shrunk to this share of their side, in whole patches, which
            is faster; 1 never shrinks them
        small_share: share of all steps with images shrunk so
        batch_size: images per optimizer step
        accumulate: parts a batch is computed in, one after the other, to save memory; batch norm
            (stem=conv) then sees one part at a time
        seed: of everything random: the same seed gives the same run
        device: where it runs; auto takes a GPU if there is one
        precision: of matrix products; auto takes bfloat16 where the hardware computes it natively
        compile: torch.compile the model
        max_skipped: steps in a row whose loss or gradient is not finite, and which are skipped,
            before the run is given up
    """

    epochs: int = 10
    budget_minutes: float | None = None
    whiten: bool = True
    small_scale: float = 0.75
    small_share: float = 0.75
    batch_size: int = 128
    accumulate: int = 1
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False
    max_skipped: int = 10

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "accumulate", "max_skipped"):
            value = getattr(self, name)
            _require(1 <= value <= LARGE, f"train.{name}", value, f"1 to {LARGE}")
        _require(
            self.batch_size % self.accumulate == 0,
            "train.accumulate",
            self.accumulate,
            f"a divisor of train.batch_size={self.batch_size}: {_divisors(self.batch_size)}",
        )
        _require(0 <= self.seed < 2**63, "train.seed", self.seed, "0 to 2^63 - 1")
        _require(0 < self.small_scale <= 1, "train.small_scale", self.small_scale, "above 0, to 1")
        _require(0 <= self.small_share <= 1, "train.small_share", self.small_share, "0 to 1")
        _require(
            self.budget_minutes is None or 0 < self.budget_minutes <= LARGE,
            "train.budget_minutes",
            self.budget_minutes,
            f"above 0, up to {LARGE}, or null",
        )


@dataclass(frozen=True)
class TrackConfig:
    """What is written down while it trains.

    Attributes:
        every: steps between two points of the training curves
        probes: held-out images whose attention is followed through training
    """

    every: int = 50
    probes: int = 8

    def __post_init__(self) -> None:
        _require(1 <= self.every <= LARGE, "track.every", self.every, f"1 to {LARGE}")
        _require(0 <= self.probes <= LARGE, "track.probes", self.probes, f"0 to {LARGE}")


@dataclass(frozen=True)
class Config:
    """A run.

    Attributes:
        out: run folder
        deterministic: refuse operations whose result depends on the order in which a GPU adds; on
            a CPU the same seed gives the same numbers anyway
    """

    out: str = "runs/quick"
    deterministic: bool = False
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    track: TrackConfig = field(default_factory=TrackConfig)

    def __post_init__(self) -> None:
        _require(_is_path(self.out), "out", repr(self.out), "the name of a folder")


@dataclass(frozen=True)
class EvalDataConfig:
    """Where the test images are.

    Attributes:
        root: folder that holds, or will hold, the data set; null takes the one of the training
        download: fetch the data set if it is not in root
    """

    root: str | None = None
    download: bool = True


@dataclass(frozen=True)
class EvalConfig:
    """An evaluation.

    Attributes:
        data: where the test images are
        out: where report and pictures go; null is eval/ beside the model
        device: where it runs; auto takes a GPU if there is one
        precision: of matrix products; auto takes bfloat16 where the hardware computes it natively
        batch_size: images at a time
        probes: test images whose attention is drawn, at random
        seed: of the random choices
        attention: draw every kind of map, save them, and measure how far each can be believed
        indices: with attention, the test images to draw, in place of random ones
        target: with attention or image, the class that is explained; null is the predicted one
        faithfulness: with attention, test images that the maps are measured on; 0 measures nothing
        image: picture files to classify in place of the test images
        compare: another run or model file, to be compared on the same test images
    """

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    out: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    batch_size: int = 500
    probes: int = 8
    seed: int = 0
    attention: bool = False
    indices: tuple[int, ...] = ()
    target: str | None = None
    faithfulness: int = 500
    image: tuple[str, ...] = ()
    compare: str | None = None

    def __post_init__(self) -> None:
        _require(1 <= self.batch_size <= LARGE, "batch_size", self.batch_size, f"1 to {LARGE}")
        _require(0 <= self.probes <= LARGE, "probes", self.probes, f"0 to {LARGE}")
        _require(
            self.faithfulness == 0 or 2 <= self.faithfulness <= LARGE,
            "faithfulness",
            self.faithfulness,
            f"0, or 2 to {LARGE}: an interval needs two",
        )
        _require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")
        modes = {"attention": self.attention, "image": self.image, "compare": self.compare}
        chosen = [name for name, value in modes.items() if value]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[1]}: not together with --{chosen[0]}; run eval.py twice")
        if self.indices and not self.attention:
            raise ValueError("indices: only with --attention")
        if self.target is not None and not (self.attention or self.image):
            raise ValueError("target: only with --attention or --image")


def to_dict(config: Config) -> dict[str, Any]:
    """Return a config as nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def from_dict(values: dict[str, Any]) -> Config:
    """Make a config from nested dictionaries as `to_dict` returns them.

    Raises:
        ValueError: A key is not known or a value is not allowed.
    """
    parts = {}
    for part in dataclasses.fields(Config):
        group = dataclasses.is_dataclass(part.type)
        value = values.get(part.name, {} if group else part.default)
        try:
            parts[part.name] = part.type(**value) if group else value  # type: ignore[operator]
        except TypeError as error:
            raise ValueError(f"{part.name}: {error}") from None
    return Config(**parts)


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with keys like `train.seed`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        part = (
            flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
        flat |= part
    return flat


def changed_keys(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List the keys whose values differ, each as `key: old -> new`."""
    before, after = flatten(old), flatten(new)
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
