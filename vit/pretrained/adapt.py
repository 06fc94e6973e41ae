"""Pretrained weights, adapted to other images and classes as timm does it."""

import dataclasses
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit.config import Config
from vit.console import shorten, sides
from vit.data.config import DatasetSpec
from vit.data.preprocess import Preprocess
from vit.model.config import PATCH_SIZE, TIMM, ModelConfig
from vit.model.embed import resample_pos_embed
from vit.model.positions import fit_bias_table
from vit.model.timm_model import NORM_EPS, complete_arguments, create
from vit.model.vit import VisionTransformer
from vit.pretrained.architecture import BIAS_TABLE

HEAD = ("head.weight", "head.bias")
CLASSES = 10  # any number does
COUNTER = "num_batches_tracked"  # of batch norm; old files lack it


@dataclass(frozen=True)
class Pretrained:
    """Pretrained weights, and what is known about them; None is unknown."""

    name: str  # for messages
    settings: dict[str, Any]  # fields of `ModelConfig` that describe their model
    weights: dict[str, Tensor]  # parameters and buffers by timm's names, on the CPU
    input_size: tuple[int, int, int] | None = None  # channels, height and width of their images
    mean: tuple[float, ...] | None = None  # of each channel that images were normalized with
    std: tuple[float, ...] | None = None
    classes: tuple[str, ...] | None = None  # their names, in the order of the logits
    notes: tuple[str, ...] = ()  # lines that the user should read
    head: tuple[str, ...] = HEAD  # tensors whose shape depends on the number of classes
    config: Config | None = None  # of the run of this project that trained them
    fingerprint: str = ""  # of the user's files in that run

    def adapted(self, classes: tuple[str, ...]) -> tuple[dict[str, Tensor], str]:
        """Return the weights without a head of other classes, and say what is loaded and new."""
        rows = max((len(self.weights[key]) for key in self.head if key in self.weights), default=0)
        kept = {key: value for key, value in self.weights.items() if key not in self.head}
        new = "new: a random classifier, because"
        if not rows:
            head = f"{new} the source has none"
        elif rows != len(classes):
            head = f"{new} there are {len(classes)} classes instead of {rows}"
        elif self.classes is not None and {*self.classes} != {*classes}:
            head = f"{new} the classes have other names"
        else:
            same = "has the same classes" if self.classes else "may have the data set's classes"
            head = f"nothing is new: its classifier {same}"
            order = [(self.classes or classes).index(name) for name in classes]
            kept = {k: v[order] if k in self.head else v for k, v in self.weights.items()}
        number = sum(value.numel() for value in kept.values())
        lines = [f"weights  {self.name}: {number:,} values in {len(kept)} tensors loaded"]
        lines += [*self.notes, head]
        if self.mean is not None and self.std is not None:
            mean, std = (", ".join(f"{x:.4g}" for x in values) for values in (self.mean, self.std))
            lines.append(f"images are normalized as for these weights: mean {mean}; std {std}")
        else:
            lines.append(
                "not in the file: mean and std of the images, so those of the data set are used"
            )
        return kept, "\n         ".join(lines)


def with_statistics(preprocess: Preprocess, source: Pretrained | Preprocess | None) -> Preprocess:
    """Take mean and std, where they are known, from pretrained weights or the start of a run.

    For another number of channels, they are averaged (one channel) or repeated.
    """
    if source is None or source.mean is None or source.std is None:
        return preprocess
    mean, std = (_for_channels(v, preprocess.channels) for v in (source.mean, source.std))
    return dataclasses.replace(preprocess, mean=mean, std=std)


def _for_channels(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if channels == 1:
        return (sum(values) / len(values),)
    return tuple(values[channel % len(values)] for channel in range(channels))


def fit(source: Pretrained, model: ModelConfig, images: DatasetSpec) -> Pretrained:
    """Fit weights to a model of their architecture and the images of a run, in float32.

    The notes say what changed. The head stays as it is, see `adapted`.

    Raises:
        ValueError: A weight is not finite in float32; or timm cannot build its model, or fit the
            weights to it.
    """
    weights = {k: v.float() if v.is_floating_point() else v for k, v in source.weights.items()}
    for key, value in weights.items():
        if source.config is None and not value.isfinite().all():  # else it was checked on loading
            raise ValueError(
                f"model.pretrained: {source.name} has NaN or infinite values in {key}; the file is "
                "damaged, or its training diverged; choose other weights"
            )
    source = dataclasses.replace(source, weights=weights)
    fit_kind = _fit_vit if model.name == "vit" else _fit_timm
    fitted, changes = fit_kind(source, model, images)
    notes = [f"adapted: {shorten('; '.join(changes), 200)}"] if changes else []
    return dataclasses.replace(fitted, notes=(*notes, *source.notes))


@torch.no_grad()
def _fit_vit(
    source: Pretrained, model: ModelConfig, images: DatasetSpec
) -> tuple[Pretrained, list[str]]:
    """Fit weights of our VisionTransformer.

    Positions are resampled to the grid and tables of biases cut or extended; the patch embedding is
    resampled to the patch size by the pseudo-inverse of resizing (arXiv 2212.08013) and fitted to
    the channels by summing or repeating.
    """
    from timm.layers.patch_embed import resample_patch_embed
    from timm.models import adapt_input_conv

    assert source.input_size is not None
    old_channels, height, width = source.input_size
    if source.config is None:  # else it was checked on loading
        _check_vit(source, old_channels, (height, width))
    weights, changes = dict(source.weights), []
    before, now = source.settings["patch_size"], model.patch_size or PATCH_SIZE
    old_grid = (height // before, width // before)
    grid = (images.image_size[0] // now, images.image_size[1] // now)
    if 0 in grid:
        size = sides(images.image_size)
        raise ValueError(
            f"model.patch_size: {now} is larger than the images, {size} pixels; use a smaller one, "
            "or a larger data.image_size"
        )
    tokens = source.settings["class_token"] + source.settings["reg_tokens"]
    if "pos_embed" in weights and grid != old_grid:
        prefix = 0 if model.no_embed_class else tokens
        weights["pos_embed"] = resample_pos_embed(weights["pos_embed"], old_grid, grid, prefix)
        changes.append(f"positions {sides(old_grid)} -> {sides(grid)} patches")
    if source.settings["rel_pos"] == "bias" and grid != old_grid:
        for key in map(BIAS_TABLE.format, range(model.depth)):
            weights[key] = fit_bias_table(weights[key], old_grid, grid, tokens)
        changes.append(f"position biases {sides(old_grid)} -> {sides(grid)} patches")
    # The kernel of the first convolution, also of a convolutional stem.
    stem = next(k for k, v in weights.items() if k.startswith("patch_embed.proj.") and v.ndim == 4)
    if before != now:
        weights[stem] = resample_patch_embed(weights[stem], [now, now])
        changes.append(f"patch embedding {before} -> {now} pixels")
    if old_channels != images.channels:
        weights[stem] = adapt_input_conv(images.channels, weights[stem], base_chans=old_channels)
        changes.append(f"patch embedding {old_channels} -> {images.channels} channels")
    if HEAD[0] in weights and weights[HEAD[0]].shape[1:] != (model.embed_dim,):
        weights = {key: value for key, value in weights.items() if key not in HEAD}
        changes.append("without the classifier, which reads more than one token")
    return dataclasses.replace(source, weights=weights), changes


def _check_vit(source: Pretrained, channels: int, size: tuple[int, int]) -> None:
    """Check names and shapes of weights, except for the head's."""
    with torch.device("meta"):
        model = VisionTransformer(
            img_size=size, in_chans=channels, num_classes=CLASSES, **source.settings
        )
    body = {key: value.to("meta") for key, value in source.weights.items() if key not in HEAD}
    head = {key: value for key, value in model.state_dict().items() if key in HEAD}
    try:
        model.load_state_dict({**body, **head})
    except RuntimeError as error:
        raise ValueError(
            f"model.pretrained: {source.name} does not fit our VisionTransformer: "
            f"{shorten(error, 200)}; choose other weights, or train them in timm's model: add "
            "--model.name timm:NAME"
        ) from None


def _fit_timm(
    source: Pretrained, config: ModelConfig, images: DatasetSpec
) -> tuple[Pretrained, list[str]]:
    """Fit weights of a timm model: its first convolution, positions and patch embedding."""
    weights, size = source.weights, images.image_size
    complete = complete_arguments(config.name, config.timm_args or {}, size, images.channels)
    with torch.device("meta"):
        model: Any = create(config.name, {**complete, "num_classes": CLASSES})
        larger = create(config.name, {**complete, "num_classes": CLASSES + 1}).state_dict()
    expected = model.state_dict()
    head = tuple(key for key, value in expected.items() if value.shape != larger[key].shape)
    body = {key: value for key, value in weights.items() if key not in head}
    differing = (expected.keys() ^ weights.keys()) - {*head}
    try:
        if names := sorted(key for key in differing if not key.endswith(COUNTER)):
            raise ValueError("their tensors differ in " + ", ".join(names))
        attention, rel_pos = map(source.settings.get, ("attention", "rel_pos"))
        if attention not in (None, "dot"):
            raise ValueError(f"it lacks their {attention} attention")
        if rel_pos == "rope" and getattr(model, "rope", None) is None:
            raise ValueError("it lacks their rotary positions")
        about = dict(model.pretrained_cfg)
        about["input_size"] = source.input_size or about["input_size"]
        conv = f"{about.get('first_conv')}.weight"
        if source.input_size is None and conv in body and body[conv].ndim == 4:
            channels = body[conv].shape[1] * images.channels // expected[conv].shape[1]
            about["input_size"] = (channels, *about["input_size"][1:])
        fitted = _load(config.name, complete, about, body)
    except Exception as error:  # timm checks shapes in many places and ways
        raise ValueError(
            f"model.pretrained: timm cannot fit {source.name} to this {config.name} for images of "
            f"{images.channels} channels: {shorten(error, 200)}; name their model with model.name, "
            "and its arguments with model.timm_args"
        ) from None
    changes = [
        f"{key} {sides(body[key].shape)} -> {sides(value.shape)}"
        for key, value in fitted.items()
        if key in body and not torch.equal(body[key], value)
    ]
    kept = {key: value for key, value in fitted.items() if key not in head}
    if all(key in weights and weights[key].shape[1:] == expected[key].shape[1:] for key in head):
        kept |= {key: weights[key] for key in head}
    return dataclasses.replace(source, weights=kept, head=head), changes


def _load(
    name: str, arguments: dict[str, Any], about: dict[str, Any], body: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Let timm load weights without a head into a new model, and return its state dict."""
    import timm

    channels, old_channels = arguments["in_chans"], about["input_size"][0]
    if channels != old_channels:
        convs = about.get("first_conv") or ()
        for conv in (convs,) if isinstance(convs, str) else convs:
            # Raises an error where timm would only warn and leave the kernels random.
            timm.models.adapt_input_conv(channels, body[f"{conv}.weight"], old_channels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about how timm resamples
        loaded = timm.create_model(
            name.removeprefix(TIMM),
            pretrained=True,
            pretrained_cfg_overlay={
                "state_dict": body,
                "input_size": about["input_size"],
                # Not the model's number, so that timm does not look for a head.
                "num_classes": CLASSES + 1,
                "classifier": about["classifier"] or (),
            },
            num_classes=CLASSES,
            **{key: value for key, value in arguments.items() if key != NORM_EPS},
        )
    return loaded.state_dict()
