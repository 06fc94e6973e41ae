"""Records for the Attention tab: everything that it shows of images and a Classifier.

A batch takes two forward passes, one of them by the rules of layer-wise relevance, and a backward
pass of both for each explained class.

Shapes: K explained classes, L layers, B batch, H heads, N tokens (prefix, then patches), C classes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.classifier import Classifier, most_with_weights
from vit.colours import as_pixels
from vit.console import printable
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.explain.features import coordinates, fit_frames
from vit.explain.interventions import logit_lens
from vit.explain.kinds import RolloutOptions
from vit.explain.lrp import token_relevance
from vit.explain.maps import DEFAULTS, MAP_KINDS, layout_of, map_of, patches_of, title_of
from vit.explain.rollout import attention_gradients
from vit.explain.statistics import attention_distance, attention_entropy, sink_mass
from vit.hardware import map_on_cores
from vit.model.attention_model import prefix_names, require_attention
from vit.tensorboard_plugin.records import (
    LENS_CLASSES,
    MAX_WEIGHTS,
    TOP_CLASSES,
    Details,
    Lens,
    Map,
    Record,
    Statistics,
    image_url,
)

BATCH_SIZE = 4  # images whose graph each core keeps; a part of the probes for each of them
ALL_CLASSES = 10  # or fewer are all explained
BEST_CLASSES = 6  # of more: the most probable ones, among them the label
FITTED_PATCHES, PART = 4096, 1024  # to which frames are fitted, and that are read at once


@dataclass(frozen=True)
class Attention:
    """What a model attends to in a batch of images."""

    logits: Tensor  # (B, C) float32
    weights: list[Tensor]  # L of (B, H, N, N)
    tokens: list[Tensor]  # L outputs of the blocks, (B, N, D)
    # Kind; class that it explains, (B,), or None; and values, (B, rows, columns), on the CPU.
    maps: list[tuple[str, Tensor | None, Tensor]]


def explained_classes(logits: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    """Choose classes to explain, (K, B) int64: all if there are up to ten, else six for each image.

    The six are the `wanted` classes, (B,) each, and the most probable of the others by logits
    (B, C), on whose device the result is.
    """
    count, num_classes = logits.shape
    if num_classes <= ALL_CLASSES:
        return torch.arange(num_classes, device=logits.device)[:, None].expand(-1, count)
    best = logits.topk(BEST_CLASSES).indices
    rows = torch.stack([*(part.to(best) for part in wanted), *best.T], dim=1).tolist()
    return torch.tensor([list(dict.fromkeys(row))[:BEST_CLASSES] for row in rows]).T.to(best)


@torch.inference_mode(False)  # which also enables gradients
def read_attention(
    classifier: Classifier, images: Tensor, wanted: Sequence[Tensor], rollout: RolloutOptions
) -> Attention:
    """Run a model on images (B, channels, H, W) uint8; map `MAP_KINDS` for `explained_classes`."""
    model = require_attention(classifier.model)
    # The images require gradients, so that the weights do too even if all parameters are frozen.
    inputs = classifier.normalize(images).requires_grad_()
    logits, weights, tokens = model.forward_intermediates(inputs)
    layout = layout_of(model, *images.shape[-2:])
    classes = explained_classes(logits.detach(), wanted)
    detached = [layer.detach() for layer in weights]
    maps: list[tuple[str, Tensor | None, Tensor]] = []

    def compute(need: str, target: Tensor | None, *readings: Any) -> None:
        for kind, entry in MAP_KINDS.items():
            if entry.needs == need:
                maps.append((kind, target, map_of(kind, readings, layout, rollout).cpu()))

    compute("weights", None, detached)
    for number, target in enumerate(classes, start=1):
        gradients = attention_gradients(logits, weights, target, number < len(classes))
        compute("gradients", target, detached, gradients)
        del gradients  # before the next, which are as large
    _, relevances, _ = token_relevance(model, inputs.detach(), list(classes))
    for target, relevance in zip(classes, relevances, strict=True):
        compute("relevance", target, patches_of(relevance, layout), detached)
    return Attention(logits.detach().float(), detached, [t.detach() for t in tokens], maps)


def attention_records(
    classifier: Classifier,
    images: ImageSet,
    *,
    frames: Tensor | None = None,
    target: int | None = None,
    rollout: RolloutOptions = DEFAULTS,
) -> Iterator[tuple[Attention, list[Record | None]]]:
    """Read the attention of images in memory batch by batch, and make their records.

    Frames come from `read_frames`; None leaves features out. The target is a class to explain in
    any case. Yields the attention of up to four images, and a record of each; None for all of them
    if a number is not finite.
    """
    size = most_with_weights(classifier.model, BATCH_SIZE, *classifier.preprocess.image_size)

    def read(start: int) -> tuple[Attention, list[Record | None]]:
        part = images.select(torch.arange(start, min(start + size, len(images))))
        wanted = [part.labels] + ([] if target is None else [torch.full_like(part.labels, target)])
        attention = read_attention(classifier, part.pixels(), wanted, rollout)
        return attention, _records(classifier, part, attention, frames, rollout)

    threads = classifier.threads if size == BATCH_SIZE else 1
    for starts in torch.arange(0, len(images), size).split(threads):
        yield from map_on_cores(read, starts.tolist(), threads)


def read_frames(classifier: Classifier, images: ImageSet, seed: int) -> Tensor | None:
    """Fit frames (L, K, D), on the CPU, to 4,096 patches; None if a token is not finite."""
    model = require_attention(classifier.model)
    patches = math.prod(model.patch_embed.grid(*classifier.preprocess.image_size))
    chosen = choose_images(images, max(1, FITTED_PATCHES // patches), seed)
    pixels = chosen.resized(classifier.preprocess).pixels()

    @torch.no_grad()
    def read(part: Tensor) -> list[Tensor]:
        _, _, tokens = model.forward_intermediates(classifier.normalize(part))
        return [layer[:, model.num_prefix_tokens :] for layer in tokens]

    size = max(1, PART // patches)
    # For one image more, because for a single one, however large, the answer is 1.
    is_small = most_with_weights(classifier.model, size + 1, *pixels.shape[2:]) > size
    batches = map_on_cores(read, pixels.split(size), classifier.threads if is_small else 1)
    finite = all(layer.isfinite().all() for batch in batches for layer in batch)
    return fit_frames(batches) if finite else None


def _records(
    classifier: Classifier,
    images: ImageSet,
    attention: Attention,
    frames: Tensor | None,
    rollout: RolloutOptions,
) -> list[Record | None]:
    """Make the record of each image of a batch; None for all if a number is not finite."""
    tensors = [attention.logits, *attention.weights, *attention.tokens]
    tensors += [values for _, _, values in attention.maps]
    if not all(tensor.isfinite().all() for tensor in tensors):
        return [None] * len(images)
    model, pixels = require_attention(classifier.model), images.pixels()
    classes, probabilities = logit_lens(model.read_tokens, attention.tokens, LENS_CLASSES)
    layout = layout_of(model, *pixels.shape[-2:])
    patches = [layer[:, layout.num_prefix_tokens :] for layer in attention.tokens]
    fields: list[dict[str, Any]] = []
    for row, label in enumerate(images.labels.tolist()):
        best, values = classes[:, row].tolist(), probabilities[:, row].tolist()
        can_read = classes.shape[2] > 1  # a token alone
        lens = Lens(classes=best, probabilities=values) if can_read else None
        maps = [
            Map(
                kind=kind, title=title_of(kind, rollout), signed=MAP_KINDS[kind].signed,
                target=None if target is None else int(target[row]),
                values=values[row].flatten().tolist(),
            )
            for kind, target, values in attention.maps
        ]  # fmt: skip
        name = printable(images.name(row))
        fields.append({"name": name, "label": label, "maps": maps, "lens": lens})
    features = None if frames is None else coordinates(patches, frames)
    return [*image_records(
        as_pixels(pixels), [w.cpu() for w in attention.weights],
        layout.grid, prefix_names(classifier.model), attention.logits.cpu(), features, fields,
        readout=layout.readout, classes=list(classifier.classes),
    )]  # fmt: skip


def image_records(
    pixels: np.ndarray,
    weights: Sequence[Tensor],
    grid: tuple[int, int],
    prefix: Sequence[str],
    logits: Tensor | None,
    features: Tensor | None,
    fields: Sequence[Mapping[str, Any]],
    **shared: Any,
) -> list[Record]:
    """Make the records of images, with the statistics of every head.

    Args:
        pixels: (B, height, width, 3) uint8. Distances need square patches.
        weights: L attention weights (B, H, N, N) on the CPU, rows summing to 1.
        grid: Rows and columns of patches.
        prefix: Names of the tokens before the patches.
        logits: (B, C), for the predictions.
        features: (B, L, P, K), see `vit.explain.features`.
        fields: Further fields of the `Details` of each image.
        **shared: Fields that all images share.
    """
    size, heads = pixels.shape[1:3], weights[0].shape[1]
    height, width = size[0] / grid[0], size[1] / grid[1]
    stored = sum(layer[0].numel() for layer in weights) <= MAX_WEIGHTS
    records = []
    for row, own in enumerate(fields):
        alone = [layer[row : row + 1].float() for layer in weights]
        distance = attention_distance(alone, grid, 1, len(prefix)) * height
        statistics = Statistics(
            entropy=attention_entropy(alone).tolist(),
            distance=distance.tolist() if height == width else None,
            sink=sink_mass(alone).tolist(),
        )
        top: list[tuple[int, float]] = []  # classes and probabilities, best first
        if logits is not None:
            best = logits[row].softmax(dim=0).topk(min(TOP_CLASSES, logits.shape[1]))
            top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        details = Details(
            image=image_url(pixels[row]), image_size=size, grid=grid, prefix=[*prefix],
            layers=len(weights), heads=heads, statistics=statistics, top=top, **own, **shared,
        )  # fmt: skip
        kept = torch.cat(alone).numpy() if stored else None
        numbers = None if features is None else features[row].numpy()
        records.append(Record(details=details, weights=kept, features=numbers))
    return records
