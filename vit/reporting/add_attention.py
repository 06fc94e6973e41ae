"""Logging for the Attention tab, from any model and with any SummaryWriter.

Shapes: B images, L layers, H heads, N tokens (prefix, then patches), C classes.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from vit.classifier import Classifier
from vit.explain.features import coordinates, fit_frames
from vit.explain.kinds import ALL_KINDS
from vit.explain.maps import DEFAULTS, TokenLayout, map_of
from vit.reporting.attention_records import image_records
from vit.reporting.live import add_live
from vit.run.tracker import add_summary
from vit.tensorboard_plugin.encoding import frames_summary, summaries
from vit.tensorboard_plugin.records import Map

SUM_TOLERANCE = 0.01  # of a row of weights; what bfloat16 needs


def add_attention(  # noqa: PLR0913 - like SummaryWriter's methods, all but three by keyword
    writer: SummaryWriter,
    tag: str,
    images: Tensor,
    weights: Tensor | Sequence[Tensor],
    step: int,
    *,
    grid: tuple[int, int],
    num_prefix_tokens: int,
    readout: Literal["class_token", "mean"] | None = None,
    classes: Sequence[str] = (),
    labels: Tensor | Sequence[int] | None = None,
    logits: Tensor | None = None,
    maps: Mapping[str, Tensor] | None = None,
    tokens: Tensor | Sequence[Tensor] | None = None,
    model: Classifier | None = None,
) -> None:
    """Log the attention of any model for the Attention tab.

    Weights are stored with 8 bits and a scale for each row: their error is at most 1/510 of the
    largest weight of their row. Weights of an image are left out if there are over `MAX_WEIGHTS`.

    Args:
        writer: From torch.utils.tensorboard.
        tag: Name of the image in the tab; several images are named TAG_00, TAG_01, ...
        images: (B, 3 or 1, height, width), uint8 or 0 to 1: the images as people should see them.
        weights: Attention weights (L, B, H, N, N), first layer first, rows summing to 1; a tensor
            or a sequence of L tensors.
        step: Optimizer steps done, at least 0.
        grid: Rows and columns of patches.
        num_prefix_tokens: Tokens before the patches (class token and registers).
        readout: What the classifier reads: "class_token" for the first token, "mean" for the mean
            of the patch tokens. None if neither; then no rollout is computed.
        classes: Names of the C classes; if there are none, they are called "class 0", ...
        labels: (B,) indices of the true classes.
        logits: (B, C), for the predictions.
        maps: Maps of the whole image by name, (B, rows, columns) in units of uniform attention;
            names that are signed kinds of `vit.explain.kinds.ALL_KINDS` in units of the mean of
            their absolute values. None computes attention rollout.
        tokens: Outputs of the layers, (L, B, N, D), for the view Features, whose principal
            components are computed from these images.
        model: What returned the weights, for the tab to run it at this step: one model for each
            writer, as `vit.Classifier(model, Preprocess((height, width), mean, std), classes,
            device, torch.float32)`. If it cannot be exported, a warning says why.

    Raises:
        ValueError: An argument has a wrong shape or value; nothing has been written.
    """
    pixels = _pixels(images)
    layers = _layers(weights, len(pixels), grid, num_prefix_tokens)
    _check_target(writer, tag, step, model)
    step, prefix = int(step), _prefix_names(num_prefix_tokens, readout)
    names, true, logits = _predictions(len(pixels), classes, labels, logits)
    if maps is None and readout is not None:
        layout = TokenLayout(grid, num_prefix_tokens, readout)
        maps = {"rollout": map_of("rollout", [layers], layout, DEFAULTS)}
    shown = _maps(maps or {}, len(pixels), grid)
    frames, features = _features(tokens, layers, num_prefix_tokens)
    fields = [{"maps": own, "label": label} for own, label in zip(shown, true, strict=True)]
    records = image_records(
        pixels, layers, grid, prefix, logits, features, fields, readout=readout, classes=names
    )
    if frames is not None:
        add_summary(writer, frames_summary(frames.numpy(), f"{tag}/frames"), step)
    for number, record in enumerate(records):
        name = tag if len(records) == 1 else f"{tag}_{number:02d}"
        add_summary(writer, summaries(name, record, f"{tag}/frames"), step)
    if model is not None:
        add_live(writer, model, torch.from_numpy(pixels).permute(0, 3, 1, 2), step)


def check_reading(
    images: Tensor, weights: Tensor | Sequence[Tensor], grid: tuple[int, int],
    num_prefix_tokens: int, logits: Tensor | None = None, classes: Sequence[str] = (),
    labels: Tensor | Sequence[int] | None = None, **_: Any,
) -> None:  # fmt: skip
    """Check what a model returns, as `add_attention` does before it writes."""
    _layers(weights, len(_pixels(images)), grid, num_prefix_tokens)
    _predictions(len(images), classes, labels, logits)


def _check_target(writer: Any, tag: str, step: int, model: Any) -> None:
    if not isinstance(writer, SummaryWriter):
        kind = f"{type(writer).__module__}.{type(writer).__name__}"
        raise ValueError(f"writer: {kind} is not torch.utils.tensorboard.SummaryWriter")
    if not tag or tag.endswith(("/weights", "/features", "/frames")):
        raise ValueError(
            f"tag: {tag!r} is empty or ends with /weights, /features or /frames, which the tab adds"
        )
    if isinstance(step, bool) or not isinstance(step, Integral) or step < 0:
        raise ValueError(f"step: {step!r} is not a whole number, at least 0")
    if model is not None and not isinstance(model, Classifier):
        raise ValueError(f"model: {type(model).__name__} is not a vit.Classifier")
    if model is not None and model.model.training:
        raise ValueError("model: it is in training mode; call model.model.eval() before")


def _pixels(images: Tensor) -> np.ndarray:
    """Return images as (B, height, width, 3) uint8."""
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape:
        raise ValueError(f"images: {tuple(images.shape)} is not (B, 3 or 1, height, width)")
    images = images.detach().cpu().expand(-1, 3, -1, -1)
    if images.dtype != torch.uint8:
        images = images.float()
        if not (images >= 0).all() or not (images <= 1).all():
            problem = "neither uint8 nor 0 to 1"
            raise ValueError(f"images: values are {problem}; undo the model's normalization first")
        images = (images * 255).round().to(torch.uint8)
    return images.permute(0, 2, 3, 1).numpy()


def _layers(
    weights: Tensor | Sequence[Tensor], batch: int, grid: tuple[int, int], num_prefix_tokens: int
) -> list[Tensor]:
    """Return checked weights as L tensors (B, H, N, N) float32 on the CPU, rows summing to 1."""
    layers = [layer.detach().float().cpu() for layer in weights]
    shapes = {tuple(layer.shape) for layer in layers}
    tokens = num_prefix_tokens + math.prod(grid)
    heads = {shape[1] for shape in shapes if len(shape) == 4 and shape[1]}
    fits = num_prefix_tokens >= 0 and len(heads) == 1
    if not fits or shapes != {(batch, number, tokens, tokens) for number in heads}:
        raise ValueError(
            f"weights: {len(layers)} layers of shapes {shapes} are not all (B, H, N, N) with B = "
            f"{batch} images and N = {tokens} tokens, {num_prefix_tokens} before a grid of "
            f"{grid[0]} x {grid[1]}"
        )
    for number, layer in enumerate(layers):
        if not layer.isfinite().all() or (layer < 0).any():
            raise ValueError(f"weights: layer {number} has negative numbers, inf or nan")
        total = layer.sum(dim=-1, keepdim=True)
        if ((total - 1).abs() > SUM_TOLERANCE).any():
            raise ValueError(
                f"weights: rows of layer {number} sum to {total.min().item():.3g} to "
                f"{total.max().item():.3g}, not 1; pass the softmax, before dropout"
            )
        layers[number] = layer / total
    return layers


def _features(
    tokens: Tensor | Sequence[Tensor] | None, layers: list[Tensor], num_prefix_tokens: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return frames (L, K, D) and features (B, L, P, K); None without tokens."""
    if tokens is None:
        return None, None
    expected, shapes = layers[0].shape[::2], {tuple(layer.shape) for layer in tokens}
    alike = len(tokens) == len(layers) and {shape[:-1] for shape in shapes} == {expected}
    if not alike or len(shapes) > 1 or not all(layer.isfinite().all() for layer in tokens):
        raise ValueError(
            f"tokens: {len(tokens)} of shapes {shapes} are not finite numbers (B, N, D), "
            f"{(*expected, 'D')}, of {len(layers)} layers"
        )
    patches = [layer.detach().float().cpu()[:, num_prefix_tokens:] for layer in tokens]
    frames = fit_frames([patches])
    return frames, coordinates(patches, frames)


def _prefix_names(count: int, readout: str | None) -> list[str]:
    if readout not in ("class_token", "mean", None):
        raise ValueError(f"readout: {readout!r} is not class_token, mean or None")
    if readout != "class_token":
        return [f"prefix token {n}" for n in range(1, count + 1)]
    if count == 0:
        raise ValueError("readout: class_token needs num_prefix_tokens of at least 1")
    return ["class token", *(f"register {n}" for n in range(1, count))]


def _predictions(
    batch: int, classes: Sequence[str], labels: Tensor | Sequence[int] | None, logits: Tensor | None
) -> tuple[list[str], list[int] | list[None], Tensor | None]:
    """Return the names of the classes, a label or None for each image, and the logits."""
    if logits is not None:
        logits = logits.detach().float().cpu()
        if logits.ndim != 2 or logits.shape[0] != batch or not logits.isfinite().all():
            raise ValueError(f"logits: {tuple(logits.shape)} is not ({batch}, C) finite numbers")
        if logits.shape[1] < 2:
            raise ValueError("logits: softmax needs two classes; pass [0, logit] for one logit")
        if len(classes) not in (0, logits.shape[1]):
            raise ValueError(f"classes: {len(classes)} names for {logits.shape[1]} logits")
    true = [] if labels is None else [int(label) for label in labels]
    if labels is not None and len(true) != batch:
        raise ValueError(f"labels: {len(true)} labels for {batch} images")
    known = logits.shape[1] if logits is not None else max(true, default=-1) + 1
    names = [str(name) for name in classes] or [f"class {index}" for index in range(known)]
    if any(not 0 <= index < len(names) for index in true):
        raise ValueError(f"labels: {true} are not all 0 to {len(names) - 1}")
    return names, [None] * batch if labels is None else true, logits


def _maps(maps: Mapping[str, Tensor], batch: int, grid: tuple[int, int]) -> list[list[Map]]:
    """Return the maps of each image."""
    shown: list[list[Map]] = [[] for _ in range(batch)]
    for kind, values in maps.items():
        shape = tuple(values.shape)
        if shape != (batch, *grid) or not values.isfinite().all():
            raise ValueError(f"maps: {kind} is {shape}, not {(batch, *grid)} finite numbers")
        entry = ALL_KINDS.get(kind)
        title, signed = (entry.title, entry.signed) if entry else (kind, False)
        for own, heat in zip(shown, values.float().flatten(1).tolist(), strict=True):
            own.append(Map(kind=kind, title=title, target=None, values=heat, signed=signed))
    return shown
