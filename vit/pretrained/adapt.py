"""Pretrained weights, and how they are adapted to other images and classes.

Our VisionTransformer is adapted as timm adapts its own; timm models are adapted by timm's code.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit.model.config import PATCH_SIZE, TIMM, ModelConfig
from vit.model.embed import resample_pos_embed
from vit.model.timm_model import NORM_EPS, complete_arguments, create, head_names
from vit.pretrained.architecture import HEAD, check_names, num_prefix_tokens
from vit.settings import shorten

CLASSES = 10  # any number does
SHOWN = 4  # tensors that the account names


@dataclass(frozen=True)
class Pretrained:
    """Pretrained weights, and what is known about them.

    Attributes:
        name: What the user called them.
        settings: Fields of `ModelConfig` that describe their model.
        weights: Parameters and buffers by timm's names, on the CPU.
        input_size: Channels, height and width of the images that they were trained on; None if
            unknown, which it may be for a timm model.
        mean: Mean of each channel that images were normalized with, 0 to 1; None if unknown.
        std: Standard deviation that images were normalized with; None if unknown.
        classes: Names of the classes, in the order of the logits; None if unknown.
        progress: How far an unfinished run is that the weights come from, in words; else empty.
        notes: What the user should know about them, in lines.
        head: Names of the tensors whose shape depends on the number of classes.
    """

    name: str
    settings: dict[str, Any]
    weights: dict[str, Tensor]
    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None
    progress: str = ""
    notes: tuple[str, ...] = ()
    head: tuple[str, ...] = HEAD

    def adapted(self, classes: tuple[str, ...]) -> tuple[dict[str, Tensor], str]:
        """Leave the head out if the classes differ.

        Args:
            classes: Names of the classes of the run.

        Returns:
            Weights by name; and an account of what was loaded, adapted and left out, for people.
        """
        rows = [len(self.weights[key]) for key in self.head if key in self.weights]
        new = ""
        if not rows:
            new = "the source has none"
        elif max(rows) != len(classes):
            new = f"there are {len(classes)} classes instead of {max(rows)}"
        elif self.classes not in (None, classes):
            new = "the classes have other names"
        kept = {k: v for k, v in self.weights.items() if not new or k not in self.head}
        return kept, self._account(kept, new)

    def _account(self, weights: Mapping[str, Tensor], new: str) -> str:
        number = sum(value.numel() for value in weights.values())
        name = f"{self.name} ({self.progress})" if self.progress else self.name
        lines = [f"weights  {name}: {number:,} values in {len(weights)} tensors loaded"]
        lines += self.notes
        if new:
            lines.append(f"new: a random head, because {new}")
        elif self.classes is None:
            lines.append("nothing is new: its head is kept, as its classes may be the data set's")
        else:
            lines.append("nothing is new: its head has the same classes")
        if self.mean is not None and self.std is not None:
            mean, std = (", ".join(f"{x:.4g}" for x in values) for values in (self.mean, self.std))
            lines.append(f"images are normalized as for these weights: mean {mean}; std {std}")
        else:
            lines.append(
                "not in the file: mean and std of the images, so those of the data set are used; "
                "timm's config.json of these weights has them: pass a folder with both files"
            )
        return "\n         ".join(lines)


def fit(
    source: Pretrained, model: ModelConfig, image_size: tuple[int, int], channels: int
) -> Pretrained:
    """Fit weights to the images of a run. The head stays as it is, see `Pretrained.adapted`.

    Args:
        source: The weights.
        model: The model, with the architecture of the weights.
        image_size: Height and width of the images, in pixels.
        channels: Channels of the images.

    Returns:
        The weights in float32, and a note of what was changed.

    Raises:
        ValueError: A weight is not finite in float32; or, for a timm model, timm cannot build it,
            or the weights are those of another one or cannot be fitted to these images.
    """
    weights = {
        key: value.float() if value.is_floating_point() else value
        for key, value in source.weights.items()
    }
    for key, value in weights.items():
        if not value.isfinite().all():
            raise ValueError(
                f"model.pretrained: {source.name} has NaN or infinite values in {key}; the file is "
                "damaged, or its training diverged; choose other weights"
            )
    source = dataclasses.replace(source, weights=weights)
    fit_kind = _fit_vit if model.name == "vit" else _fit_timm
    fitted, changes = fit_kind(source, model, image_size, channels)
    notes = (f"adapted: {changes}", *source.notes) if changes else source.notes
    return dataclasses.replace(fitted, notes=notes)


@torch.no_grad()
def _fit_vit(
    source: Pretrained, model: ModelConfig, image_size: tuple[int, int], channels: int
) -> tuple[Pretrained, str]:
    """Fit weights of our VisionTransformer, as timm does.

    Positions are resampled to the grid (bicubic, antialiased), the patch embedding to the patch
    size by the pseudo-inverse of resizing (arXiv 2212.08013) and to the channels by summing or
    repeating.
    """
    from timm.layers.patch_embed import resample_patch_embed
    from timm.models import adapt_input_conv

    assert source.input_size is not None
    weights, changes = dict(source.weights), []
    before, now = source.settings["patch_size"], model.patch_size or PATCH_SIZE
    old_channels, *old_size = source.input_size
    old_grid = (old_size[0] // before, old_size[1] // before)
    grid = (image_size[0] // now, image_size[1] // now)
    if "pos_embed" in weights and grid != old_grid:
        prefix = 0 if model.no_embed_class else num_prefix_tokens(source.settings)
        weights["pos_embed"] = resample_pos_embed(weights["pos_embed"], old_grid, grid, prefix)
        changes.append(f"positions {_by(old_grid)} -> {_by(grid)} patches")
    # The kernel of the first convolution, also of a convolutional stem.
    stem = next(k for k, v in weights.items() if k.startswith("patch_embed.proj.") and v.ndim == 4)
    if before != now:
        weights[stem] = resample_patch_embed(weights[stem], [now, now])
        changes.append(f"patch embedding {before} -> {now} pixels")
    if old_channels != channels:
        weights[stem] = adapt_input_conv(channels, weights[stem], base_chans=old_channels)
        changes.append(f"patch embedding {old_channels} -> {channels} channels")
    return dataclasses.replace(source, weights=weights), "; ".join(changes)


def _fit_timm(
    source: Pretrained, config: ModelConfig, image_size: tuple[int, int], channels: int
) -> tuple[Pretrained, str]:
    """Fit weights of a timm model, as `timm.create_model` does.

    timm adapts the first convolution to the channels, and resamples positions, relative positions
    and patch embeddings of the models that have them.
    """
    weights = source.weights
    complete = complete_arguments(config.name, config.timm_args or {}, image_size, channels)
    head = head_names(config.name, complete)
    with torch.device("meta"):
        model = create(config.name, {**complete, "num_classes": CLASSES})
    expected = model.state_dict()
    advice = "name their model with model.name, and its arguments with model.timm_args"
    check_names(weights, expected, head, f"{source.name} does not fit {config.name}", advice)
    body = {key: value for key, value in weights.items() if key not in head}
    try:
        fitted = _load(source, body, model, config.name, complete)
    except Exception as error:  # timm checks shapes in many places and ways
        reason = str(error).partition("state_dict for")[2].partition("size mismatch for ")[2]
        raise ValueError(
            f"model.pretrained: timm cannot fit {source.name} to this {config.name} for images of "
            f"{channels} channels: {shorten(reason or error, 200)}; {advice}"
        ) from None
    adapted = [
        f"{key} {_by(body[key].shape)} -> {_by(value.shape)}"
        for key, value in fitted.items()
        if key in body and not torch.equal(body[key], value)
    ]
    more = f" and {len(adapted) - SHOWN} more" if len(adapted) > SHOWN else ""
    kept = {key: value for key, value in fitted.items() if key not in head}
    if all(key in weights and weights[key].shape[1:] == expected[key].shape[1:] for key in head):
        kept |= {key: weights[key] for key in head}
    return dataclasses.replace(source, weights=kept, head=head), "; ".join(adapted[:SHOWN]) + more


def _load(
    source: Pretrained,
    body: dict[str, Tensor],
    model: Any,
    name: str,
    arguments: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Let timm load weights without a head into a new model, and return its state dict."""
    import timm

    about, channels = model.pretrained_cfg, arguments["in_chans"]
    _, *size = source.input_size or about["input_size"]
    convs = about.get("first_conv") or ()
    adapted = {}  # here, because timm leaves random kernels where this fails
    for conv in (convs,) if isinstance(convs, str) else convs:
        kernel, new = body[f"{conv}.weight"], model.get_parameter(f"{conv}.weight")
        # Some models divide the image into more channels before their first convolution.
        before = kernel.shape[1] * channels // new.shape[1] if new.ndim == 4 else 3
        if before != channels:
            adapted[f"{conv}.weight"] = timm.models.adapt_input_conv(channels, kernel, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about how timm resamples
        loaded = timm.create_model(
            name.removeprefix(TIMM),
            pretrained=True,
            pretrained_cfg_overlay={
                "state_dict": {**body, **adapted},
                "input_size": (channels, *size),
                # Other classes than the model's, so that timm does not look for a head.
                "num_classes": CLASSES + 1,
                "classifier": about["classifier"] or (),
            },
            num_classes=CLASSES,
            **{key: value for key, value in arguments.items() if key != NORM_EPS},
        )
    return loaded.state_dict()


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size))
