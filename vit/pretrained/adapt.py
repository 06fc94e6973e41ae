"""Pretrained weights: adopting their architecture, and adapting them to other images and classes.

`vit.pretrained.resolve` decides where weights come from and starts a run with them.
"""

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vit.data.preprocess import Preprocess
from vit.model.config import PATCH_SIZE, ModelConfig
from vit.model.embed import resample_pos_embed
from vit.model.vit import VisionTransformer

# Settings of a run, whatever its weights come from; all others describe the architecture.
_OWN = ("zero_init", "drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate")
ARCHITECTURE = tuple(
    name
    for name, parameter in inspect.signature(VisionTransformer).parameters.items()
    if parameter.default is not parameter.empty and name not in _OWN
)
HEAD = ("head.weight", "head.bias")
USUAL_WIDTH = 64  # of an attention head


@dataclass(frozen=True)
class Pretrained:
    """What is known about pretrained weights, whatever model they are for.

    Attributes:
        name: What the user called them.
        mean: Mean of each channel that images were normalized with, 0 to 1; None if unknown.
        std: Standard deviation that images were normalized with; None if unknown.
        classes: Names of the classes, in the order of the logits; None if unknown.
        progress: How far an unfinished run is that the weights come from, in words; else empty.
    """

    name: str
    mean: tuple[float, ...] | None = field(default=None, kw_only=True)
    std: tuple[float, ...] | None = field(default=None, kw_only=True)
    classes: tuple[str, ...] | None = field(default=None, kw_only=True)
    progress: str = field(default="", kw_only=True)

    def adapted(
        self, model: ModelConfig, preprocess: Preprocess, classes: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], str]:
        """Adapt the weights to the images and classes of a run.

        Args:
            model: Settings of the model.
            preprocess: Gives the size and channels of its images.
            classes: The names of the run's classes.

        Returns:
            Weights by name, without those of the head where it cannot be kept; and a text that
            says what was adapted.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Source(Pretrained):
    """Pretrained weights for our VisionTransformer.

    Attributes:
        settings: Fields of `ModelConfig` that describe their architecture.
        weights: Parameters and buffers by name, on the CPU.
        grid: Rows and columns of patches that the position embeddings belong to.
        assumed: Fields of `settings` that come from the config, because the source does not tell.
    """

    settings: dict[str, Any]
    weights: dict[str, Tensor]
    grid: tuple[int, int]
    assumed: tuple[str, ...] = ()

    def adapted(
        self, model: ModelConfig, preprocess: Preprocess, classes: tuple[str, ...]
    ) -> tuple[dict[str, Tensor], str]:
        """See `Pretrained.adapted`."""
        patch_size = model.patch_size or PATCH_SIZE
        return adapt(self, patch_size, preprocess.image_size, preprocess.channels, classes)


def check_weights(source: Source) -> None:
    """Check that weights are finite, with the names and shapes that their settings describe.

    Raises:
        ValueError: They are not; the message names the first difference, or the first tensor whose
            values are not finite in float32.
    """
    patch_size = source.settings["patch_size"]
    with torch.device("meta"):
        model = VisionTransformer(
            img_size=(source.grid[0] * patch_size, source.grid[1] * patch_size),
            in_chans=source.weights[_stem(source.weights)].shape[1],
            num_classes=1,
            **source.settings,
        )
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    theirs = {key: tuple(value.shape) for key, value in source.weights.items()}
    differences = [
        f"{key} {list(theirs[key])} has no place in the model" if key not in ours
        else f"{key} is missing" if key not in theirs
        else f"{key} is {list(theirs[key])}, not {list(ours[key])}"
        for key in [*theirs, *(ours.keys() - theirs.keys())]
        if key not in HEAD and ours.get(key) != theirs.get(key)
    ]  # fmt: skip
    if differences:
        raise ValueError(
            f"model.pretrained: {source.name} does not fit the VisionTransformer of this project: "
            f"{differences[0]}" + (f" (and {len(differences) - 1} more)" if differences[1:] else "")
        )
    check_finite(source.weights, source.name)


def check_finite(weights: Mapping[str, Tensor], name: str) -> None:
    """Check that weights are finite in float32.

    Raises:
        ValueError: They are not; the message names the first tensor.
    """
    for key, value in weights.items():
        if not value.float().isfinite().all():
            raise ValueError(
                f"model.pretrained: {name} has NaN or infinite values in {key}; the file is "
                "damaged, or its training diverged; choose other weights"
            )


def adopt(config: ModelConfig, settings: dict[str, Any], name: str) -> ModelConfig:
    """Take the architecture of pretrained weights into a config.

    Args:
        config: The settings of the user. Those that differ from the defaults must agree with the
            pretrained weights, except for patch_size, to which the patch embedding is resampled.
        settings: The architecture of the weights.
        name: For messages.

    Raises:
        ValueError: A setting contradicts the weights.
    """
    defaults = ModelConfig()
    for key, theirs in settings.items():
        ours = getattr(config, key)
        if key == "patch_size":
            if ours not in (None, theirs) and settings["stem"] == "conv":
                raise ValueError(
                    f"model.patch_size: {ours} is not allowed; {name} has a convolutional stem for "
                    f"patches of {theirs}, which cannot be resampled; leave the key out"
                )
        elif ours != getattr(defaults, key) and not _same(key, ours, theirs):
            raise ValueError(
                f"model.{key}: {json.dumps(ours)} is not allowed; {name} has {json.dumps(theirs)}; "
                "leave the key out to use "
                "that, or train without model.pretrained"
            )
    patch_size = config.patch_size or settings["patch_size"]
    adopted = dataclasses.replace(config, **{**settings, "patch_size": patch_size})
    dataclasses.replace(adopted, pretrained=None)  # checks the rules between the fields
    return adopted


def _same(key: str, ours: Any, theirs: Any) -> bool:
    if key == "init_values":  # the weights replace the value
        return (ours is None) == (theirs is None)
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-3)
    return bool(ours == theirs)


@torch.no_grad()
def adapt(
    source: Source,
    patch_size: int,
    image_size: tuple[int, int],
    channels: int,
    classes: tuple[str, ...],
) -> tuple[dict[str, Tensor], str]:
    """Adapt weights to other images and classes, as timm does.

    Positions are resampled to the grid (bicubic, antialiased), the patch embedding to the patch
    size by the pseudo-inverse of resizing (arXiv 2212.08013) and to the channels by summing or
    repeating; the head is left out if the classes differ.

    Args:
        source: The weights.
        patch_size: Side of a patch in pixels.
        image_size: Height and width of the images in pixels, multiples of patch_size.
        channels: Channels of the images.
        classes: Names of the classes.

    Returns:
        The weights in float32; and an account of what was loaded, resampled and left out, for
        people.
    """
    from timm.layers.patch_embed import resample_patch_embed
    from timm.models import adapt_input_conv

    weights = {
        key: value.float() if value.is_floating_point() else value
        for key, value in source.weights.items()
    }
    resampled = []
    grid = (image_size[0] // patch_size, image_size[1] // patch_size)
    if "pos_embed" in weights and grid != source.grid:
        num_patches = source.grid[0] * source.grid[1]
        num_prefix = weights["pos_embed"].shape[1] - num_patches
        weights["pos_embed"] = resample_pos_embed(
            weights["pos_embed"], source.grid, grid, num_prefix
        )
        resampled.append(f"positions {_by(source.grid)} -> {_by(grid)} patches")
    stem = _stem(weights)
    kernel = weights[stem]
    if (old_size := source.settings["patch_size"]) != patch_size:
        kernel = resample_patch_embed(kernel, [patch_size, patch_size])
        resampled.append(f"patch embedding {old_size} -> {patch_size} pixels")
    if (old_channels := kernel.shape[1]) != channels:
        kernel = adapt_input_conv(channels, kernel, base_chans=old_channels)
        resampled.append(f"patch embedding {old_channels} -> {channels} channels")
    weights[stem] = kernel
    head = weights.get("head.weight")
    new = why_new_head(None if head is None else len(head), source.classes, classes)
    if new:
        weights = {key: value for key, value in weights.items() if key not in HEAD}
    changes = f"resampled: {'; '.join(resampled)}" if resampled else ""
    return weights, account(source, weights, changes, new, _assumptions(source))


def _stem(weights: dict[str, Tensor]) -> str:
    """Return the name of the first convolution's kernel."""
    return next(
        key for key in weights if key.startswith("patch_embed.proj.") and weights[key].ndim == 4
    )


def why_new_head(rows: int | None, theirs: tuple[str, ...] | None, ours: tuple[str, ...]) -> str:
    """Say why the head of pretrained weights cannot be kept; "" if it can.

    Args:
        rows: Number of its classes; None if there is no head.
        theirs: Their names; None if unknown.
        ours: Names of the classes of the run.
    """
    if rows is None:
        return "the source has none"
    if rows != len(ours):
        return f"there are {len(ours)} classes instead of {rows}"
    return "the classes have other names" if theirs not in (None, ours) else ""


def account(
    source: Pretrained,
    weights: Mapping[str, Tensor],
    changes: str,
    new: str,
    notes: Sequence[str] = (),
) -> str:
    """Say what was loaded, changed and left out.

    Args:
        source: Where the weights come from.
        weights: What is loaded.
        changes: What was changed, if anything.
        new: Why the head is new; "" if it is not.
        notes: More lines.
    """
    number = sum(value.numel() for value in weights.values())
    name = f"{source.name} ({source.progress})" if source.progress else source.name
    lines = [f"weights  {name}: {number:,} values in {len(weights)} tensors loaded"]
    if changes:
        lines.append(changes)
    if new:
        lines.append(f"new: a random head, because {new}")
    elif source.classes is None:
        lines.append("nothing is new; its head is kept, whose classes are taken for the data set's")
    else:
        lines.append("nothing is new: its head has the same classes")
    lines += notes
    if source.mean is not None and source.std is not None:
        mean, std = (", ".join(f"{x:.4g}" for x in values) for values in (source.mean, source.std))
        lines.append(f"images are normalized as its own were: mean {mean}; std {std}")
    else:
        lines.append(
            "not in the file: mean and std of the images, so those of the data set are used; "
            "timm's config.json of these weights has them: pass a folder with both files"
        )
    return "\n         ".join(lines)


def _assumptions(source: Source) -> list[str]:
    """Say which settings a bare state dict does not tell, and which of them are unusual."""
    lines = []
    if source.assumed:
        values = ", ".join(f"{key}={source.settings[key]}" for key in source.assumed)
        lines.append(f"not in the file, from the config: {values}")
    width = source.settings["embed_dim"] // source.settings["num_heads"]
    usual, rest = divmod(source.settings["embed_dim"], USUAL_WIDTH)
    if "num_heads" in source.assumed and width != USUAL_WIDTH and not rest:
        lines.append(
            f"warning: heads are {width} wide with num_heads={source.settings['num_heads']}; in "
            f"most models they are {USUAL_WIDTH} wide, which is --model.num_heads {usual}"
        )
    return lines


def _by(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
