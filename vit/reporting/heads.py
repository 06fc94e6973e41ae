"""Heads that matter: what a model loses on held-out images when its heads are muted."""

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from torch import Tensor
from tqdm import tqdm

from vit.classifier import Classifier
from vit.console import counted, printable, say
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.explain.figures import statistics_picture
from vit.explain.importance import (
    Effect,
    Heads,
    as_grid,
    layers_of,
    measure_heads,
    pairs_of_largest,
    single_heads,
    true_class,
)
from vit.explain.interventions import gates_of, with_gates
from vit.files import write_json, write_picture
from vit.model.attention_model import require_attention
from vit.model_file import SavedModel
from vit.reporting.config import HeadsConfig
from vit.reporting.loading import load_run, load_split, results_folder
from vit.reporting.tables import text_table
from vit.run.folder import HEADS_FILE, HEADS_PICTURE

LISTED = 6  # of the largest and of the smallest effects in each part of the table


def measure_run(run: str, options: HeadsConfig) -> None:
    """Mute each head, each layer and pairs of heads of a model, and write what it loses.

    Raises:
        ValueError: The model or the data cannot be read, there are no held-out images, or the
            model's heads cannot be read.
    """
    saved = load_run(run, options)
    require_attention(saved.classifier.model)
    images = load_held_out(saved, options)
    folder = results_folder(saved, options.out)
    data = saved.config.data.name
    say(f"{saved.describe()}, {len(images):,} held-out images of {data}")
    found = measure_groups(saved.classifier, images, options.pairs, options.batch_size)
    table = {part: [asdict(effect) for effect in effects] for part, effects in found.items()}
    content = {"model": str(saved.path), "images": len(images), **table}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / HEADS_FILE, content)
    write_picture(folder / HEADS_PICTURE, draw_heads(found["heads"]))
    say(f"\n{as_table(found)}\n\nwrote {HEADS_FILE} and {HEADS_PICTURE} to {printable(folder)}/")


def load_held_out(saved: SavedModel, options: HeadsConfig) -> ImageSet:
    """Load the images that were held out when a model was trained, as many as are asked for."""
    held_out = load_split(saved, options.data.root)[1]
    if not len(held_out):
        size = "null" if (given := saved.config.data.val_size) is None else given
        raise ValueError(f"{saved.path}: no images were held out (data.val_size={size})")
    held_out = held_out.resized(saved.classifier.preprocess)
    return choose_images(held_out, options.images, options.seed, "heads")


def measure_groups(
    classifier: Classifier, images: ImageSet, pairs: int | None = None, batch_size: int = 500
) -> dict[str, list[Effect]]:
    """Measure what muting each head, each layer, and pairs of heads costs on images in memory.

    All pairs of the `pairs` heads that matter most are muted; None mutes single heads only.

    Returns:
        The effects under "heads" and, unless pairs is None, "layers" and "pairs".
    """
    inputs, gates = classifier.normalize(images.pixels()), gates_of(classifier.model)
    layers, heads = gates.shape

    # disable=None shows the bar on terminals only.
    with tqdm(desc="muting heads", unit="group", leave=False, disable=None) as bar:

        def classify(gates: Tensor) -> Tensor:
            bar.update()
            gated = replace(classifier, model=with_gates(classifier.model, gates))
            return gated.forward(inputs, batch_size)

        unmuted = true_class(classify(gates), images.labels)

        def measure(groups: Sequence[Heads]) -> list[Effect]:
            return measure_heads(classify, gates, images.labels, groups, unmuted)

        found = {"heads": measure(single_heads(layers, heads))}
        if pairs is not None:
            found["layers"] = measure(layers_of(layers, heads))
            found["pairs"] = measure(pairs_of_largest(found["heads"], pairs))
        return found


def draw_heads(effects: Sequence[Effect]) -> np.ndarray:
    """Draw what muting each head costs, (height, width, 3) uint8."""
    measures = ("probability", "accuracy")
    return statistics_picture({f"fall in {name}": as_grid(effects, name) for name in measures})


def as_table(found: dict[str, list[Effect]]) -> str:
    """Format the result of `measure_groups` as text: the largest and smallest effects."""
    rows = [["muted", "fall in probability", "fall in accuracy"]]
    for part, effects in found.items():
        lines = []
        for effect in sorted(effects, key=lambda effect: effect.probability[0], reverse=True):
            named = [f"layer {layer} head {head}" for layer, head in effect.heads]
            name = f"layer {effect.heads[0][0]}" if part == "layers" else " and ".join(named)
            (mean, half), (points, spread) = effect.probability, effect.accuracy
            lines.append([name, f"{mean:.4f} ± {half:.4f}", f"{points:.2%} ± {spread:.2%}"])
        if (between := len(lines) - 2 * LISTED) > 0:
            lines[LISTED:-LISTED] = [[f"{counted(between, part[:-1])} between", "", ""]]
        rows += lines
    return "\n".join(line.rstrip() for line in text_table(rows))
