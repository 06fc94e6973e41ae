"""What a model loses when attention heads are muted, measured and drawn.

Attention weights say where a head looks, not whether the model needs it. A muted head adds nothing
to its layer's output (arXiv 1905.10650), see `vit.explain.interventions`.

Shapes: L layers, H heads, N images, C classes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.figures import statistics_picture
from vit.explain.interventions import gates_of, set_gates
from vit.intervals import mean_interval
from vit.model.copying import copy_module

Heads = tuple[tuple[int, int], ...]  # (layer, head), both counted from 0
Interval = tuple[float, float]  # mean over images and half the width of its 95% interval


@dataclass(frozen=True)
class Effect:
    """What a model loses when a group of heads is muted, paired by image."""

    heads: Heads
    probability: Interval  # fall of the true class's probability, -1 to 1
    accuracy: Interval  # fall of the accuracy, -1 to 1


def measure_groups(
    classifier: Classifier, images: ImageSet, pairs: int | None = None, batch_size: int = 500
) -> dict[str, list[Effect]]:
    """Measure what muting each of the "heads" costs on images in memory.

    Unless `pairs` is None, also "layers", and all "pairs" of the `pairs` heads that matter most.
    """
    inputs, gates = classifier.normalize(images.pixels()), gates_of(classifier.model)
    gated = replace(classifier, model=copy_module(classifier.model))
    layers = [tuple((layer, head) for head in range(gates.shape[1])) for layer in range(len(gates))]

    with tqdm(desc="muting heads", unit="group", leave=False, disable=None) as bar:

        def classify(gates: Tensor) -> Tensor:
            bar.update()
            set_gates(gated.model, classifier.model, gates)
            return true_class(gated.forward(inputs, batch_size), images.labels)

        unmuted = classify(gates)

        def mute(heads: Heads) -> Effect:
            muted = gates.clone()
            muted[tuple(zip(*heads, strict=True))] = 0
            return Effect(heads, *map(mean_interval, unmuted - classify(muted)))

        effects = {"heads": [mute((head,)) for layer in layers for head in layer]}
        if pairs is not None:
            effects["layers"] = [mute(layer) for layer in layers]
            largest = sorted(effect.heads[0] for effect in ranked(effects["heads"])[:pairs])
            effects["pairs"] = [mute(pair) for pair in itertools.combinations(largest, 2)]
    return effects


def true_class(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the true class's probability, and 1 where it is predicted, (2, N) float64."""
    logits, labels = logits.cpu().double(), labels.cpu()
    probability = logits.softmax(dim=1).gather(1, labels[:, None])[:, 0]
    return torch.stack([probability, (logits.argmax(dim=1) == labels).double()])


def ranked(effects: Sequence[Effect]) -> list[Effect]:
    """Sort effects, the largest first."""
    return sorted(effects, key=lambda effect: effect.probability[0], reverse=True)


def as_grid(effects: Sequence[Effect], measure: str = "probability") -> Tensor:
    """Return the mean fall in "probability" or "accuracy" when each head is muted, (L, H)."""
    layers, heads = (1 + n for n in effects[-1].heads[0])
    falls = [getattr(effect, measure)[0] for effect in effects]
    return torch.tensor(falls).view(layers, heads)


def draw_heads(effects: Sequence[Effect]) -> np.ndarray:
    """Draw what muting each head costs, (height, width, 3) uint8."""
    measures = ("probability", "accuracy")
    return statistics_picture({f"fall in {name}": as_grid(effects, name) for name in measures})
