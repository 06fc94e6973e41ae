"""The evaluator that follows attention through training: records, numbers and pictures."""

import io
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.console import warn
from vit.data.datasets import choose_probes
from vit.data.images import ImageSet
from vit.evaluation import Setup
from vit.explain.figures import (
    attention_picture,
    captions_of,
    filmstrip_picture,
    heads_picture,
    statistics_picture,
)
from vit.explain.importance import as_grid
from vit.explain.maps import readout_of
from vit.explain.rollout import head_maps
from vit.explain.statistics import (
    attention_distance,
    attention_entropy,
    largest_patch_norm,
    sink_mass,
)
from vit.files import write_atomically
from vit.model.attention_model import attention_model, require_attention
from vit.parallel import one_core
from vit.reporting.attention_records import (
    Attention,
    attention_records,
    joined,
    left_out_text,
    read_frames,
)
from vit.reporting.heads import choose_held_out, draw_heads, measure_groups
from vit.reporting.live import LiveLog
from vit.run.folder import MAPS_FOLDER
from vit.run.tracker import ROLLOUT_TAG, Logged, milestones
from vit.tensorboard_plugin.encoding import frames_summary, summaries
from vit.tensorboard_plugin.records import FRAMES_TAG, Record

RECORD_TAG = "attention/probe_{:02d}"
RELEVANCE_TAG = "attention/lrp/probe_{:02d}"
MUTED_IMAGES = 500  # held-out images on which heads are muted, at most
MUTED_FRACTION = 0.02  # of a run that muting may take


class AttentionLogging:
    """Evaluator that logs the attention of a few images, the probes.

    The model is one whose attention can be read, see `Classifier.has_maps`. At each step it yields
    a record of each probe for the Attention tab, statistics of all heads, and pictures; at the last
    one also what muting each head costs.

    The rollout maps are saved as step_*.npy, (probes, rows, columns) in units of uniform attention.
    The filmstrip is drawn from these files, so it is complete even after an interruption.

    Args:
        folder: Folder for the maps.
        probes: The images; if there are none, nothing is logged.
        steps: The steps after which it runs.
        seed: Seed of the choice of images to which the frames of features are fitted.
        held_out: Images on which heads are muted at the last step; None leaves that out.
        live: Stores the model for the Attention tab; None leaves that out.
        fitted: Images to some of which the frames of features are fitted; None leaves features out.
    """

    name = "logging attention"

    def __init__(
        self,
        folder: Path,
        probes: ImageSet,
        steps: Collection[int],
        seed: int = 0,
        held_out: ImageSet | None = None,
        live: LiveLog | None = None,
        fitted: ImageSet | None = None,
    ) -> None:
        self.folder, self.probes, self.seed = folder, probes, seed
        self.steps: Collection[int] = steps
        self.held_out, self.live, self.fitted = held_out, live, fitted
        self._count, self._last = len(steps), max(steps)
        self._said = False  # whether the user knows that weights are left out

    def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, Logged]]:
        """Yield records, attention/STATISTIC/layer_NN, and pictures."""
        if not len(self.probes):
            return
        importance = None
        if step == self._last and self.held_out is not None:
            effects = measure_groups(classifier, self.held_out)["heads"]
            importance = as_grid(effects)
            yield "attention/importance", draw_heads(effects)
        with one_core() as threads:  # each thread has probes of its own
            yield from self._log(classifier, step, threads, importance)
        if self.live is not None:
            later = sum(other > step for other in self.steps)
            for found in self.live.summaries(classifier, self.probes.pixels(), step, later):
                yield found.value[0].tag, found

    def _log(
        self, classifier: Classifier, step: int, threads: int, importance: Tensor | None
    ) -> Iterator[tuple[str, Logged]]:
        frames = None
        if self.fitted is not None:
            frames = read_frames(classifier, self.fitted, self.seed, threads)
        if frames is not None:
            yield FRAMES_TAG, frames_summary(frames.numpy())
        found = attention_records(
            classifier, self.probes, frames=frames, steps=self._count, threads=threads
        )
        parts, batches = zip(*found, strict=True)
        attention = joined(parts)
        records = [_with_importance(record, importance) for batch in batches for record in batch]
        yield from self._records(records, step)
        heads = self._statistics(classifier, attention.weights)
        layers = {name: values.mean(dim=1) for name, values in heads.items()}
        prefix = require_attention(classifier.model).num_prefix_tokens
        layers["patch_norm"] = largest_patch_norm(attention.tokens, prefix)
        for name, values in layers.items():
            for layer, value in enumerate(values.tolist()):
                yield f"attention/{name}/layer_{layer:02d}", value
        maps = self._save(attention.map("rollout").cpu(), step)
        titles = ("entropy / log N", "distance, pixels", "fraction to the top token")
        chart = statistics_picture(dict(zip(titles, heads.values(), strict=True)))
        yield "attention/statistics", chart
        yield from self._draw(classifier, attention, maps)
        if attention.finite:
            yield from self._draw_relevance(attention)

    def _records(self, records: Sequence[Record | None], step: int) -> Iterator[tuple[str, Logged]]:
        """Yield the record of each probe, and say what is missing."""
        for number, record in enumerate(records):
            if record is not None:
                tag = RECORD_TAG.format(number)
                yield tag, summaries(tag, record)
        if None in records:
            warn(f"the Attention tab misses images of step {step}: their maps are not finite")
        weighted = sum(record is None or record.weights is not None for record in records)
        if weighted < len(records) and not self._said:
            warn(left_out_text(weighted, len(records)))
            self._said = True

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
        self, classifier: Classifier, attention: Attention, maps: dict[int, np.ndarray]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Draw heads, rollout, and the maps of all steps so far."""
        model, pixels, weights = (
            require_attention(classifier.model), self.probes.pixels(), attention.weights
        )  # fmt: skip
        heads = head_maps(
            [layer[:1] for layer in weights], readout=readout_of(model),
            num_prefix_tokens=model.num_prefix_tokens,
        )  # fmt: skip
        grid = model.patch_embed.grid(*pixels.shape[-2:])
        heads = (heads[:, 0] * weights[0].shape[-1]).unflatten(2, grid)
        name = self.probes.classes[self.probes.labels[0]]
        yield "attention/heads/probe_00", heads_picture(pixels[0], heads, name)
        captions = captions_of(attention.logits, self.probes.labels, self.probes.classes)
        for number, heat in enumerate(attention.map("rollout")):
            picture = attention_picture(pixels[number], {"rollout": heat}, captions[number])
            yield ROLLOUT_TAG.format(number), picture
        strip = torch.from_numpy(np.stack(list(maps.values())))
        yield "attention/filmstrip", filmstrip_picture(pixels, strip, list(maps))

    def _draw_relevance(self, attention: Attention) -> Iterator[tuple[str, np.ndarray]]:
        """Draw the layer-wise relevance for the predicted class."""
        classes, pixels = self.probes.classes, self.probes.pixels()
        captions = captions_of(attention.logits, self.probes.labels, classes)
        guesses, maps = attention.logits.argmax(dim=1).tolist(), attention.map("lrp")
        for number, (caption, guess) in enumerate(zip(captions, guesses, strict=True)):
            heat = {"lrp": maps[number]}
            picture = attention_picture(pixels[number], heat, caption, classes[guess])
            yield RELEVANCE_TAG.format(number), picture

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


def _with_importance(record: Record | None, importance: Tensor | None) -> Record | None:
    if record is None or importance is None or not importance.isfinite().all():
        return record
    statistics = replace(record.details.statistics, importance=importance.tolist())
    return replace(record, details=replace(record.details, statistics=statistics))


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def attention_logging(setup: Setup) -> AttentionLogging | None:
    """Log the attention of a few held-out images, or else training images."""
    track, seed = setup.config.track, setup.config.train.seed
    if not track.probes or attention_model(setup.model) is None:
        return None
    images = setup.held_out if len(setup.held_out) else setup.training
    # Training images may be stored larger than the model takes them.
    probes = choose_probes(images, track.probes, seed).resized(setup.preprocess)
    steps = milestones(setup.total_steps, track.milestones)
    live = LiveLog(track.live_mb, len(steps)) if track.live_mb else None
    return AttentionLogging(
        Path(setup.config.out) / MAPS_FOLDER, probes, steps, seed, _images_to_mute(setup), live,
        images,
    )  # fmt: skip


def _images_to_mute(setup: Setup) -> ImageSet | None:
    """Choose held-out images on which heads are muted: as many as take 2% of the run, up to 500.

    Classifying an image takes a third of the products of a training step.
    """
    blocks: Any = require_attention(setup.model).blocks
    heads = sum(block.attn.num_heads for block in blocks)
    trained = setup.total_steps * setup.config.train.batch_size
    count = min(MUTED_IMAGES, int(MUTED_FRACTION * 3 * trained / heads), len(setup.held_out))
    return choose_held_out(setup.held_out, count, setup.config.train.seed) if count > 1 else None
