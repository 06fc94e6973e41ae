"""Rules about a config that involve the data set or the number of processes."""

import math
from pathlib import Path

from vit.data.layout import has_parts
from vit.model.config import ModelConfig
from vit.settings import divisors, require
from vit.training.config import Config


def check_sizes(config: Config) -> None:
    """Check that model and augmentation fit the images of the data set.

    `ModelConfig` and `AugmentConfig` cannot check this themselves: the image size belongs to the
    data set.

    Raises:
        ValueError: The patch size does not divide the image size or is not supported by the stem,
            the crop padding is not smaller than the image, or the data set has other channels.
    """
    require(
        config.data.channels in (None, 1, 3) or config.data.spec.own_files,
        "data.channels",
        config.data.channels,
        f"1 or 3 with data.name={config.data.name}",
    )
    height, width = config.data.spec.image_size
    patch_size, padding = config.model.patch_size, config.augment.crop_padding
    size = f"{height}" if height == width else f"{height}x{width}"
    common = math.gcd(height, width)
    is_timm = config.model.name != "vit"
    # A pretrained model brings its patch size, and a stem that fits it.
    if config.data.image_size is not None and not is_timm and patch_size is not None:
        nearest = [patch_size * max(1, round(n / patch_size)) for n in (height, width)]
        require(
            common % patch_size == 0,
            "data.image_size",
            size,
            f"a multiple of model.patch_size={patch_size}, e.g. "
            + " ".join(map(str, nearest[:1] if height == width else nearest)),
        )
    require(
        is_timm or patch_size is None or common % patch_size == 0,
        "model.patch_size",
        patch_size,
        f"a divisor of the image size, {size}: {divisors(common)}",
    )
    require(
        config.model.stem == "linear"
        or config.model.pretrained is not None
        or patch_size is None
        or patch_size.bit_count() == 1,
        "model.patch_size",
        patch_size,
        "a power of two with model.stem=conv",
    )
    limit = min(height, width) - 1
    require(
        config.augment.crop == "resized" or padding <= limit,
        "augment.crop_padding",
        padding,
        f"0 to {limit} pixels with images of {size} pixels",
    )


def check_config(config: Config) -> None:
    """Check what needs neither data nor run folder; a chosen attention is loaded.

    Raises:
        ValueError: As for `check_sizes`; the run is inside the data; a timm model does not fit the
            run; or the attention cannot be used.
    """
    check_sizes(config)
    check_out(config)
    model, image_size = config.model, config.data.spec.image_size
    if model.name != "vit":
        from vit.training.timm_rules import check_timm  # late: it imports torch and timm

        check_timm(config, image_size, config.data.spec.channels)
    elif model.attention != "dot":
        from vit.model.variants import check_attention, load_attention  # late: it imports torch

        load_attention(model.attention)
        if model.patch_size is not None:  # otherwise the pretrained model decides
            prefix = model.class_token + model.reg_tokens
            patches = math.prod(image_size) // model.patch_size**2
            width = model.head_dim or model.embed_dim // model.num_heads
            check_attention(model.attention, model.num_heads, prefix + patches, width)


def check_out(config: Config) -> None:
    """Check that the run is not written among class folders, where it would be taken for a class.

    Raises:
        ValueError: It would be.
    """
    out, root = Path(config.out).resolve(), Path(config.data.root).expanduser().resolve()
    if config.data.name == "folder" and out.is_relative_to(root) and not has_parts(root):
        raise ValueError(
            f"out: {config.out} is inside data.root={config.data.root}, where every folder is a "
            "class; choose another --out"
        )


def check_processes(config: Config, processes: int) -> None:
    """Check that the processes of a run are as many as it asks for, and can share its batches.

    Raises:
        ValueError: Another number was started, a batch cannot be divided among the processes and
            `train.accumulate` parts, or a part has too few images for batch norm or an odd number
            of images to be mixed in pairs.
    """
    train = config.train
    require(
        train.processes in (None, processes),
        "train.processes",
        train.processes,
        f"null or {processes} here: train.py starts processes, a call of train from Python does "
        "not, and torchrun takes the number from its own command line",
    )
    parts = train.accumulate * processes
    if train.batch_size % parts:
        raise ValueError(
            f"train.batch_size: {train.batch_size} cannot be divided among {processes} processes "
            f"with train.accumulate={train.accumulate}; it must be a multiple of {parts}"
        )
    if config.augment.mixes and processes > 1 and train.batch_size // processes % 2:
        raise ValueError(
            f"train.batch_size: {train.batch_size} is an odd number of images in each of "
            f"{processes} processes, but augment.mixup and augment.cutmix mix pairs; it must be a "
            f"multiple of {processes * math.lcm(2, train.accumulate)}"
        )
    if train.batch_size == parts and (owner := _batch_norm_of(config.model)):
        raise ValueError(
            f"train.batch_size: {train.batch_size} in {parts} parts (train.accumulate, "
            f"processes) is one image at a time; the batch norm of {owner} needs two"
        )


def _batch_norm_of(model: ModelConfig) -> str:
    """Return the setting because of which a model has batch norm; "" if it has none."""
    if model.name != "vit":
        from vit.training.timm_rules import has_batch_norm  # late: it imports torch and timm

        return f"model.name={model.name}" if has_batch_norm(model) else ""
    return "model.stem=conv" if model.stem == "conv" else ""
