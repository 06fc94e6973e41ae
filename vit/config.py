"""The settings of a training run and of an evaluation, as frozen dataclasses.

Annotations state types and ranges, `__post_init__` the rules between fields. A value that is not
allowed raises ValueError with one line, wherever the config is made: in Python, from the command
line or from a model file. Nothing slow is imported, so that `--help` answers at once.
"""

import dataclasses
import json
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from vit.registry import ALL_KINDS, DATASETS, OPTIMIZERS, DatasetSpec
from vit.settings import (
    LARGE,
    Arguments,
    AutoOrSwitch,
    Count,
    CountOrFraction,
    CountOrZero,
    Fraction,
    FractionAbove0,
    FractionBelow1,
    ImageSize,
    NonNegative,
    PathName,
    Positive,
    Seed,
    Switch,
    Text,
    divisors,
    require,
    settings,
    shorten,
)

STRONGEST = 30  # magnitude of RandAugment

PATCH_SIZE = 4  # of a model trained from scratch, unless set

DeviceName = Literal["auto", "cpu", "cuda", "mps", "xpu"]
Precision = Literal["auto", "float32", "bfloat16"]
if TYPE_CHECKING:  # a type checker does not look into the registry
    DataName = str
    MapKindName = str
    OptimizerName = str
else:
    DataName = Literal[*DATASETS]
    MapKindName = Literal[*ALL_KINDS]
    OptimizerName = Literal[*OPTIMIZERS]
TIMM = "timm:"  # how the name of a model of timm begins
# Fields of ModelConfig that VisionTransformer does not take.
NOT_OF_VIT = ("name", "timm_args", "pretrained")
# Keys in files of earlier versions.
RETIRED = {"model": ("attn_kernel",), "track": ("max_cost",)}


@settings("data")
class DataConfig:
    """The data set.

    Attributes:
        name: data set: folder, shards or table are your own images, see root; shapes (drawn on the
            fly) and digits (needs scikit-learn) need no download
        root: folder where data sets are stored or downloaded to; with name=folder, the folder that
            contains train/<class>/ and test/<class>/, or the classes' folders themselves; with
            name=shards, the folder that contains train/*.tar and test/*.tar, or the tar files
            (docs/data.md); with name=table, a CSV or JSONL file with columns path, label and,
            optionally, split
        test_fraction: with name=folder, shards or table, fraction of each class that is set aside
            as test images, where these name none; null is 0.2 there
        download: download the data set if it is not in root
        image_size: height and width of the model's input in pixels, one number or two (rows and
            columns), multiples of model.patch_size; null means the data set's own, 32 x 32 for
            folder, shards and table
        fit: how an image of another shape becomes image_size: crop cuts off what is left of its
            longer side, pad shrinks all of it and fills the rest with the mean colour, squash
            stretches it
        channels: colour channels of the model's input: 1 is grey, 3 is RGB; null means the data
            set's own, 3 for image files
        on_bad_image: with image files, how to treat an image file that cannot be read: error stops,
            skip lists it and leaves it out
        memory_gb: memory for images read from files, in GB (10^9 bytes); if they need more, they
            are decoded from their files in every epoch; null means a quarter of the free memory
        workers: number of processes that decode image files; 0 decodes them in the main process;
            null means one per usable core, less one, but none for fewer than 200 files
        val_size: number of training images held out for the validation curves, or a fraction of
            each class, at least one image; 0 holds out none; null is 1000 of a set of at least
            10000 images, else 0.1
        train_size: number of training images to use, after the validation images are held out; null
            uses all of them
        balance: how to treat classes of different sizes: none; sampler draws every class equally
            often, repeating the images of small ones; loss weights the cross entropy of a class by
            its inverse frequency, N / (C n_c) for n_c of N images and C classes
    """

    name: DataName = "cifar10"
    root: PathName = "data"
    download: Switch = True
    image_size: ImageSize = None
    fit: Literal["crop", "pad", "squash"] = "crop"
    channels: Annotated[int, Field(ge=1, le=1000)] | None = None
    on_bad_image: Literal["error", "skip"] = "error"
    memory_gb: NonNegative | None = None
    workers: Annotated[int, Field(ge=0, le=1000)] | None = None
    test_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    val_size: CountOrFraction | None = None
    train_size: Count | None = None
    balance: Literal["none", "sampler", "loss"] = "none"

    def __post_init__(self) -> None:
        require(
            self.test_fraction is None or self.spec.own_files,
            "data.test_fraction",
            self.test_fraction,
            f"null with data.name={self.name}, whose test images are fixed",
        )
        require(
            self.val_size is None or self.val_size < 1 or isinstance(self.val_size, int),
            "data.val_size",
            self.val_size,
            "a fraction less than 1, or a whole number",
        )

    @property
    def spec(self) -> DatasetSpec:
        """The data set with the image size and the channels of this config.

        Other channels than the data set's own have other statistics: RGB as grey, or grey as RGB,
        the average over the registered channels; any other number 0.5 and 0.25 in each.
        """
        own = DATASETS[self.name]
        channels, mean, std = self.channels or own.channels, own.mean, own.std
        if {channels, own.channels} == {1, 3}:
            mean, std = ((round(sum(v) / len(v), 4),) * channels for v in (mean, std))
        elif channels != own.channels:
            mean, std = (0.5,) * channels, (0.25,) * channels
        image_size = self.image_size or own.image_size
        return dataclasses.replace(own, image_size=image_size, mean=mean, std=std)


@settings("model")
class ModelConfig:
    """The model: our Vision Transformer, with timm's parameter names, or any model of timm.

    Attributes:
        name: which model: vit is ours, which the other keys describe; timm:resnet18 is timm's
            resnet18, and so on (docs/timm.md)
        timm_args: with name=timm:..., arguments of the model by name, such as
            {depth: 4, embed_dim: 96}; null keeps timm's defaults
        pretrained: weights to start from: timm:NAME (downloaded, e.g.
            timm:vit_small_patch16_224.augreg_in21k), a .safetensors or .pth file with timm's names,
            a folder as timm saves it, a run folder or model file of this project, or cifar10_quick;
            the keys below that describe the architecture then come from it; with name=timm:...,
            weights of that model; null starts from random weights
        patch_size: height and width of a patch in pixels; must divide the image size; null is 4, or
            the patch size of the pretrained model, whose patch embedding is otherwise resampled
        stem: patch embedding: linear is one linear projection, conv a stack of 3x3 convolutions
            (arXiv 2106.14881)
        embed_dim: width of a token
        depth: number of encoder blocks
        num_heads: number of attention heads; 1 is single-head attention
        head_dim: width of an attention head; null means embed_dim / num_heads
        mlp_ratio: hidden width of the MLP divided by embed_dim
        mlp_conv: add a depthwise 3x3 convolution over neighbouring patches to the MLP
            (arXiv 2210.05844)
        qkv_bias: use a bias in the query, key and value projections
        qk_norm: apply layer norm to queries and keys (arXiv 2302.05442)
        init_values: initial value of layer scale (arXiv 2103.17239); null disables layer scale
        zero_init: initialize the output projections of attention and MLP to zero
        class_token: prepend a learned class token
        reg_tokens: number of register tokens (arXiv 2309.16588)
        global_pool: input of the classification head: token is the class token, avg the mean of the
            patch tokens
        pos_embed: position embedding: learned, sincos (fixed sine and cosine) or none
        no_embed_class: no position embeddings for class token and register tokens
        pre_norm: apply layer norm before the first encoder block too (arXiv 2103.00020); the linear
            patch embedding then has no bias
        fc_norm: apply the last layer norm after pooling instead of before; null means with
            global_pool=avg
        norm_eps: epsilon of layer norms
        act_layer: activation of the MLP: gelu, or its approximations gelu_tanh and quick_gelu
        drop_rate: dropout rate before the classification head
        attn_drop_rate: dropout rate of the attention weights
        proj_drop_rate: dropout rate after the projections in attention and MLP
        drop_path_rate: stochastic depth rate of the last block, increasing linearly from 0 in the
            first (arXiv 1603.09382)
        attention: what each attention head computes: dot is that of the paper
            (arXiv 1706.03762), cosine (arXiv 2111.09883), sigmoid (arXiv 2409.04431), differential
            (arXiv 2410.05258), or a function of a Python file, my_attention.py:function
            (docs/variants.md)
    """

    name: Text = "vit"
    timm_args: Arguments | None = None
    pretrained: PathName | None = None
    patch_size: Annotated[int, Field(ge=1, le=10_000)] | None = None
    stem: Literal["linear", "conv"] = "conv"
    embed_dim: Annotated[int, Field(ge=1, le=10_000)] = 96
    depth: Annotated[int, Field(ge=1, le=1000)] = 4
    num_heads: Annotated[int, Field(ge=1, le=1000)] = 3
    head_dim: Annotated[int, Field(ge=1, le=1000)] | None = None
    mlp_ratio: Positive = 2.0
    mlp_conv: Switch = True
    qkv_bias: Switch = True
    qk_norm: Switch = False
    init_values: Annotated[float, Field(ge=-LARGE, le=LARGE)] | None = None
    zero_init: Switch = True
    class_token: Switch = False
    reg_tokens: Annotated[int, Field(ge=0, le=1000)] = 0
    global_pool: Literal["token", "avg"] = "avg"
    pos_embed: Literal["learned", "sincos", "none"] = "learned"
    no_embed_class: Switch = False
    pre_norm: Switch = False
    fc_norm: Switch | None = None
    norm_eps: Annotated[float, Field(gt=0, le=1)] = 1e-6
    act_layer: Literal["gelu", "gelu_tanh", "quick_gelu"] = "gelu"
    drop_rate: FractionBelow1 = 0.0
    attn_drop_rate: FractionBelow1 = 0.0
    proj_drop_rate: FractionBelow1 = 0.0
    drop_path_rate: FractionBelow1 = 0.0
    attention: Text = "dot"

    def __post_init__(self) -> None:
        if self.name != "vit":
            self._check_timm()
            return
        require(
            self.timm_args is None,
            "model.timm_args",
            self.timm_args,
            "null with model.name=vit; or choose a model of timm, e.g. --model.name timm:resnet18",
        )
        if self.pretrained is not None:
            return  # until the values of the pretrained model are known, see `adopt`
        if self.patch_size is None:
            object.__setattr__(self, "patch_size", PATCH_SIZE)
        patch_size = self.patch_size or PATCH_SIZE
        require(
            1 <= self.mlp_ratio * self.embed_dim <= LARGE,
            "model.mlp_ratio",
            self.mlp_ratio,
            f"{1 / self.embed_dim:.3g} to {LARGE / self.embed_dim:.3g} "
            f"with model.embed_dim={self.embed_dim}",
        )
        require(
            self.stem == "linear" or self.embed_dim >= patch_size.bit_length(),
            "model.embed_dim",
            self.embed_dim,
            f"{patch_size.bit_length()} or more with model.stem=conv and "
            f"model.patch_size={patch_size}",
        )
        require(
            self.head_dim is not None or self.embed_dim % self.num_heads == 0,
            "model.num_heads",
            self.num_heads,
            f"a divisor of model.embed_dim={self.embed_dim}: {divisors(self.embed_dim)}; "
            "or set model.head_dim",
        )
        require(
            self.class_token or self.global_pool != "token",
            "model.global_pool",
            self.global_pool,
            "avg where model.class_token=false; or set model.class_token=true",
        )
        require(
            self.pos_embed != "sincos" or self.embed_dim % 4 == 0,
            "model.embed_dim",
            self.embed_dim,
            "a multiple of 4 with model.pos_embed=sincos",
        )

    def _check_timm(self) -> None:
        require(
            self.name.startswith(TIMM) and self.name != TIMM,
            "model.name",
            self.name,
            f"vit, or {TIMM} and a model of timm, such as {TIMM}resnet18",
        )
        for own in dataclasses.fields(self):
            value = getattr(self, own.name)
            if own.name not in NOT_OF_VIT and value != own.default:
                raise ValueError(
                    f"model.{own.name}: {shorten(value)} is only for model.name=vit; arguments of "
                    f"{self.name} go into model.timm_args, e.g. --model.timm_args '{{depth: 4}}'; "
                    f"if a config file sets it, add --model.{own.name} {json.dumps(own.default)}"
                )

    def vit_arguments(self) -> dict[str, Any]:
        """Return the arguments of our VisionTransformer, by name."""
        values = dataclasses.asdict(self)
        return {key: value for key, value in values.items() if key not in NOT_OF_VIT}


@settings("augment")
class AugmentConfig:
    """Augmentation of the training images, drawn for each image separately.

    Attributes:
        crop: random crop: padded shifts the image by up to crop_padding pixels, for small images;
            resized cuts out a rectangle of random area and shape and resizes it, for photographs
            (arXiv 1409.4842)
        crop_padding: with crop=padded, pixels of reflected padding on each side
        crop_scale: with crop=resized, smallest and largest fraction of the image's area; aspect
            ratios are 3/4 to 4/3
        flip: flip images horizontally with probability 0.5
        rand_ops: number of RandAugment operations per image (arXiv 1909.13719); 0 disables it
        rand_magnitude: magnitude of the RandAugment operations
        erasing: probability of replacing a random rectangle with noise (arXiv 1708.04896)
        mixup: alpha of mixup (arXiv 1710.09412); 0 disables it
        cutmix: alpha of CutMix (arXiv 1905.04899); 0 disables it; with both, each image gets one of
            mixup and CutMix
        mix_share: fraction of the training steps, counted from the start, that use mixup and CutMix
    """

    crop: Literal["padded", "resized"] = "padded"
    crop_padding: Annotated[int, Field(ge=0, le=10_000)] = 2
    crop_scale: tuple[FractionAbove0, FractionAbove0] = (0.08, 1.0)
    flip: Switch = True
    rand_ops: Annotated[int, Field(ge=0, le=100)] = 0
    rand_magnitude: Annotated[float, Field(ge=0, le=STRONGEST)] = 9.0
    erasing: Fraction = 0.0
    mixup: NonNegative = 0.0
    cutmix: NonNegative = 0.0
    mix_share: Fraction = 1.0

    def __post_init__(self) -> None:
        low, high = self.crop_scale
        require(
            low <= high,
            "augment.crop_scale",
            f"{low:g} {high:g}",
            "the smallest fraction first, then the largest",
        )

    @property
    def changes_images(self) -> bool:
        """Whether an image or its target ever differs from one epoch to the next."""
        crops = self.crop == "resized" or self.crop_padding
        return bool(crops or self.flip or self.rand_ops or self.erasing or self.mixes)

    @property
    def mixes(self) -> bool:
        """Whether images are ever mixed with others of the batch."""
        return bool(self.mix_share and (self.mixup or self.cutmix))


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
        restarts: epochs after which the schedule starts over, with a new warmup; --resume.extend
            adds the length of the finished run
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
            hybrid shards within each machine and replicates across machines; auto replicates a
            model that takes up to half of a GPU's memory and shards a larger one
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
    restarts: tuple[Count, ...] = ()
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
    parallel: Literal["auto", "replicate", "shard", "hybrid"] = "auto"
    timeout_minutes: Annotated[float, Field(ge=0.01, le=LARGE)] = 30.0
    precision: Precision = "auto"
    compile: AutoOrSwitch = "auto"
    max_skipped: Count = 10

    def __post_init__(self) -> None:
        require(
            self.batch_size % self.accumulate == 0,
            "train.accumulate",
            self.accumulate,
            f"a divisor of train.batch_size={self.batch_size}: {divisors(self.batch_size)}",
        )
        require(
            list(self.restarts) == sorted({*self.restarts})
            and max(self.restarts, default=0) < self.epochs,
            "train.restarts",
            list(self.restarts),
            f"ascending numbers of epochs below train.epochs={self.epochs}",
        )
        require(
            self.freeze == "none" or self.parallel in ("auto", "replicate"),
            "train.parallel",
            self.parallel,
            "auto or replicate with train.freeze=backbone, where there is little to share",
        )
        require(
            not self.restarts or self.budget_minutes is None,
            "train.restarts",
            list(self.restarts),
            "empty with train.budget_minutes",
        )


@settings("track")
class TrackConfig:
    """What is logged during training.

    Attributes:
        every: number of steps between two points of the training curves
        probes: number of validation images whose attention maps are logged during training
        milestones: number of steps at which attention is logged: the last, the first, and steps in
            between that are denser at the start
    """

    every: Count = 50
    probes: CountOrZero = 8
    milestones: Annotated[int, Field(ge=1, le=1000)] = 10


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


@settings("data")
class EvalDataConfig:
    """The test images.

    Attributes:
        root: folder where data sets are stored or downloaded to; null uses the folder of the
            training run
        download: download the data set if it is not in root
    """

    root: PathName | None = None
    download: Switch = True


@settings("model")
class EvalModelConfig:
    """The model.

    Attributes:
        attention: for models that were trained with attention of a Python file, that file:
            my_attention.py:function; model files contain its name and no code
    """

    attention: tuple[PathName, ...] = ()


@settings("")
class EvalConfig:
    """The evaluation.

    Attributes:
        data: the test images
        model: what the model's file does not contain
        out: folder for the report and the figures; null is eval/ next to the model; with --predict,
            a .csv file, with --export onnx a .onnx file and with --export torch a .pt2 file
        device: device to run on; auto chooses a GPU if there is one
        precision: precision of matrix products: float32 or bfloat16; auto chooses bfloat16 where
            the hardware supports it
        batch_size: images per forward pass
        flip: average the logits of each image and its mirror image, which takes twice as long; for
            the report and --predict
        probes: number of randomly chosen test images whose attention maps are drawn
        seed: random seed for choosing images
        attention: draw and save every kind of attention map for some test images, also for the
            Attention tab of TensorBoard, and measure how faithful the maps are to the model
        indices: with --attention, indices of the test images to draw, instead of random ones
        target: with --attention or --image, name of the class to explain; null explains the
            predicted class
        kinds: with --attention or --image, kinds of map to draw and, with --attention, to measure;
            without it, rollout and lrp_pixels with --image, otherwise all that take few passes;
            occlusion, integrated_gradients and rise take 16 to 1,000 passes
        faithfulness: with --attention, number of test images on which the faithfulness of the maps
            is measured; 0 skips the measurement; null means 500, or 0 with --indices
        head_fusion: with --attention, how rollout combines the attention heads
        discard_ratio: with --attention, fraction of the lowest attention weights that rollout sets
            to zero
        start_layer: with --attention, first layer that rollout includes, counted from 0
        image: image files to classify and explain, or folders of them
        predict: image files to classify, or folders that are searched recursively; writes a table,
            by default eval/photos.csv next to the model
        export: write the model in a format that other programs load, by default into export/ next
            to the model, and check the result: timm for timm.create_model, onnx for ONNX Runtime,
            torch for torch.export.load
        compare: other run folders, model files or included models to compare with on the same test
            images; writes a table and a picture
    """

    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    model: EvalModelConfig = field(default_factory=EvalModelConfig)
    out: PathName | None = None
    device: DeviceName = "auto"
    precision: Precision = "auto"
    batch_size: Count = 500
    flip: Switch = False
    probes: CountOrZero = 8
    seed: Seed = 0
    attention: Switch = False
    indices: tuple[int, ...] = ()
    target: Text | None = None
    kinds: tuple[MapKindName, ...] = ()
    faithfulness: int | None = None
    head_fusion: Literal["mean", "max", "min"] = "mean"
    discard_ratio: FractionBelow1 = 0.0
    start_layer: CountOrZero = 0
    image: tuple[PathName, ...] = ()
    predict: tuple[PathName, ...] = ()
    export: Literal["timm", "onnx", "torch"] | None = None
    compare: tuple[PathName, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.faithfulness is None or self.faithfulness == 0 or 2 <= self.faithfulness <= LARGE,
            "faithfulness",
            self.faithfulness,
            f"0, or 2 to {LARGE} (a confidence interval needs two), or null",
        )
        modes = {
            "attention": self.attention,
            "image": self.image,
            "predict": self.predict,
            "export": self.export,
            "compare": self.compare,
        }
        chosen = [name for name, value in modes.items() if value]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[1]}: not together with --{chosen[0]}; run eval.py twice")
        if self.flip and chosen not in ([], ["predict"]):
            raise ValueError(f"flip: not together with --{chosen[0]}")
        of_attention = {
            "indices": self.indices,
            "faithfulness": self.faithfulness is not None,
            "head_fusion": self.head_fusion != "mean",
            "discard_ratio": self.discard_ratio,
            "start_layer": self.start_layer,
        }
        for name, value in of_attention.items():
            if value and not self.attention:
                raise ValueError(f"{name}: only with --attention")
        if self.attention and not self.indices:
            require(self.probes > 0, "probes", self.probes, "at least 1 with --attention")
        for name, given in {"target": self.target is not None, "kinds": self.kinds}.items():
            if given and not (self.attention or self.image):
                raise ValueError(f"{name}: only with --attention or --image")
        if self.export is not None:  # the model is written and checked in float32 on the CPU
            allowed = {"device": ("auto", "cpu"), "precision": ("auto", "float32")}
            for name, values in allowed.items():
                value = getattr(self, name)
                require(value in values, name, value, f"{' or '.join(values)} with --export")
        if self.out is not None:
            suffix = self.out_suffix
            require(self.out.endswith(suffix), "out", self.out, f"a {suffix} file here")

    @property
    def out_suffix(self) -> str:
        """The suffix of the file that `out` names; "" where it is a folder."""
        if self.predict:
            return ".csv"
        return {"onnx": ".onnx", "torch": ".pt2"}.get(self.export or "", "")

    @property
    def faithfulness_images(self) -> int:
        """Number of test images on which the faithfulness of maps is measured; 0 is none."""
        if self.faithfulness is None:
            return 0 if self.indices else 500
        return self.faithfulness


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
    return Config(**values)


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
