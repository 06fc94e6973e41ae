"""Records for the Attention tab: everything that it shows of images and a Classifier.

A batch takes two forward passes, one of them with the rules of layer-wise relevance, and for each
explained class a backward pass of both.

Shapes: M maps of each image, K explained classes, L layers, B batch, H heads, N tokens (prefix,
then patches), C classes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.console import printable
from vit.data.datasets import choose_probes
from vit.data.images import ImageSet
from vit.explain.colours import as_pixels
from vit.explain.faithfulness import faithfulness, hiding_curves
from vit.explain.features import coordinates, fit_frames
from vit.explain.lens import logit_lens
from vit.explain.lrp import token_relevance
from vit.explain.maps import MAP_KINDS, map_of, patches_of, readout_of, title_of
from vit.explain.rollout import attention_gradients
from vit.model.attention_model import prefix_names, require_attention
from vit.parallel import map_on_cores
from vit.tensorboard_plugin.records import (
    LENS_CLASSES,
    MAX_WEIGHTS,
    TOP_CLASSES,
    Lens,
    Map,
    Record,
)
from vit.tensorboard_plugin.summary import make_details

BATCH_SIZE = 4  # images whose graph each core keeps; a part of the probes for each of them
ALL_CLASSES = 10  # up to so many classes, each is explained
BEST_CLASSES = 6  # of more: the most probable ones, among them the label
FITTED_PATCHES, PART = 4096, 1024  # to which frames are fitted, and that are read at once
WEIGHT_BYTES = 256_000_000  # of the attention weights of a run, one byte each, uncompressed


@dataclass(frozen=True)
class Attention:
    """What a model attends to in a batch of images.

    Attributes:
        logits: (B, C) float32.
        weights: L attention weights (B, H, N, N).
        tokens: L outputs of the blocks, (B, N, D).
        kinds: M keys of `vit.registry.ALL_KINDS`.
        targets: (M, B) int64, the class that a map explains; -1 if it is class-agnostic.
        maps: (M, B, rows, columns) float32, in the units of `vit.explain.maps.attention_maps`.
    """

    logits: Tensor
    weights: list[Tensor]
    tokens: list[Tensor]
    kinds: list[str]
    targets: Tensor
    maps: Tensor

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite, which a model that diverges does not guarantee."""
        return bool(self.logits.isfinite().all() and self.maps.isfinite().all())

    def map(self, kind: str) -> Tensor:
        """Return each image's map of a kind, for its predicted class if the kind is class-specific.

        Returns:
            (B, rows, columns).
        """
        rows = [number for number, found in enumerate(self.kinds) if found == kind]
        predicted = self.logits.argmax(dim=1)
        chosen = (self.targets[rows] == predicted).int().argmax(dim=0)  # the only one if agnostic
        return self.maps[rows][chosen, torch.arange(len(chosen), device=chosen.device)]


def joined(parts: Sequence[Attention]) -> Attention:
    """Join batches of the same kinds of map into one."""
    return Attention(
        torch.cat([part.logits for part in parts]),
        [torch.cat(layer) for layer in zip(*(part.weights for part in parts), strict=True)],
        [torch.cat(layer) for layer in zip(*(part.tokens for part in parts), strict=True)],
        parts[0].kinds,
        torch.cat([part.targets for part in parts], dim=1),
        torch.cat([part.maps for part in parts], dim=1),
    )


def explained_classes(logits: Tensor, wanted: Sequence[Tensor]) -> Tensor:
    """Choose the classes to explain: all if there are at most ten, else six for each image.

    Args:
        logits: (B, C).
        wanted: Classes (B,) that are among the six; the most probable classes are the others.

    Returns:
        (K, B) int64, on the device of the logits.
    """
    count, num_classes = logits.shape
    if num_classes <= ALL_CLASSES:
        return torch.arange(num_classes, device=logits.device)[:, None].expand(-1, count)
    best = logits.topk(BEST_CLASSES).indices
    rows = torch.cat([*(part.to(best)[:, None] for part in wanted), best], dim=1).tolist()
    return torch.tensor([list(dict.fromkeys(row))[:BEST_CLASSES] for row in rows]).T.to(best)


@torch.enable_grad()
def read_attention(
    classifier: Classifier, images: Tensor, wanted: Sequence[Tensor], **rollout: Any
) -> Attention:
    """Run a model on a batch of images, in float32, and compute the maps of all classes.

    Args:
        classifier: A model with maps.
        images: (B, channels, H, W) uint8.
        wanted: Classes to explain in any case, (B,) int64 each.
        **rollout: Options of `vit.explain.rollout.attention_rollout`.
    """
    model = require_attention(classifier.model)
    # The images require gradients, so that the weights do too even if all parameters are frozen.
    inputs = classifier.normalize(images).requires_grad_()
    logits, weights, tokens = model.forward_intermediates(inputs)
    grid = model.patch_embed.grid(*images.shape[-2:])
    classes = explained_classes(logits.detach(), wanted)
    detached = [layer.detach() for layer in weights]
    maps: list[tuple[str, Tensor, Tensor]] = []

    def draw(need: str, target: Tensor, *given: Any) -> None:
        for kind, entry in MAP_KINDS.items():
            if entry.needs == need:
                maps.append((kind, target, map_of(kind, model, grid, *given, **rollout)))

    draw("weights", torch.full_like(classes[0], -1), detached)
    for number, target in enumerate(classes, start=1):
        gradients = attention_gradients(logits, weights, target, number < len(classes))
        draw("gradients", target, detached, gradients)
    _, relevances, _ = token_relevance(model, inputs.detach(), list(classes))
    for target, relevance in zip(classes, relevances, strict=True):
        draw("relevance", target, patches_of(relevance, model, grid), detached)
    kinds, targets, values = zip(*maps, strict=True)
    return Attention(
        logits.detach().float(), detached, [layer.detach() for layer in tokens],
        list(kinds), torch.stack(targets), torch.stack(values),
    )  # fmt: skip


def score_each_map(
    classifier: Classifier, images: Tensor, attention: Attention, levels: Sequence[float]
) -> Tensor:
    """Measure how faithful each map of each image is to the class that it explains.

    Class-agnostic maps are measured for the predicted class.

    Args:
        classifier: The model.
        images: (B, channels, H, W) uint8.
        attention: From `read_attention`.
        levels: Fractions of hidden patches, see `vit.explain.faithfulness.hiding_curves`.

    Returns:
        (LeRF - MoRF) / 2, (M, B) float32 on the CPU.
    """
    targets = attention.targets.where(attention.targets >= 0, attention.logits.argmax(dim=1))
    inputs = classifier.normalize(images).repeat(len(targets), 1, 1, 1)
    maps = attention.maps.flatten(0, 1)
    curves = hiding_curves(classifier.forward, inputs, maps, targets.flatten(), levels)
    return faithfulness(*curves)["lerf_morf"].unflatten(0, targets.shape)


def attention_records(
    classifier: Classifier,
    images: ImageSet,
    *,
    frames: Tensor | None = None,
    steps: int = 1,
    levels: Sequence[float] = (),
    target: int | None = None,
    threads: int | None = None,
    **rollout: Any,
) -> Iterator[tuple[Attention, list[Record | None]]]:
    """Read the attention of images batch by batch, and make their records.

    Args:
        classifier: A model with maps.
        images: The images, in memory.
        frames: From `read_frames`, for the features of the images; None leaves features out.
        steps: Number of steps at which records of these images are written. All of them together
            have room for the attention weights of some images, the first ones, see
            `images_with_weights`.
        levels: Levels of `score_each_map`; without any, faithfulness is not measured.
        target: A class to explain in any case.
        threads: Number of threads on a CPU, each with images of its own; None: as torch has them.
        **rollout: Options of `vit.explain.rollout.attention_rollout`.

    Yields:
        The attention of up to four images, and a record of each; None for all of them if a number
        is not finite.
    """

    def read(start: int) -> tuple[Attention, list[Record | None]]:
        part = images.select(torch.arange(start, min(start + BATCH_SIZE, len(images))))
        pixels, labels = part.pixels(), part.labels
        aims = [] if target is None else [torch.full_like(labels, target)]
        attention = read_attention(classifier, pixels, [labels, *aims], **rollout)
        if not attention.finite:
            return attention, [None] * len(part)
        num_weights = sum(layer[0].numel() for layer in attention.weights)
        weighted = images_with_weights(num_weights, len(images), steps)
        scores = score_each_map(classifier, pixels, attention, levels) if levels else None
        weighted -= start
        return attention, _records(classifier, part, attention, scores, frames, weighted, rollout)

    threads = (threads or torch.get_num_threads()) if classifier.device.type == "cpu" else 1
    for starts in torch.arange(0, len(images), BATCH_SIZE).split(threads):
        yield from map_on_cores(read, starts.tolist(), threads)


def read_frames(
    classifier: Classifier, images: ImageSet, seed: int, threads: int | None = None
) -> Tensor | None:
    """Fit frames to 4,096 patches of images that a seed chooses, see `vit.explain.features`.

    They are (L, K, D) float32, on the CPU; None if a token is not finite.
    """
    model = require_attention(classifier.model)
    patches = math.prod(model.patch_embed.grid(*classifier.preprocess.image_size))
    chosen = choose_probes(images, max(1, FITTED_PATCHES // patches), seed)
    pixels = chosen.resized(classifier.preprocess).pixels()

    @torch.no_grad()
    def read(part: Tensor) -> list[Tensor]:
        _, _, tokens = model.forward_intermediates(classifier.normalize(part))
        return [layer[:, model.num_prefix_tokens :] for layer in tokens]

    threads = (threads or torch.get_num_threads()) if classifier.device.type == "cpu" else 1
    batches = map_on_cores(read, pixels.split(max(1, PART // patches)), threads)
    finite = all(layer.isfinite().all() for batch in batches for layer in batch)
    return fit_frames(batches) if finite else None


def _records(
    classifier: Classifier,
    images: ImageSet,
    attention: Attention,
    scores: Tensor | None,
    frames: Tensor | None,
    weighted: int,
    rollout: dict[str, Any],
) -> list[Record | None]:
    """Make the record of each image of a batch; the first `weighted` contain attention weights."""
    model, classes = require_attention(classifier.model), classifier.classes
    readings, probabilities = logit_lens(model.read_tokens, attention.tokens, LENS_CLASSES)
    alone = readings.shape[2] > 1  # whether each token can be read
    grid = model.patch_embed.grid(*images.pixels().shape[-2:])
    best = attention.logits.softmax(dim=1).topk(min(TOP_CLASSES, len(classes)))
    if frames is not None:
        patches = [layer[:, model.num_prefix_tokens :] for layer in attention.tokens]
        features = coordinates(patches, frames).numpy()
    records: list[Record | None] = []
    for row, image in enumerate(images.pixels()):
        weights = [layer[row] for layer in attention.weights]
        lens = Lens(classes=readings[:, row].tolist(), probabilities=probabilities[:, row].tolist())
        details = make_details(
            as_pixels(image), weights, grid, prefix_names(classifier.model),
            name=printable(images.name(row)), readout=readout_of(model), classes=list(classes),
            label=int(images.labels[row]),
            top=list(zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True)),
            maps=_maps(attention, scores, row, rollout), lens=lens if alone else None,
        )  # fmt: skip
        stored = torch.stack(weights).float().cpu().numpy() if row < weighted else None
        shown = frames is not None and np.isfinite(features[row]).all()
        records.append(
            Record(details=details, weights=stored, features=features[row] if shown else None)
        )
    return records


def _maps(
    attention: Attention, scores: Tensor | None, row: int, rollout: dict[str, Any]
) -> list[Map]:
    """Return the maps of an image of a batch."""
    targets, maps = attention.targets[:, row].tolist(), attention.maps[:, row].flatten(1).tolist()
    measured = [None] * len(maps) if scores is None else scores[:, row].tolist()
    return [
        Map(
            kind=kind,
            title=title_of(kind, **rollout),
            target=None if target < 0 else target,
            values=values,
            faithfulness=score,
            signed=MAP_KINDS[kind].signed,
        )
        for kind, target, values, score in zip(
            attention.kinds, targets, maps, measured, strict=True
        )
    ]


def images_with_weights(num_weights: int, count: int, steps: int = 1) -> int:
    """Return how many images can have their weights, L * H * N * N each, logged at all steps."""
    if num_weights > MAX_WEIGHTS:
        return 0
    return min(count, WEIGHT_BYTES // (num_weights * steps))


def left_out_text(weighted: int, count: int) -> str:
    """Say that not all images have attention weights in the Attention tab."""
    return (
        f"the Attention tab has the attention weights of {weighted} of {count} images (at most "
        f"{WEIGHT_BYTES / 1e6:.0f} MB in all and {MAX_WEIGHTS / 1e6:.3g} MB for each, before "
        "compression), and the maps of all"
    )
