"""What is chosen by name: data sets, optimizers, kinds of attention map, evaluators.

An entry says everything about a thing and names its function, as "module:name"; CONTRIBUTING.md
shows how to add one. Functions are found by name when they are called, so that the command line can
list and check what there is without importing torch.
"""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DatasetSpec:
    """A data set: how it is read, and what a model depends on."""

    image_size: tuple[int, int]  # height and width, in pixels
    mean: tuple[float, ...]  # of each channel, 0 to 1
    std: tuple[float, ...]  # standard deviation of each channel, 0 to 1
    # The function in `vit.data` that takes a `DataConfig` and whether to find training rather than
    # test images, and returns a `vit.data.images.ImageSet`.
    reader: str
    # Files of a user, with any number of channels; all other data sets are grey or RGB.
    own_files: bool = False
    drawn: bool = False  # the reader then also takes how many images, or None
    test_included: bool = False  # reading the training images shows that test images can be read
    files: str = ""  # pattern of what is in data.root once the set is downloaded; "" for no files

    @property
    def channels(self) -> int:
        """Number of colour channels."""
        return len(self.mean)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

# Means and standard deviations are those of the training images. Image files of any size are
# normalized like ImageNet, so that a model file does not depend on the folder it was trained on,
# and weights trained on ImageNet fit. 64 pixels let a CPU train on photos from scratch.
DATASETS = {
    "cifar10": DatasetSpec(
        (32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616),
        "published:cifar10", files="cifar-10-*",
    ),
    "cifar100": DatasetSpec(
        (32, 32), (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762),
        "published:cifar100", test_included=True, files="cifar-100-*",
    ),
    "shapes": DatasetSpec(
        (32, 32), (0.5003, 0.5005, 0.4999), (0.2818, 0.2822, 0.2817), "shapes:read_shapes",
        drawn=True, test_included=True,
    ),
    "folder": DatasetSpec((32, 32), *IMAGENET, "folder:list_folder", own_files=True),
    "shards": DatasetSpec((32, 32), *IMAGENET, "shards:list_shards", own_files=True),
    "table": DatasetSpec((32, 32), *IMAGENET, "table:list_table", own_files=True),
    "digits": DatasetSpec((8, 8), (0.3045,), (0.3755,), "published:digits", test_included=True),
    "fashion_mnist": DatasetSpec(
        (28, 28), (0.2860,), (0.3530,), "published:fashion_mnist", files="FashionMNIST"
    ),
    "svhn": DatasetSpec(
        (32, 32), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), "published:svhn",
        files="*_32x32.mat",
    ),
    "flowers102": DatasetSpec((64, 64), *IMAGENET, "published:flowers102", files="flowers-102*"),
    "food101": DatasetSpec((64, 64), *IMAGENET, "published:food101", files="food-101*"),
    "oxford_iiit_pet": DatasetSpec(
        (64, 64), *IMAGENET, "published:oxford_iiit_pet", files="oxford-iiit-pet*"
    ),
}  # fmt: skip


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer."""

    name: str  # of a class in torch.optim, which takes parameter groups and `lr`
    arguments: dict[str, Any] = field(default_factory=dict)  # its other arguments
    muon: bool = False  # whether Muon replaces it for the weight matrices of the encoder blocks


OPTIMIZERS = {
    "adamw": OptimizerSpec("AdamW", {"fused": True}),
    "muon": OptimizerSpec("AdamW", {"fused": True}, muon=True),
}


@dataclass(frozen=True)
class MapKind:
    """A kind of attention map.

    What its function takes depends on what it needs (L layers, B batch, H heads, N tokens):

        weights    weights, L tensors (B, H, N, N)
        gradients  weights; their gradients of the logit of the explained class
        relevance  layer-wise relevance of the patches that enter each layer,
                   (L, B, rows, columns); weights
        pixels     layer-wise relevance of the input, (B, channels, height, width)
        passes     the model, to be called any number of times, in float32 whatever the
                   precision; images, grid (rows, columns) and explained classes (B,)

    The first three also take `readout` and `num_prefix_tokens`, see
    `vit.explain.rollout.attention_rollout`. Kinds with the same needs share their passes. A map
    that needs more than weights explains a class.
    """

    title: str  # in figures and tables
    function: str  # in `vit.explain`; it returns (B, patches) or (B, rows, columns)
    needs: Literal["weights", "gradients", "relevance", "pixels", "passes"]  # what it takes
    # What 1 means on the map, to which values are scaled: what each token gets if all get the same
    # (of fractions of what the head reads), the mean (of values that are at least 0), or the mean
    # of absolute values ("size").
    unit: Literal["uniform", "mean", "size"]
    signed: bool = False  # whether it is positive for the class and negative against it
    # Whether `eval.py RUN maps` and the Attention tab show it unless told otherwise. The tab has no
    # maps that need pixels or passes.
    default: bool = True
    photos: bool = False  # whether it is drawn for photos unless told otherwise
    options: tuple[str, ...] = ()  # of `vit.explain.maps.attention_maps`, which the function takes

    @property
    def class_specific(self) -> bool:
        """Whether it explains one class, rather than being the same for all."""
        return self.needs != "weights"


# Those that take many passes come last.
ALL_KINDS = {
    "rollout": MapKind(
        "attention rollout", "rollout:attention_rollout", "weights", "uniform",
        photos=True, options=("head_fusion", "discard_ratio", "start_layer"),
    ),
    "gradient_rollout": MapKind(
        "gradient rollout", "rollout:gradient_rollout", "gradients", "uniform"
    ),
    "relevance": MapKind(
        "class relevance", "rollout:class_relevance", "gradients", "mean"
    ),
    "raw": MapKind("last layer's attention", "rollout:raw_attention", "weights", "uniform"),
    "lrp": MapKind(
        "layer-wise relevance", "maps:relevance_of_patches", "relevance", "size",
        signed=True,
    ),
    "lrp_rollout": MapKind(
        "relevance × rollout", "maps:relevance_times_rollout", "relevance", "size"
    ),
    "lrp_pixels": MapKind(
        "layer-wise relevance of pixels", "maps:relevance_of_pixels", "pixels", "size",
        signed=True, photos=True,
    ),
    "occlusion": MapKind(
        "occlusion", "references:occlusion", "passes", "size", signed=True, default=False
    ),
    "integrated_gradients": MapKind(
        "integrated gradients", "references:integrated_gradients_of_patches", "passes", "size",
        signed=True, default=False,
    ),
    "rise": MapKind(
        "RISE", "references:rise", "passes", "size", signed=True, default=False
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Corruption:
    """A corruption of ImageNet-C; the function is that of its name in `vit.data.corruptions`.

    A parameter is a row of five severities, with the published values for images of 32 and 224
    pixels (hendrycks/robustness, make_cifar_c.py and make_imagenet_c.py).
    """

    group: Literal["noise", "blur", "weather", "digital"]  # in arXiv 1903.12261
    at_32: tuple[tuple[float, ...], ...]
    at_224: tuple[tuple[float, ...], ...]


CORRUPTIONS = {
    "gaussian_noise": Corruption(
        "noise", ((0.04, 0.06, 0.08, 0.09, 0.1),), ((0.08, 0.12, 0.18, 0.26, 0.38),)
    ),
    "shot_noise": Corruption("noise", ((500, 250, 100, 75, 50),), ((60, 25, 12, 5, 3),)),
    "impulse_noise": Corruption(
        "noise", ((0.01, 0.02, 0.03, 0.05, 0.07),), ((0.03, 0.06, 0.09, 0.17, 0.27),)
    ),
    "defocus_blur": Corruption(
        "blur", ((0.3, 0.4, 0.5, 1, 1.5), (0.4, 0.5, 0.6, 0.2, 0.1)),
        ((3, 4, 6, 8, 10), (0.1, 0.5, 0.5, 0.5, 0.5)),
    ),
    "glass_blur": Corruption(
        "blur", ((0.05, 0.25, 0.4, 0.25, 0.4), (1, 1, 1, 1, 1), (1, 1, 1, 2, 2)),
        ((0.7, 0.9, 1, 1.1, 1.5), (1, 2, 2, 3, 4), (2, 1, 3, 2, 2)),
    ),
    "motion_blur": Corruption(
        "blur", ((6, 6, 6, 8, 9), (1, 1.5, 2, 2, 2.5)), ((10, 15, 15, 15, 20), (3, 5, 8, 12, 15))
    ),
    "zoom_blur": Corruption(
        "blur", ((7, 12, 16, 21, 26), (1.06, 1.11, 1.15, 1.2, 1.25)),
        ((12, 16, 11, 13, 11), (1.11, 1.15, 1.2, 1.24, 1.3)),
    ),
    "snow": Corruption(
        "weather",
        ((0.1, 0.1, 0.15, 0.25, 0.3), (0.2, 0.2, 0.3, 0.3, 0.3), (1, 1, 1.75, 2.25, 1.25),
         (0.6, 0.5, 0.55, 0.6, 0.65), (8, 10, 10, 12, 14), (3, 4, 4, 6, 12),
         (0.95, 0.9, 0.9, 0.85, 0.8)),
        ((0.1, 0.2, 0.55, 0.55, 0.55), (0.3, 0.3, 0.3, 0.3, 0.3), (3, 2, 4, 4.5, 2.5),
         (0.5, 0.5, 0.9, 0.85, 0.85), (10, 12, 12, 12, 12), (4, 4, 8, 8, 12),
         (0.8, 0.7, 0.7, 0.65, 0.55)),
    ),
    "frost": Corruption(
        "weather", ((1, 1, 0.9, 0.85, 0.75), (0.2, 0.3, 0.4, 0.4, 0.45)),
        ((1, 0.8, 0.7, 0.65, 0.6), (0.4, 0.6, 0.7, 0.7, 0.75)),
    ),
    "fog": Corruption(
        "weather", ((0.2, 0.5, 0.75, 1, 1.5), (3, 3, 2.5, 2, 1.75)),
        ((1.5, 2, 2.5, 2.5, 3), (2, 2, 1.7, 1.5, 1.4)),
    ),
    "brightness": Corruption(
        "weather", ((0.05, 0.1, 0.15, 0.2, 0.3),), ((0.1, 0.2, 0.3, 0.4, 0.5),)
    ),
    "contrast": Corruption(
        "digital", ((0.75, 0.5, 0.4, 0.3, 0.15),), ((0.4, 0.3, 0.2, 0.1, 0.05),)
    ),
    "elastic": Corruption(  # fractions of the shorter side; the published ones are of 32 and 244
        "digital",
        ((0, 0.05, 0.08, 0.1, 0.1), (0, 0.2, 0.06, 0.04, 0.03), (0.08, 0.07, 0.06, 0.05, 0.03)),
        ((2.17857, 2.17857, 0.054464, 0.07625, 0.130714),
         (0.7625, 0.0871429, 0.0108929, 0.0108929, 0.0108929),
         (0.1089286, 0.217857, 0.0217857, 0.0217857, 0.0217857)),
    ),
    "pixelate": Corruption(
        "digital", ((0.95, 0.9, 0.85, 0.75, 0.65),), ((0.6, 0.5, 0.4, 0.3, 0.25),)
    ),
    "jpeg": Corruption("digital", ((80, 65, 58, 50, 40),), ((25, 18, 15, 10, 7),)),
}  # fmt: skip

# What is measured and drawn during training: functions in `vit` that take a `vit.evaluation.Setup`
# and return an Evaluator, or None where there is nothing to do.
EVALUATORS = {
    "validation": "evaluation:Validation",
    "attention": "reporting.attention_logging:attention_logging",
}
REPORT = "reporting.report:write_report"  # on the test images, at the end of a run
