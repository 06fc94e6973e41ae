"""Evaluators that follow attention through training: numbers, pictures and records."""

import io
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.console import warn
from vit.data.datasets import ImageSet
from vit.explain.drawing import bar_of
from vit.explain.faithfulness import score_maps, with_baselines
from vit.explain.figures import (
    captions_of,
    filmstrip_picture,
    heads_chart,
    heads_picture,
    rollout_pictures,
)
from vit.explain.filling import to_patches
from vit.explain.maps import map_title, readout_of
from vit.explain.rollout import head_maps
from vit.explain.sheet import overlays_picture
from vit.explain.statistics import (
    attention_distance,
    attention_entropy,
    largest_patch_norm,
    sink_mass,
)
from vit.files import write_atomically
from vit.model.attention_model import require_attention
from vit.registry import ALL_KINDS
from vit.reporting.attention_records import attention_records
from vit.run.tracker import ROLLOUT_TAG, Logged
from vit.tensorboard_plugin.encoding import summaries

RECORD_TAG = "attention/probe_{:02d}"
RELEVANCE_TAG = "attention/lrp/probe_{:02d}"
JUDGED = 32  # number of images for measuring faithfulness during training
JUDGED_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # fractions of hidden patches; fewer than in eval.py
JUDGED_KINDS = tuple(kind for kind, entry in ALL_KINDS.items() if entry.training)


class AttentionLogging:
    """Evaluator that shows the attention of a few images and measures statistics of all heads.

    The model is one whose attention can be read, see `Classifier.has_maps`. At each step it yields
    statistics, pictures and, for the Attention tab, a record of each image.

    The rollout maps are saved as step_*.npy, (probes, rows, columns) in units of uniform attention.
    The filmstrip is drawn from these files, so it is complete even after an interruption.

    Args:
        folder: Folder for the maps.
        probes: The images; if there are none, nothing is shown.
        steps: The steps after which it runs.
        judged: Those of the steps at which the records contain the faithfulness of the maps.
        weighted: Number of probes whose records contain attention weights; None means all.
        pictures: Whether to draw pictures.
    """

    def __init__(
        self,
        folder: Path,
        probes: ImageSet,
        steps: Container[int],
        judged: Container[int] = (),
        weighted: int | None = None,
        pictures: bool = True,
    ) -> None:
        self.folder, self.probes, self.steps, self.judged = folder, probes, steps, judged
        self.weighted = len(probes) if weighted is None else weighted
        self.pictures = pictures

    def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, Logged]]:
        """Yield attention/STATISTIC/layer_NN, pictures, and a record of each probe."""
        if len(self.probes) == 0:
            return
        levels = JUDGED_LEVELS if step in self.judged else ()
        parts = [
            *attention_records(
                classifier, self.probes, weighted=self.weighted, levels=levels,
                scored=JUDGED_KINDS, predicted_only=True,
            )
        ]  # fmt: skip
        attentions = [attention for attention, _ in parts]
        weights = [torch.cat(layer) for layer in zip(*(a.weights for a in attentions), strict=True)]
        tokens = [torch.cat(layer) for layer in zip(*(a.tokens for a in attentions), strict=True)]
        statistics = self._statistics(classifier, weights)
        layers = {name: values.mean(dim=1) for name, values in statistics.items()}
        prefix = require_attention(classifier.model).num_prefix_tokens
        layers["patch_norm"] = largest_patch_norm(tokens, prefix)
        for name, values in layers.items():
            for layer, value in enumerate(values.tolist()):
                yield f"attention/{name}/layer_{layer:02d}", value
        rollout = torch.cat([a.maps[a.kinds.index("rollout")] for a in attentions]).cpu()
        kept = self._save(rollout, step)
        finite = all(attention.finite for attention in attentions)
        if self.pictures:
            logits = torch.cat([attention.logits for attention in attentions])
            yield from self._draw(classifier, logits, weights, statistics, kept)
            if finite:
                relevance = torch.cat([a.for_prediction("lrp") for a in attentions]).cpu()
                yield from self._draw_relevance(logits, rollout, relevance)
        if not finite:
            warn(f"the Attention tab misses images of step {step}: their maps are not finite")
        first = 0
        for attention, records in parts:
            for number, record in enumerate(records, start=first):
                tag = RECORD_TAG.format(number)
                yield tag, summaries(tag, record)
            first += len(attention.logits)

    def _statistics(self, classifier: Classifier, weights: list[Tensor]) -> dict[str, Tensor]:
        """Measure the heads, (L, H) each, as the mean over the probes."""
        model = require_attention(classifier.model)
        grid = model.patch_embed.grid(*self.probes.images.shape[-2:])
        size, prefix = model.patch_embed.patch_size, model.num_prefix_tokens
        return {
            "entropy": attention_entropy(weights),
            "distance": attention_distance(weights, grid, size, prefix),
            "sink": sink_mass(weights),
        }

    def _draw(
        self,
        classifier: Classifier,
        logits: Tensor,
        weights: list[Tensor],
        statistics: dict[str, Tensor],
        maps: dict[int, np.ndarray],
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Draw statistics, heads, rollout, and the maps of all steps so far."""
        model, pixels = require_attention(classifier.model), self.probes.pixels()
        titles = ("entropy / log N", "distance, pixels", "fraction to the top token")
        chart = heads_chart(dict(zip(titles, statistics.values(), strict=True)))
        yield "attention/statistics", chart
        heads = head_maps(
            [layer[:1] for layer in weights], readout=readout_of(model),
            num_prefix_tokens=model.num_prefix_tokens,
        )  # fmt: skip
        grid = model.patch_embed.grid(*pixels.shape[-2:])
        heads = (heads[:, 0] * weights[0].shape[-1]).unflatten(2, grid)
        name = self.probes.classes[self.probes.labels[0]]
        yield "attention/heads/probe_00", heads_picture(pixels[0], heads, name)
        captions = captions_of(logits, self.probes.labels, self.probes.classes)
        latest = torch.from_numpy(maps[max(maps)])
        for number, picture in enumerate(rollout_pictures(pixels, latest, captions)):
            yield ROLLOUT_TAG.format(number), picture
        strip = torch.from_numpy(np.stack(list(maps.values())))
        yield "attention/filmstrip", filmstrip_picture(pixels, strip, list(maps))

    def _draw_relevance(
        self, logits: Tensor, rollout: Tensor, relevance: Tensor
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Draw rollout and the layer-wise relevance for the predicted class side by side."""
        kinds, classes = ("rollout", "lrp"), self.probes.classes
        captions = captions_of(logits, self.probes.labels, classes)
        predicted, pixels = logits.argmax(dim=1).tolist(), self.probes.pixels()
        for number, (image, guess) in enumerate(zip(pixels, predicted, strict=True)):
            yield RELEVANCE_TAG.format(number), overlays_picture(
                image, [rollout[number], relevance[number]], captions[number],
                [map_title(kind, classes[guess]) for kind in kinds],
                [bar_of(kind) for kind in kinds],
            )  # fmt: skip

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

    def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, Logged]]:
        """Yield faithfulness/KIND, -0.5 to 0.5, for `JUDGED_KINDS` and two baselines."""
        if len(self.images) == 0:
            return
        pixels = self.images.pixels()
        logits, maps = classifier.maps(pixels, JUDGED_KINDS, precision=classifier.precision)
        grid = require_attention(classifier.model).patch_embed.grid(*pixels.shape[-2:])
        by_patch = {kind: to_patches(found, grid) for kind, found in maps.items()}
        scores = score_maps(
            classifier.forward, classifier.normalize(pixels),
            with_baselines(by_patch, self.seed), logits.argmax(dim=1), JUDGED_LEVELS,
        )  # fmt: skip
        for kind, values in scores.items():
            yield f"faithfulness/{kind}", values["lerf_morf"].mean().item()


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
