"""What muting heads costs a model, measured and drawn."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.data.images import ImageSet
from vit.explain.figures import statistics_picture
from vit.explain.importance import (
    Effect,
    as_grid,
    layers_of,
    measure_heads,
    pairs_of_largest,
    single_heads,
    true_class,
)
from vit.explain.interventions import gates_of, with_gates


def measure_groups(
    classifier: Classifier, images: ImageSet, pairs: int | None = None, batch_size: int = 500
) -> dict[str, list[Effect]]:
    """Measure what muting each of the "heads" costs on images in memory.

    Unless `pairs` is None, also "layers", and all "pairs" of the `pairs` heads that matter most.
    """
    inputs, gates = classifier.normalize(images.pixels()), gates_of(classifier.model)
    layers, heads = gates.shape

    with tqdm(desc="muting heads", unit="group", leave=False, disable=None) as bar:

        def classify(gates: Tensor) -> Tensor:
            bar.update()
            gated = replace(classifier, model=with_gates(classifier.model, gates))
            return gated.forward(inputs, batch_size)

        unmuted = true_class(classify(gates), images.labels)
        measure = partial(measure_heads, classify, gates, images.labels, unmuted=unmuted)
        effects = {"heads": measure(single_heads(layers, heads))}
        if pairs is not None:
            effects["layers"] = measure(layers_of(layers, heads))
            effects["pairs"] = measure(pairs_of_largest(effects["heads"], pairs))
        return effects


def draw_heads(effects: Sequence[Effect]) -> np.ndarray:
    """Draw what muting each head costs, (height, width, 3) uint8."""
    measures = ("probability", "accuracy")
    return statistics_picture({f"fall in {name}": as_grid(effects, name) for name in measures})
