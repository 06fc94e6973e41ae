"""Records for the Attention tab: everything that it shows of images and a Classifier.

A batch takes two forward passes, one of them by the rules of layer-wise relevance, and a backward
pass of both for each explained class.

Shapes: K explained classes, L layers, B batch, H heads, N tokens (prefix, then patches), C classes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit.classifier import Classifier, threads_of
from vit.console import printable
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.explain.colours import as_rgb
from vit.explain.features import coordinates, fit_frames
from vit.explain.lens import logit_lens
from vit.explain.lrp import token_relevance
from vit.explain.maps import MAP_KINDS, map_of, patches_of, readout_of, title_of
from vit.explain.rollout import attention_gradients
from vit.model.attention_model import prefix_names, require_attention
from vit.parallel import map_on_cores
from vit.tensorboard_plugin.records import LENS_CLASSES, Lens, Map, Record
from vit.tensorboard_plugin.summary import image_records

BATCH_SIZE = 4  # images whose graph each core keeps; a part of the probes for each of them
ALL_CLASSES = 10  # up to so many classes, each is explained
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

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite, which a model that diverges does not guarantee."""
        values = [*self.weights, *(found for _, _, found in self.maps)]
        return all(part.isfinite().all() for part in (self.logits, *self.tokens, *values))


def explained_classes(logits: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    """Choose the classes to explain: all if there are at most ten, else six for each image.

    Wanted ones, (B,) each, are among the six; the most probable ones by logits (B, C) are the rest.

    Returns:
        (K, B) int64, on the device of the logits.
    """
    count, num_classes = logits.shape
    if num_classes <= ALL_CLASSES:
        return torch.arange(num_classes, device=logits.device)[:, None].expand(-1, count)
    best = logits.topk(BEST_CLASSES).indices
    rows = torch.cat([*(part.to(best)[:, None] for part in wanted), best], dim=1).tolist()
    return torch.tensor([list(dict.fromkeys(row))[:BEST_CLASSES] for row in rows]).T.to(best)


@torch.inference_mode(False)  # which also enables gradients
def read_attention(
    classifier: Classifier, images: Tensor, wanted: Sequence[Tensor], **rollout: Any
) -> Attention:
    """Run a model on images (B, channels, H, W) uint8, in float32, and compute all of their maps.

    They are those of `MAP_KINDS` for `explained_classes`, with options of `attention_rollout`.
    """
    model = require_attention(classifier.model)
    # The images require gradients, so that the weights do too even if all parameters are frozen.
    inputs = classifier.normalize(images).requires_grad_()
    logits, weights, tokens = model.forward_intermediates(inputs)
    grid = model.patch_embed.grid(*images.shape[-2:])
    classes = explained_classes(logits.detach(), wanted)
    detached = [layer.detach() for layer in weights]
    maps: list[tuple[str, Tensor | None, Tensor]] = []

    def draw(need: str, target: Tensor | None, *given: Any) -> None:
        for kind, entry in MAP_KINDS.items():
            if entry.needs == need:
                maps.append((kind, target, map_of(kind, model, grid, *given, **rollout).cpu()))

    draw("weights", None, detached)
    for number, target in enumerate(classes, start=1):
        gradients = attention_gradients(logits, weights, target, number < len(classes))
        draw("gradients", target, detached, gradients)
    _, relevances, _ = token_relevance(model, inputs.detach(), list(classes))
    for target, relevance in zip(classes, relevances, strict=True):
        draw("relevance", target, patches_of(relevance, model, grid), detached)
    return Attention(logits.detach().float(), detached, [t.detach() for t in tokens], maps)


def attention_records(
    classifier: Classifier,
    images: ImageSet,
    *,
    frames: Tensor | None = None,
    target: int | None = None,
    **rollout: Any,
) -> Iterator[tuple[Attention, list[Record | None]]]:
    """Read the attention of images in memory batch by batch, and make their records.

    Frames come from `read_frames`, for the features of the images; None leaves features out. The
    target is a class to explain in any case, and options are those of `attention_rollout`.

    Yields:
        The attention of up to four images, and a record of each; None for all of them if a number
        is not finite.
    """

    def read(start: int) -> tuple[Attention, list[Record | None]]:
        part = images.select(torch.arange(start, min(start + BATCH_SIZE, len(images))))
        aims = [] if target is None else [torch.full_like(part.labels, target)]
        attention = read_attention(classifier, part.pixels(), [part.labels, *aims], **rollout)
        if not attention.finite:
            return attention, [None] * len(part)
        return attention, [*_records(classifier, part, attention, frames, rollout)]

    threads = threads_of(classifier.device)
    for starts in torch.arange(0, len(images), BATCH_SIZE).split(threads):
        yield from map_on_cores(read, starts.tolist(), threads)


def read_frames(classifier: Classifier, images: ImageSet, seed: int) -> Tensor | None:
    """Fit frames to 4,096 patches of images that a seed chooses, see `vit.explain.features`.

    They are (L, K, D) float32, on the CPU; None if a token is not finite.
    """
    model = require_attention(classifier.model)
    patches = math.prod(model.patch_embed.grid(*classifier.preprocess.image_size))
    chosen = choose_images(images, max(1, FITTED_PATCHES // patches), seed)
    pixels = chosen.resized(classifier.preprocess).pixels()

    @torch.no_grad()
    def read(part: Tensor) -> list[Tensor]:
        _, _, tokens = model.forward_intermediates(classifier.normalize(part))
        return [layer[:, model.num_prefix_tokens :] for layer in tokens]

    parts = pixels.split(max(1, PART // patches))
    batches = map_on_cores(read, parts, threads_of(classifier.device))
    finite = all(layer.isfinite().all() for batch in batches for layer in batch)
    return fit_frames(batches) if finite else None


def _records(
    classifier: Classifier,
    images: ImageSet,
    attention: Attention,
    frames: Tensor | None,
    rollout: dict[str, Any],
) -> list[Record]:
    """Make the record of each image of a batch."""
    model, pixels = require_attention(classifier.model), images.pixels()
    readings, probabilities = logit_lens(model.read_tokens, attention.tokens, LENS_CLASSES)
    patches = [layer[:, model.num_prefix_tokens :] for layer in attention.tokens]

    def lens_of(row: int) -> Lens | None:
        if readings.shape[2] == 1:  # a token cannot be read alone
            return None
        classes, values = readings[:, row].tolist(), probabilities[:, row].tolist()
        return Lens(classes=classes, probabilities=values)

    def maps_of(row: int) -> list[Map]:
        return [
            Map(
                kind=kind, title=title_of(kind, **rollout), signed=MAP_KINDS[kind].signed,
                target=None if target is None else int(target[row]),
                values=values[row].flatten().tolist(),
            )
            for kind, target, values in attention.maps
        ]  # fmt: skip

    each = [
        {"name": printable(images.name(row)), "label": label, "maps": maps_of(row),
         "lens": lens_of(row)}
        for row, label in enumerate(images.labels.tolist())
    ]  # fmt: skip
    return image_records(
        as_rgb(pixels.permute(0, 2, 3, 1).cpu().numpy()), [w.cpu() for w in attention.weights],
        model.patch_embed.grid(*pixels.shape[-2:]), prefix_names(classifier.model),
        attention.logits.cpu(), None if frames is None else coordinates(patches, frames), each,
        readout=readout_of(model), classes=list(classifier.classes),
    )  # fmt: skip
