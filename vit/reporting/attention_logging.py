"""Evaluators that follow attention through training: pictures, statistics and faithfulness."""

import io
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.console import warn
from vit.data.datasets import ImageSet
from vit.explain.faithfulness import score_maps, with_baselines
from vit.explain.figures import (
    captions_of,
    filmstrip_picture,
    heads_chart,
    heads_picture,
    rollout_pictures,
)
from vit.explain.rollout import attention_rollout, head_maps, readout_of
from vit.explain.statistics import (
    attention_distance,
    attention_entropy,
    largest_patch_norm,
    sink_mass,
)
from vit.files import write_atomically
from vit.model.attention_model import require_attention
from vit.tracking import ROLLOUT_TAG

JUDGED = 32  # number of images for measuring faithfulness during training
JUDGED_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # fractions of hidden patches; fewer than in eval.py
JUDGED_KINDS = ("rollout", "relevance")


class AttentionLogging:
    """Evaluator that draws the attention of a few images and measures statistics of all heads.

    The model is one whose attention can be read, see `Classifier.has_maps`.

    The rollout maps are saved as step_*.npy, (probes, rows, columns) in units of uniform attention.
    The filmstrip is drawn from these files, so it is complete even after an interruption.

    Args:
        folder: Folder for the maps.
        probes: The images; if there are none, nothing is drawn.
        steps: The steps after which it runs.
    """

    def __init__(self, folder: Path, probes: ImageSet, steps: Container[int]) -> None:
        self.folder, self.probes, self.steps = folder, probes, steps

    def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, float | np.ndarray]]:
        """Yield attention/STATISTIC/layer_NN, and pictures of statistics, heads and rollout."""
        if len(self.probes) == 0:
            return
        model = require_attention(classifier.model)
        with torch.no_grad():
            logits, weights, tokens = model.forward_intermediates(
                classifier.normalize(self.probes.pixels())
            )
        grid = model.patch_embed.grid(*self.probes.images.shape[-2:])
        prefix = model.num_prefix_tokens
        statistics = {
            "entropy": attention_entropy(weights),
            "distance": attention_distance(weights, grid, model.patch_embed.patch_size, prefix),
            "sink": sink_mass(weights),
        }
        layers = {name: values.mean(dim=1) for name, values in statistics.items()}
        layers["patch_norm"] = largest_patch_norm(tokens, prefix)
        for name, values in layers.items():
            for layer, value in enumerate(values.tolist()):
                yield f"attention/{name}/layer_{layer:02d}", value
        titles = ("entropy / log N", "distance, pixels", "fraction to the top token")
        chart = heads_chart(dict(zip(titles, statistics.values(), strict=True)))
        yield "attention/statistics", chart
        num_tokens, readout = weights[0].shape[-1], readout_of(model)
        heads = head_maps([w[:1] for w in weights], readout=readout, num_prefix_tokens=prefix)
        heads = (heads[:, 0] * num_tokens).unflatten(2, grid)
        name = self.probes.classes[self.probes.labels[0]]
        yield "attention/heads/probe_00", heads_picture(self.probes.pixels()[0], heads, name)
        rollout = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
        maps = (rollout * num_tokens).unflatten(1, grid).cpu()
        captions = captions_of(logits, self.probes.labels, self.probes.classes)
        for number, picture in enumerate(rollout_pictures(self.probes.pixels(), maps, captions)):
            yield ROLLOUT_TAG.format(number), picture
        kept = self._save(maps, step)
        strip = torch.from_numpy(np.stack(list(kept.values())))
        yield "attention/filmstrip", filmstrip_picture(self.probes.pixels(), strip, list(kept))

    def _save(self, maps: Tensor, step: int) -> dict[int, np.ndarray]:
        """Save the maps of a step; return the maps of all steps so far.

        A full disk does not end the run.
        """
        file = io.BytesIO()
        np.save(file, maps.numpy())
        try:
            self.folder.mkdir(exist_ok=True)
            write_atomically(self.folder / f"step_{step:08d}.npy", file.getvalue())
        except OSError as error:
            warn(f"the attention maps of step {step} were not saved: {error}")
        found = {_step_of(path): np.load(path) for path in sorted(self.folder.glob("step_*.npy"))}
        # Maps of later steps date from before an interruption. A run that was resumed with another
        # number of probes has maps of another shape.
        earlier = {s: old for s, old in found.items() if s < step and old.shape == maps.shape}
        return earlier | {step: maps.numpy()}


class MapFaithfulness:
    """Evaluator that measures the faithfulness of maps: mean (LeRF - MoRF) / 2 per kind.

    Args:
        images: The images; if there are none, nothing is measured.
        seed: Seed of the random maps.
        steps: The steps after which it runs.
    """

    def __init__(self, images: ImageSet, seed: int, steps: Container[int]) -> None:
        self.images, self.seed, self.steps = images, seed, steps

    def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, float | np.ndarray]]:
        """Yield faithfulness/KIND, -0.5 to 0.5, for two kinds of map and two baselines."""
        if len(self.images) == 0:
            return
        logits, maps = classifier.maps(
            self.images.pixels(), JUDGED_KINDS, precision=classifier.precision
        )
        scores = score_maps(
            classifier.forward, classifier.normalize(self.images.pixels()),
            with_baselines(maps, self.seed), logits.argmax(dim=1), JUDGED_LEVELS,
        )  # fmt: skip
        for kind, values in scores.items():
            yield f"faithfulness/{kind}", values["lerf_morf"].mean().item()


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
