"""Following attention through training: what is looked at, at milestones, and what is kept."""

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vit.data.augment import normalize
from vit.data.datasets import ImageSet, choose_probes
from vit.explain.charts import heads_chart
from vit.explain.faithfulness import score_maps, with_baselines
from vit.explain.figures import captions_of, filmstrip_picture, heads_picture, rollout_pictures
from vit.explain.rollout import attention_maps, attention_rollout, head_maps, readout_of
from vit.explain.statistics import (
    attention_distance,
    attention_entropy,
    largest_patch_norm,
    sink_mass,
)
from vit.files import write_atomically
from vit.model.vit import VisionTransformer
from vit.run_folder import MAPS_FOLDER
from vit.tracking import ROLLOUT_TAG, Tracker

JUDGED = 32  # images whose maps are put to the test at a milestone
JUDGED_LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # shares of patches hidden; fewer than in eval, for speed
JUDGED_KINDS = ("rollout", "relevance")


class Follower:
    """Looks at a model's attention at milestones, always on the same images.

    The probes' maps are kept in RUN/attention/step_*.npy, (probes, rows, columns) in units of
    uniform attention, from which the filmstrip is drawn, also after a run was interrupted.

    Args:
        run: The run folder.
        images: What the probes are chosen from, and the images for the faithfulness of maps.
        probes: How many images to draw; 0 looks at nothing.
        mean: Of the training images' channels, (3, 1, 1), on the model's device.
        std: Likewise.
        precision: Of matrix products, where maps are put to the test; probes take float32.
        seed: Of the run.
    """

    def __init__(
        self,
        run: Path,
        images: ImageSet,
        probes: int,
        mean: Tensor,
        std: Tensor,
        precision: torch.dtype,
        seed: int,
    ) -> None:
        self.folder = run / MAPS_FOLDER
        self.probes = choose_probes(images, probes, seed)
        self.judged = choose_probes(images, JUDGED, seed)
        self.mean, self.std, self.precision, self.seed = mean, std, precision, seed

    def look(self, model: VisionTransformer, tracker: Tracker, step: int) -> None:
        """Write pictures and numbers of a model in evaluation mode, as it is at a step."""
        if len(self.probes) == 0:
            return
        probes = normalize(self.probes.images.to(self.mean.device), self.mean, self.std)
        with torch.no_grad():
            logits, weights, tokens = model.forward_intermediates(probes)
        grid = model.patch_embed.grid(*probes.shape[-2:])
        prefix = model.num_prefix_tokens
        num_tokens = weights[0].shape[-1]
        readout = readout_of(model)
        shares = attention_rollout(weights, readout=readout, num_prefix_tokens=prefix)
        maps = (shares * num_tokens).unflatten(1, grid).cpu()
        captions = captions_of(logits, self.probes.labels, self.probes.classes)
        heads = head_maps([w[:1] for w in weights], readout=readout, num_prefix_tokens=prefix)
        name = self.probes.classes[self.probes.labels[0]]
        sheet = heads_picture(
            self.probes.images[0], (heads[:, 0] * num_tokens).unflatten(2, grid), name
        )
        tracker.picture(step, "attention/heads/probe_00", sheet)
        patch_size = model.patch_embed.patch_size
        statistics = {
            "entropy": attention_entropy(weights),
            "distance": attention_distance(weights, grid, patch_size, prefix),
            "sink": sink_mass(weights),
        }
        titles = ("entropy / log N", "distance, pixels", "share of the top token")
        chart = heads_chart(dict(zip(titles, statistics.values(), strict=True)))
        tracker.picture(step, "attention/statistics", chart)
        layers = {name: values.mean(dim=1) for name, values in statistics.items()}
        layers["patch_norm"] = largest_patch_norm(tokens, prefix)
        scalars = {
            f"attention/{name}/layer_{layer:02d}": value
            for name, values in layers.items()
            for layer, value in enumerate(values.tolist())
        }
        tracker.scalars(step, scalars | self._judge(model))
        self._draw_rollout(maps, captions, tracker, step)

    def _draw_rollout(self, maps: Tensor, captions: list[str], tracker: Tracker, step: int) -> None:
        for number, picture in enumerate(rollout_pictures(self.probes.images, maps, captions)):
            tracker.picture(step, ROLLOUT_TAG.format(number), picture)
        self.folder.mkdir(exist_ok=True)
        file = io.BytesIO()
        np.save(file, maps.numpy())
        write_atomically(self.folder / f"step_{step:08d}.npy", file.getvalue())
        found = {_step_of(path): np.load(path) for path in sorted(self.folder.glob("step_*.npy"))}
        # A run that was resumed with other probes has maps of another shape.
        kept = {s: old for s, old in found.items() if s <= step and old.shape == maps.shape}
        strip, steps = torch.from_numpy(np.stack(list(kept.values()))), list(kept)
        tracker.picture(
            step, "attention/filmstrip", filmstrip_picture(self.probes.images, strip, steps)
        )

    def _judge(self, model: VisionTransformer) -> dict[str, float]:
        """Measure (LeRF - MoRF) / 2 of each kind of map, mean over images, by tag."""
        images = normalize(self.judged.images.to(self.mean.device), self.mean, self.std)
        logits, maps = attention_maps(model, images, JUDGED_KINDS, precision=self.precision)
        scores = score_maps(
            model, images, with_baselines(maps, self.seed), logits.argmax(dim=1), JUDGED_LEVELS,
            self.precision,
        )  # fmt: skip
        return {
            f"faithfulness/{kind}": values["lerf_morf"].mean().item()
            for kind, values in scores.items()
        }


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))
