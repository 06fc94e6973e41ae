"""What is looked at of attention at a milestone, read back from the run folder."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from models import PLAIN
from vit.data.augment import normalize
from vit.data.datasets import choose_probes, load, normalization
from vit.explain.faithfulness import (
    centred_map,
    faithfulness,
    hiding_curves,
    random_maps,
)
from vit.explain.rollout import attention_maps
from vit.model.vit import VisionTransformer
from vit.reporting.attention_logging import JUDGED, JUDGED_LEVELS, Follower
from vit.tracking import Tracker

IMAGES = load("shapes", ".", train=False, count=60)
MEAN, STD = normalization("shapes", torch.device("cpu"))


@pytest.fixture
def model() -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(
        **PLAIN, img_size=32, num_classes=10, embed_dim=24, depth=2, num_heads=2
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def look(
    model: VisionTransformer, run: Path, steps: list[int], probes: int = 3
) -> EventAccumulator:
    """Look at a model at some steps; return what TensorBoard has of it."""
    run.mkdir(exist_ok=True)
    tracker = Tracker(run)
    follower = Follower(run, IMAGES, probes, MEAN, STD, torch.float32, seed=7)
    for step in steps:
        follower.look(model, tracker, step)
    tracker.close()
    return EventAccumulator(str(run), size_guidance={"images": 0}).Reload()


def test_filmstrip_ends_with_the_step_it_is_drawn_at(model, tmp_path):
    expected = look(model, tmp_path / "whole", [0, 5]).Images("attention/filmstrip")[-1]
    run = tmp_path / "resumed"
    (run / "attention").mkdir(parents=True)
    for step in (5, 9):  # left by a process that was killed later than its last checkpoint
        np.save(run / "attention" / f"step_{step:08d}.npy", np.full((3, 8, 8), 2.5, np.float32))
    shown = look(model, run, [0, 5]).Images("attention/filmstrip")
    assert shown[-1].encoded_image_string == expected.encoded_image_string


def test_kept_maps_are_the_rollout_of_the_probes(model, tmp_path):
    look(model, tmp_path, [5])
    probes = choose_probes(IMAGES, 3, 7)
    _, maps = attention_maps(model, normalize(probes.images, MEAN, STD))
    kept = np.load(tmp_path / "attention" / "step_00000005.npy")
    np.testing.assert_allclose(kept, maps["rollout"].numpy(), rtol=0, atol=1e-6)


def test_faithfulness_of_each_kind_is_measured_on_the_same_images(model, tmp_path):
    look(model, tmp_path, [5])
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    images = normalize(choose_probes(IMAGES, JUDGED, 7).images, MEAN, STD)
    logits, maps = attention_maps(model, images, ["rollout", "relevance"])
    maps["random"] = random_maps(JUDGED, (8, 8), 7)
    maps["centred"] = centred_map((8, 8)).expand(JUDGED, -1, -1)
    for kind, found in maps.items():
        curves = hiding_curves(model, images, found, logits.argmax(dim=1), JUDGED_LEVELS)
        expected = faithfulness(*curves)["lerf_morf"].mean().item()
        assert row[f"faithfulness/{kind}"] == pytest.approx(expected, abs=1e-6), kind


def test_without_probes_nothing_is_looked_at(model, tmp_path):
    shown = look(model, tmp_path, [0, 5], probes=0)
    assert shown.Tags()["images"] == shown.Tags()["scalars"] == []
    assert not (tmp_path / "attention").exists()
