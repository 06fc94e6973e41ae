"""The evaluator that follows attention through training: records, numbers and pictures."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from vit.classifier import Classifier
from vit.console import counted, note, warn
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.evaluation import Setup
from vit.explain.figures import attention_picture, captions_of, statistics_picture
from vit.explain.statistics import largest_patch_norm
from vit.model.attention_model import attention_model, require_attention
from vit.reporting.attention_records import attention_records, read_frames
from vit.reporting.heads import as_grid, draw_heads, measure_groups
from vit.reporting.live import LiveLog
from vit.run.length import Milestones
from vit.run.tracker import LOGGED_FRACTION, LOGGED_IMAGES, Logged
from vit.tensorboard_plugin.encoding import FRAMES_TAG, frames_summary, summaries

RECORD_TAG = "attention/probe_{:02d}"
ROLLOUT_TAG = "attention/rollout/probe_{:02d}"
STATISTICS = {"entropy": "entropy / log N", "distance": "distance, pixels",
              "sink": "fraction to the top token"}  # fmt: skip
FREE_TOKENS = 200_000  # to train on in the time in which attention is logged in any case
MUTED_IMAGES = 500  # held-out images on which heads are muted, at most
MUTED_FRACTION = 0.01  # of a run that muting may take


@dataclass
class AttentionLogging:
    """Evaluator that logs the attention of a few images, the probes, for a model that has maps.

    Each time, it yields a record of each probe for the Attention tab, statistics of all heads, and
    pictures of rollout; at the last step, it also yields what muting each head costs.
    """

    probes: ImageSet
    steps: Collection[int]  # after which it runs
    seed: int = 0  # of the choice of images to which the frames of features are fitted
    held_out: ImageSet | None = None  # on which heads are muted at the last step; None skips that
    live: LiveLog | None = None  # stores the model for the Attention tab; None skips that
    fitted: ImageSet | None = None  # for the frames of features; None logs no features
    name: ClassVar[str] = "logging attention"

    def run(self, classifier: Classifier, step: int) -> Iterator[tuple[str, Logged]]:
        """Yield records, attention/STATISTIC/layer_NN, and pictures."""
        importance = None
        if step == max(self.steps) and self.held_out is not None:
            effects = measure_groups(classifier, self.held_out)["heads"]
            importance = as_grid(effects)
            yield "attention/importance", draw_heads(effects)
        yield from self._log(classifier, step, importance)
        if self.live is not None:
            later = sum(other > step for other in self.steps)
            for summary in self.live.summaries(classifier, self.probes.pixels(), step, later):
                yield summary.value[0].tag, summary

    def _log(
        self, classifier: Classifier, step: int, importance: Tensor | None
    ) -> Iterator[tuple[str, Logged]]:
        frames = None if self.fitted is None else read_frames(classifier, self.fitted, self.seed)
        if frames is not None:
            yield FRAMES_TAG, frames_summary(frames.numpy())
        parts, records = [], []
        for part, read in attention_records(classifier, self.probes, frames=frames):
            parts.append(replace(part, weights=[]))  # not kept, as they are large
            records += [record for record in read if record is not None]
        if len(records) < len(self.probes):
            warn(f"the attention of step {step} is not logged: its numbers are not finite")
            return
        for number, record in enumerate(records):
            tag, details = RECORD_TAG.format(number), record.details
            if importance is not None and importance.isfinite().all():
                statistics = replace(details.statistics, importance=importance.tolist())
                record = replace(record, details=replace(details, statistics=statistics))
            yield tag, summaries(tag, record)
        heads = {
            name: torch.tensor([getattr(r.details.statistics, name) for r in records]).mean(dim=0)
            for name in STATISTICS
            if getattr(records[0].details.statistics, name) is not None
        }
        layers = {name: values.mean(dim=1) for name, values in heads.items()}
        tokens = [torch.cat(layer) for layer in zip(*(part.tokens for part in parts), strict=True)]
        prefix = require_attention(classifier.model).num_prefix_tokens
        layers["patch_norm"] = largest_patch_norm(tokens, prefix)
        for name, values in layers.items():
            for layer, value in enumerate(values.tolist()):
                yield f"attention/{name}/layer_{layer:02d}", value
        titled = {STATISTICS[name]: values for name, values in heads.items()}
        yield "attention/statistics", statistics_picture(titled)
        logits = torch.cat([part.logits for part in parts])
        captions = captions_of(logits, self.probes.labels, self.probes.classes)
        rollout = torch.cat([m for part in parts for kind, _, m in part.maps if kind == "rollout"])
        shown = zip(self.probes.pixels(), rollout, captions, strict=True)
        for number, (image, heat, caption) in enumerate(shown):
            picture = attention_picture(image, {"rollout": heat}, caption)
            yield ROLLOUT_TAG.format(number), picture


def attention_logging(setup: Setup) -> AttentionLogging | None:
    """Build the evaluator, for held-out or else training images; None without probes or maps."""
    track, seed = setup.config.track, setup.config.train.seed
    model: Any = attention_model(setup.model)
    if not track.probes or model is None:
        return None
    images = setup.held_out if len(setup.held_out) else setup.training
    tokens = math.prod(model.patch_embed.grid(*setup.preprocess.image_size))
    trained = setup.length.first_total * setup.config.train.batch_size
    room = max(LOGGED_FRACTION * trained, FREE_TOKENS / tokens)
    room /= LOGGED_IMAGES * (1 + tokens / 1000)  # maps grow by the square of the tokens
    number = min(track.probes, max(1, int(room / 2)))
    count = min(track.milestones, max(1, int(room / number)))
    steps, wanted = (Milestones(setup.length, n) for n in (count, track.milestones))
    if (number, len(steps)) != (track.probes, len(wanted)):
        less = f"{counted(number, 'image')} at {counted(len(steps), 'step')}"
        more = f"{track.probes} at {len(wanted)} would take over a tenth of the run"
        note(f"attention is logged for {less}; {more}")
    # Training images may be stored larger than the model takes them.
    probes = choose_images(images, number, seed).resized(setup.preprocess)
    live = LiveLog(track.live_mb, len(steps)) if track.live_mb else None
    # Classifying an image takes a third of the products of a training step.
    heads = sum(block.attn.num_heads for block in model.blocks)
    muted = min(MUTED_IMAGES, int(MUTED_FRACTION * 3 * trained / heads), len(setup.held_out))
    traits = (getattr(block.attn, "traits", None) for block in model.blocks)
    can_mute = all(one is None or one.can_mute for one in traits)
    held_out = None
    if muted > 1 and can_mute:
        held_out = choose_images(setup.held_out, muted, seed, "heads")
    return AttentionLogging(probes, steps, seed, held_out, live, images)
