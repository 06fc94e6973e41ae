"""Logging for the Attention tab, from any model and with any SummaryWriter.

Shapes: B images, L layers, H heads, N tokens (prefix, then patches), C classes.
"""

import math
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from vit.console import warn
from vit.registry import ALL_KINDS
from vit.tensorboard_plugin.encoding import frames_summary, summaries
from vit.tensorboard_plugin.records import (
    FRAMES_TAG,
    MAX_WEIGHTS,
    TOP_CLASSES,
    Details,
    Map,
    Record,
    Statistics,
    image_url,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter

    from vit.classifier import Classifier

SUM_TOLERANCE = 0.01  # of a row of weights; what bfloat16 needs


def add_record(writer: "SummaryWriter", tag: str, record: Record, step: int) -> None:
    """Write a record.

    Args:
        writer: From torch.utils.tensorboard.
        tag: Name of the image.
        record: What the tab shows.
        step: Optimizer steps done.
    """
    writer._get_file_writer().add_summary(summaries(tag, record), step)


def add_frames(
    writer: "SummaryWriter", frames: np.ndarray, step: int, tag: str = FRAMES_TAG
) -> None:
    """Write the frames of features, (L, K, D), under the tag that records name."""
    writer._get_file_writer().add_summary(frames_summary(frames, tag), step)


def add_attention(  # noqa: PLR0913 - like SummaryWriter's methods, all but three by keyword
    writer: "SummaryWriter",
    tag: str,
    images: "Tensor",
    weights: "Tensor | Sequence[Tensor]",
    step: int,
    *,
    grid: tuple[int, int],
    num_prefix_tokens: int,
    readout: Literal["class_token", "mean"] | None = None,
    prefix_names: Sequence[str] | None = None,
    classes: Sequence[str] = (),
    labels: "Tensor | Sequence[int] | None" = None,
    logits: "Tensor | None" = None,
    maps: "Mapping[str, Tensor] | None" = None,
    tokens: "Tensor | Sequence[Tensor] | None" = None,
    model: "Classifier | None" = None,
) -> None:
    """Log the attention of any model for the Attention tab.

    Weights are stored with 8 bits and a scale for each row, so they are off by at most 1/510 of the
    largest weight of their row. An image with more than `MAX_WEIGHTS` of them is logged without.

    Args:
        writer: From torch.utils.tensorboard.
        tag: Name of the image in the tab; several images are named TAG_00, TAG_01, ...
        images: (B, 3, height, width), uint8 or 0 to 1: the images as people should see them.
        weights: Attention weights (L, B, H, N, N), first layer first, rows summing to 1; a tensor
            or a sequence of L tensors.
        step: Optimizer steps done, at least 0.
        grid: Rows and columns of patches.
        num_prefix_tokens: Tokens before the patches (class token and registers).
        readout: What the model's head reads: "class_token" for the first token, "mean" for the mean
            of the patch tokens. None if neither; then no rollout is computed.
        prefix_names: Names of the tokens before the patches.
        classes: Names of the C classes; if there are none, they are called "class 0", ...
        labels: (B,) indices of the true classes.
        logits: (B, C), for the predictions.
        maps: Maps of the whole image by name, (B, rows, columns) in units of uniform attention;
            those that `vit.registry.ALL_KINDS` has as signed are so, in units of the mean of
            their absolute values. None computes attention rollout.
        tokens: Outputs of the layers, (L, B, N, D), for the view Features; its principal components
            are those of these images.
        model: What returned the weights, for the tab to run it at this step: one model for each
            writer, as `vit.Classifier(model, Preprocess((height, width), mean, std), classes,
            device, torch.float32)`. What cannot be exported costs a warning.

    Raises:
        ValueError: An argument has a wrong shape or value; nothing has been written.
    """
    import torch

    pixels = _pixels(images)
    layers = _layers(weights, len(pixels), grid, num_prefix_tokens)
    _check_target(writer, tag, step, model)
    names = _prefix_names(prefix_names, num_prefix_tokens, readout)
    class_names, true, top = _predictions(len(pixels), classes, labels, logits)
    shown = _maps(maps, len(pixels), grid, layers, num_prefix_tokens, readout)
    depth, (_, heads, count, _) = len(layers), layers[0].shape
    frames, features = _features(tokens, layers, num_prefix_tokens)
    stored = depth * heads * count**2 <= MAX_WEIGHTS
    if not stored:
        warn(
            f"{tag}: {depth} x {heads} x {count} x {count} attention weights are more than "
            f"{MAX_WEIGHTS}; the Attention tab shows maps and statistics only"
        )
    records = []
    for number, image in enumerate(pixels):
        alone = [layer[number] for layer in layers]
        details = make_details(
            image, alone, grid, names, readout=readout, classes=class_names, label=true[number],
            top=top[number], maps=shown[number], lens=None,
        )  # fmt: skip
        kept = np.stack([layer.numpy() for layer in alone]) if stored else None
        numbers = None if features is None else features[number].numpy()
        kinds = {"weights": kept, "features": numbers}
        records.append(Record(details=details, frames=f"{tag}/frames", **kinds))
    if frames is not None:
        add_frames(writer, frames.numpy(), step, f"{tag}/frames")
    for number, record in enumerate(records):
        add_record(writer, tag if len(records) == 1 else f"{tag}_{number:02d}", record, step)
    if model is not None:
        shown_images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        resolve_name("vit.reporting.live:add_live")(writer, model, shown_images, step)


def make_details(
    pixels: np.ndarray,
    weights: "Sequence[Tensor]",
    grid: tuple[int, int],
    prefix: Sequence[str],
    **values: Any,
) -> Details:
    """Make the details of an image, with the statistics of every head.

    Args:
        pixels: The image, (height, width, 3) uint8. Distances need square patches.
        weights: L attention weights (H, N, N), rows summing to 1.
        grid: Rows and columns of patches.
        prefix: Names of the tokens before the patches.
        **values: The other fields of `Details`.
    """
    from vit.explain.statistics import attention_distance, attention_entropy, sink_mass

    batches = [layer[None] for layer in weights]
    size = pixels.shape[0], pixels.shape[1]
    height, width = size[0] / grid[0], size[1] / grid[1]
    distance = None
    if height == width:
        distance = (attention_distance(batches, grid, 1, len(prefix)) * height).tolist()
    statistics = Statistics(
        entropy=attention_entropy(batches).tolist(),
        distance=distance,
        sink=sink_mass(batches).tolist(),
    )
    return Details(
        image=image_url(pixels), image_size=size, grid=grid, prefix=[*prefix],
        layers=len(weights), heads=weights[0].shape[0], statistics=statistics, **values,
    )  # fmt: skip


def _check_target(writer: Any, tag: str, step: int, model: Any) -> None:
    from torch.utils.tensorboard import SummaryWriter

    if not isinstance(writer, SummaryWriter):
        kind = f"{type(writer).__module__}.{type(writer).__name__}"
        raise ValueError(f"writer: {kind} is not torch.utils.tensorboard.SummaryWriter")
    if not tag or tag.endswith(("/weights", "/features", "/frames")):
        raise ValueError(
            f"tag: {tag!r} is empty or ends with /weights, /features or /frames, which the tab adds"
        )
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ValueError(f"step: {step!r} is not a whole number, at least 0")
    if model is not None and not hasattr(model, "preprocess"):
        raise ValueError(f"model: {type(model).__name__} is not a vit.Classifier")


def _pixels(images: "Tensor") -> np.ndarray:
    """Return images as (B, height, width, 3) uint8."""
    import torch

    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape:
        raise ValueError(f"images: {tuple(images.shape)} is not (B, 3, height, width)")
    images = images.detach().cpu()
    if images.dtype != torch.uint8:
        images = images.float()
        if not (images >= 0).all() or not (images <= 1).all():
            raise ValueError("images: values are not 0 to 1; undo the model's normalization first")
        images = (images * 255).round().to(torch.uint8)
    return images.permute(0, 2, 3, 1).numpy()


def _layers(
    weights: "Tensor | Sequence[Tensor]", batch: int, grid: tuple[int, int], num_prefix_tokens: int
) -> "list[Tensor]":
    """Return checked weights as L tensors (B, H, N, N) float32 on the CPU, rows summing to 1."""
    layers = [layer.detach().float().cpu() for layer in weights]
    if len(grid) != 2 or min(grid) < 1 or num_prefix_tokens < 0:
        raise ValueError(
            f"grid: {grid} with {num_prefix_tokens} prefix tokens is not rows and columns"
        )
    if not layers:
        raise ValueError("weights: there are no layers")
    tokens = num_prefix_tokens + math.prod(grid)
    heads = layers[0].shape[1] if layers[0].ndim == 4 else 0
    for number, layer in enumerate(layers):
        if tuple(layer.shape) != (batch, heads, tokens, tokens) or heads == 0:
            raise ValueError(
                f"weights: layer {number} is {tuple(layer.shape)}, not (B, H, N, N) with B = "
                f"{batch} images and N = {tokens} tokens, {num_prefix_tokens} before a grid of "
                f"{grid[0]} x {grid[1]}, and as many heads as the first layer"
            )
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
    tokens: "Tensor | Sequence[Tensor] | None", layers: "list[Tensor]", num_prefix_tokens: int
) -> "tuple[Tensor, Tensor] | tuple[None, None]":
    """Return frames (L, K, D) and features (B, L, P, K); None without tokens."""
    from vit.explain.features import coordinates, fit_frames

    if tokens is None:
        return None, None
    shape, shapes = layers[0].shape[::2], {tuple(layer.shape) for layer in tokens}
    alike = len(tokens) == len(layers) and len(shapes) == 1
    if not alike or min(shapes)[:-1] != shape or not all(t.isfinite().all() for t in tokens):
        raise ValueError(
            f"tokens: {len(tokens)} of shapes {shapes} are not finite numbers (B, N, D), "
            f"{(*shape, 'D')}, of {len(layers)} layers"
        )
    patches = [layer.detach().float().cpu()[:, num_prefix_tokens:] for layer in tokens]
    frames = fit_frames([patches])
    return frames, coordinates(patches, frames)


def _prefix_names(
    names: Sequence[str] | None, num_prefix_tokens: int, readout: str | None
) -> list[str]:
    if readout not in ("class_token", "mean", None):
        raise ValueError(f"readout: {readout!r} is not class_token, mean or None")
    if readout == "class_token" and num_prefix_tokens == 0:
        raise ValueError("readout: class_token needs num_prefix_tokens of at least 1")
    if names is None:
        if readout == "class_token":
            return ["class token", *(f"register {n}" for n in range(1, num_prefix_tokens))]
        return [f"prefix token {n}" for n in range(1, num_prefix_tokens + 1)]
    if len(names) != num_prefix_tokens:
        raise ValueError(f"prefix_names: {len(names)} names for {num_prefix_tokens} tokens")
    return list(names)


def _predictions(
    batch: int,
    classes: Sequence[str],
    labels: "Tensor | Sequence[int] | None",
    logits: "Tensor | None",
) -> tuple[list[str], list[int | None], list[list[tuple[int, float]]]]:
    """Return the names of the classes, and the label and most probable classes of each image."""
    import torch

    if logits is not None:
        logits = logits.detach().float().cpu()
        if logits.ndim != 2 or logits.shape[0] != batch or not logits.isfinite().all():
            raise ValueError(f"logits: {tuple(logits.shape)} is not ({batch}, C) finite numbers")
        if classes and len(classes) != logits.shape[1]:
            raise ValueError(f"classes: {len(classes)} names for {logits.shape[1]} logits")
    indices = [] if labels is None else [int(label) for label in labels]
    if labels is not None and len(indices) != batch:
        raise ValueError(f"labels: {len(indices)} labels for {batch} images")
    known = logits.shape[1] if logits is not None else max(indices, default=-1) + 1
    names = list(classes) or [f"class {index}" for index in range(known)]
    if any(not 0 <= index < len(names) for index in indices):
        raise ValueError(f"labels: {indices} are not all 0 to {len(names) - 1}")
    top: list[list[tuple[int, float]]] = [[] for _ in range(batch)]
    if logits is not None:
        best = torch.topk(logits.softmax(dim=1), min(TOP_CLASSES, len(names)))
        top = [
            list(zip(row.tolist(), values.tolist(), strict=True))
            for row, values in zip(best.indices, best.values, strict=True)
        ]
    return names, [*indices] if labels is not None else [None] * batch, top


def _maps(
    maps: "Mapping[str, Tensor] | None",
    batch: int,
    grid: tuple[int, int],
    layers: "list[Tensor]",
    num_prefix_tokens: int,
    readout: Literal["class_token", "mean"] | None,
) -> list[list[Map]]:
    """Return the maps of each image; where none are given, attention rollout."""
    from vit.explain.rollout import attention_rollout

    if maps is None and readout is not None:
        rollout = attention_rollout(layers, readout=readout, num_prefix_tokens=num_prefix_tokens)
        maps = {"rollout": (rollout * layers[0].shape[-1]).unflatten(1, grid)}
    shown: list[list[Map]] = [[] for _ in range(batch)]
    for kind, values in (maps or {}).items():
        if tuple(values.shape) != (batch, *grid) or not values.isfinite().all():
            raise ValueError(
                f"maps: {kind} is {tuple(values.shape)}, not ({batch}, {grid[0]}, {grid[1]}) "
                "finite numbers"
            )
        entry = ALL_KINDS.get(kind)
        title, signed = (entry.title, entry.signed) if entry else (kind, False)
        for number, heat in enumerate(values.float().flatten(1).tolist()):
            one = Map(kind=kind, title=title, target=None, values=heat, signed=signed)
            shown[number].append(one)
    return shown
