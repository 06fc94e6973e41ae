"""What a run is checked for before it reads data or touches its folder.

The model is built on torch's "meta" device, where tensors have no values and take no time.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from vit.classifier import Classifier, build_model
from vit.config import OPTIMIZERS, Config
from vit.console import shorten, sides, warn
from vit.data.images import ImageSet
from vit.data.layout import find_parts
from vit.data.preprocess import Preprocess
from vit.model.attention_model import require_attention, size_unit
from vit.model.embed import image_conv
from vit.model.timm_model import timm_name
from vit.model.variants import check_attention, is_edited
from vit.settings import check
from vit.training.schedule import scaled_size

CLASSES = tuple("0123456789")  # any do


def check_config(config: Config) -> None:
    """Check what needs neither data nor run folder.

    Raises:
        ValueError: The run is inside the data, or the model cannot be built for the images.
    """
    out, root = Path(config.out).resolve(), Path(config.data.root).resolve()
    is_inside = config.data.name == "folder" and out.is_relative_to(root)
    if is_inside and len(find_parts(root)) == 1:
        place = f"data.root={config.data.root}, where every folder is a class"
        raise ValueError(f"out: {config.out} is inside {place}; choose another --out")
    preprocess, meta = Preprocess.from_config(config.data), torch.device("meta")
    try:
        with meta:
            model = build_model(replace(config.model, attention="dot"), preprocess, len(CLASSES))
    except ValueError as error:
        raise ValueError(f"model.{str(error).removeprefix('model.')}") from None
    untrained = Classifier(model.eval(), preprocess, CLASSES, meta, torch.float32)
    if config.model.name == "vit":
        _check_vit(config, untrained)
    else:
        _check_timm(config, untrained)


def warn_of_seen_images(
    key: str, name: str, other: Config, files: str, own: Config, training: ImageSet
) -> None:
    """Warn if the trained model of a key may have learned from images that a run holds out.

    It was trained with the config `other`, on the user's files with the fingerprint `files`, if
    any; the run has the config `own`.
    """
    files_differ = other.data.name == own.data.name and files not in ("", training.fingerprint)
    if files_differ or may_have_seen(other, own):
        split = "another data.val_size, data.test_fraction or train.seed"
        warn(
            f"{key}: {name} was trained with {'other files' if files_differ else split}, and may "
            "have seen images that this run holds out, whose accuracy would be too high"
        )


def may_have_seen(other: Config, own: Config) -> bool:
    """Tell whether a model may have learned from images that a run validates or tests with."""
    old, new = other.data, own.data
    if old.name != new.name:
        return False
    same_split = (old.val_size, other.train.seed) == (new.val_size, own.train.seed)
    return old.test_fraction != new.test_fraction or (new.val_size != 0 and not same_split)


def check_processes(config: Config, processes: int) -> None:
    """Check that a run has the number of processes that it asks for, and they can share a batch.

    Raises:
        ValueError: Another number was started, or a batch cannot be divided into that many parts.
    """
    train, parts = config.train, config.train.accumulate * processes
    allowed = (
        f"null or {processes} here: train.py starts processes, a call of train from Python does "
        "not, and torchrun takes the number from its own command line"
    )
    check(train, "processes", train.processes in (None, processes), allowed)
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


def _check_vit(config: Config, untrained: Classifier) -> None:
    """Try the attention of our VisionTransformer on the tokens of a run's images."""
    model, train = config.model, config.train
    if not is_edited(model.attention):
        return
    built, size = require_attention(untrained.model), untrained.preprocess.image_size
    width = model.head_dim or model.embed_dim // model.num_heads
    sizes = {size: ""}
    if train.small_share:
        small = scaled_size(size, train.small_scale, built.patch_embed.patch_size)
        sizes.setdefault(small, "; --train.small_share 0 trains with no fewer")
    for size, hint in sizes.items():
        settings = model.num_heads, width, model.embed_dim, built.patch_embed.grid(*size)
        check_attention(model.attention, *settings, built.num_prefix_tokens, hint)


def _check_timm(config: Config, untrained: Classifier) -> None:
    """Check that a timm model takes the images and the way of training."""
    name, train, model = config.model.name, config.train, untrained.model
    image_size = untrained.preprocess.image_size
    if problem := problem_with(untrained, image_size):
        made_for = getattr(model, "pretrained_cfg", {}).get("input_size", (3, 224, 224))[1:]
        raise ValueError(
            f"model.name: {name} does not take the images of this data set, {sides(image_size)} "
            f"pixels ({shorten(problem, 150)}); {timm_name(model)} is made for {sides(made_for)} "
            "pixels, and some models can be fitted to others with --model.timm_args, e.g. "
            "'{patch_size: 4}'"
        )
    small = scaled_size(image_size, train.small_scale, size_unit(model))
    if train.small_share and problem_with(untrained, small):
        allowed = f"which takes images of {sides(image_size)} pixels but not of {sides(small)}"
        check(train, "small_share", False, f"0 with model.name={name}, {allowed}")
    if train.whiten and image_conv(model, untrained.preprocess.channels) is None:
        allowed = "which does not begin with a convolution of the image"
        check(train, "whiten", False, f"false with model.name={name}, {allowed}")
    if OPTIMIZERS[config.optim.name].muon and not untrained.has_maps:
        allowed = "muon is for the encoder blocks of Vision Transformers"
        check(config.optim, "name", False, f"adamw with model.name={name}; {allowed}")
    if train.checkpoint_blocks:
        try:
            cast(Any, model).set_grad_checkpointing()
        except (AssertionError, AttributeError, NotImplementedError):  # what timm's models raise
            allowed = f"false with model.name={name}, for which timm does not offer it"
            check(train, "checkpoint_blocks", False, allowed)


def problem_with(classifier: Classifier, image_size: tuple[int, int]) -> str | None:
    """Say why a model does not classify images of a size; None if it does."""
    channels, expected = classifier.preprocess.channels, (2, len(classifier.classes))
    try:
        with torch.no_grad():
            images = torch.zeros(2, channels, *image_size, device=classifier.device)
            logits = classifier.model(images)
    except Exception as error:  # timm checks sizes in many places and ways
        return str(error) or repr(error)
    shape = getattr(logits, "shape", None)
    return None if shape == expected else f"it returns {shape or type(logits).__name__}"
