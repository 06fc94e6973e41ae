"""What the attention evaluators yield and save at a milestone."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.compat.proto.summary_pb2 import Summary

from models import PLAIN
from vit.classifier import Classifier
from vit.data.config import DataConfig
from vit.data.datasets import choose_probes, load
from vit.data.preprocess import Preprocess
from vit.explain.drawing import SIGNED, UNIFORM
from vit.explain.faithfulness import (
    centred_map,
    faithfulness,
    hiding_curves,
    random_maps,
)
from vit.explain.figures import captions_of
from vit.explain.maps import attention_maps, map_title
from vit.explain.sheet import overlays_picture
from vit.model.vit import VisionTransformer
from vit.reporting.attention_logging import (
    JUDGED,
    JUDGED_LEVELS,
    AttentionLogging,
    MapFaithfulness,
)
from vit.reporting.attention_records import attention_records
from vit.tensorboard_plugin.encoding import decode_details, summaries

IMAGES = load("shapes", ".", train=False, count=60)
PROBES = choose_probes(IMAGES, 3, 7)
STEPS = (0, 5)


@pytest.fixture
def classifier() -> Classifier:
    torch.manual_seed(0)
    model = VisionTransformer(
        **PLAIN, img_size=32, num_classes=10, embed_dim=24, depth=2, num_heads=2
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    preprocess = Preprocess.from_config(DataConfig(name="shapes"))
    return Classifier(model.eval(), preprocess, IMAGES.classes, torch.device("cpu"), torch.float32)


def look(classifier: Classifier, folder: Path, steps: list[int]) -> list[dict]:
    """Run the evaluator of the probes after some steps; return what it yields, by tag."""
    evaluator = AttentionLogging(folder, PROBES, STEPS)
    return [dict(evaluator.run(classifier, step)) for step in steps]


def test_filmstrip_ends_with_the_step_it_is_drawn_at(classifier, tmp_path):
    expected = look(classifier, tmp_path / "whole", [0, 5])[-1]["attention/filmstrip"]
    folder = tmp_path / "resumed"
    folder.mkdir()
    for step in (5, 9):  # left by a process that was killed later than its last checkpoint
        np.save(folder / f"step_{step:08d}.npy", np.full((3, 8, 8), 2.5, np.float32))
    shown = look(classifier, folder, [0, 5])[-1]["attention/filmstrip"]
    np.testing.assert_array_equal(shown, expected)


def test_saved_maps_are_the_rollout_of_the_probes(classifier, tmp_path):
    look(classifier, tmp_path, [5])
    _, maps = attention_maps(classifier.model, classifier.normalize(PROBES.images))
    saved = np.load(tmp_path / "step_00000005.npy")
    np.testing.assert_allclose(saved, maps["rollout"].numpy(), rtol=0, atol=1e-6)


def test_statistics_come_first_and_in_order(classifier, tmp_path):
    (yielded,) = look(classifier, tmp_path, [5])
    numbers = [tag for tag, value in yielded.items() if isinstance(value, float)]
    assert numbers == [
        f"attention/{name}/layer_{layer:02d}"
        for name in ("entropy", "distance", "sink", "patch_norm")
        for layer in range(2)
    ]
    pictures = [tag for tag, value in yielded.items() if isinstance(value, np.ndarray)]
    assert pictures == [
        "attention/statistics", "attention/heads/probe_00",
        *(f"attention/rollout/probe_{number:02d}" for number in range(3)), "attention/filmstrip",
        *(f"attention/lrp/probe_{number:02d}" for number in range(3)),
    ]  # fmt: skip
    for tag in pictures:
        assert yielded[tag].dtype == np.uint8 and yielded[tag].shape[2] == 3


def test_relevance_is_drawn_for_the_predicted_class(classifier, tmp_path):
    (yielded,) = look(classifier, tmp_path, [5])
    inputs = classifier.normalize(PROBES.images)
    logits, maps = attention_maps(classifier.model, inputs, ["rollout", "lrp"])
    captions = captions_of(logits, PROBES.labels, PROBES.classes)
    for number, guess in enumerate(logits.argmax(dim=1).tolist()):
        expected = overlays_picture(
            PROBES.images[number], [maps["rollout"][number], maps["lrp"][number]], captions[number],
            [map_title("rollout", ""), map_title("lrp", PROBES.classes[guess])], [UNIFORM, SIGNED],
        )  # fmt: skip
        found = yielded[f"attention/lrp/probe_{number:02d}"]
        difference = np.abs(found.astype(int) - expected.astype(int))
        assert (difference > 2).mean() < 1e-3  # a value between two colours may go either way


def test_records_come_last_and_are_those_of_the_probes(classifier, tmp_path):
    (yielded,) = look(classifier, tmp_path, [5])
    assert [*yielded][-3:] == [f"attention/probe_{number:02d}" for number in range(3)]
    ((attention, records),) = attention_records(classifier, PROBES, weighted=3)
    for number, record in enumerate(records):
        tag = f"attention/probe_{number:02d}"
        assert yielded[tag] == summaries(tag, record)
        assert [value.tag for value in yielded[tag].value] == [tag, f"{tag}/weights"]
    assert attention.logits.shape == (3, 10)


def test_settings_choose_what_the_records_contain(classifier, tmp_path):
    evaluator = AttentionLogging(tmp_path, PROBES, STEPS, judged=[5], weighted=2, pictures=False)
    for step, judged in ((0, False), (5, True)):
        yielded = dict(evaluator.run(classifier, step))
        assert not any(isinstance(value, np.ndarray) for value in yielded.values())
        sums = [value for value in yielded.values() if isinstance(value, Summary)]
        assert [len(found.value) for found in sums] == [2, 2, 1]
        for found in sums:
            details = decode_details(found.value[0].tensor.string_val[0])
            measured = {shown.kind for shown in details.maps if shown.faithfulness is not None}
            assert measured == ({"rollout", "relevance", "lrp"} if judged else set())
    assert len([*tmp_path.glob("step_*.npy")]) == 2


def test_maps_that_are_not_finite_cost_only_the_records(classifier, tmp_path, capsys):
    with torch.no_grad():
        classifier.model.head.bias.fill_(float("nan"))
    (yielded,) = look(classifier, tmp_path, [5])
    assert not any(isinstance(value, Summary) for value in yielded.values())
    assert "attention/filmstrip" in yielded and "attention/lrp/probe_00" not in yielded
    assert "the Attention tab misses images of step 5" in capsys.readouterr().err


def test_faithfulness_of_each_kind_is_measured_on_the_same_images(classifier):
    judged = choose_probes(IMAGES, JUDGED, 7)
    row = dict(MapFaithfulness(judged, 7, STEPS).run(classifier, 5))
    images = classifier.normalize(judged.images)
    logits, maps = attention_maps(classifier.model, images, ["rollout", "relevance", "lrp"])
    maps["random"] = random_maps(JUDGED, (8, 8), 7)
    maps["centred"] = centred_map((8, 8)).expand(JUDGED, -1, -1)
    assert list(row) == [f"faithfulness/{kind}" for kind in maps]
    for kind, found in maps.items():
        curves = hiding_curves(
            classifier.forward, images, found, logits.argmax(dim=1), JUDGED_LEVELS
        )
        expected = faithfulness(*curves)["lerf_morf"].mean().item()
        assert row[f"faithfulness/{kind}"] == pytest.approx(expected, abs=1e-6), kind


def test_full_disk_costs_only_the_saved_maps(classifier, tmp_path, capsys, monkeypatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    whole = look(classifier, tmp_path / "whole", [0])[0]
    monkeypatch.setattr("vit.reporting.attention_logging.write_atomically", full)
    yielded = look(classifier, tmp_path / "full", [0])[0]
    assert list(yielded) == list(whole)
    np.testing.assert_array_equal(yielded["attention/filmstrip"], whole["attention/filmstrip"])
    assert "maps of step 0 were not saved: [Errno 28]" in capsys.readouterr().err


def test_without_images_nothing_is_drawn_or_measured(classifier, tmp_path):
    none = choose_probes(IMAGES, 0, 7)
    evaluators = (AttentionLogging(tmp_path / "maps", none, STEPS), MapFaithfulness(none, 7, STEPS))
    for evaluator in evaluators:
        assert list(evaluator.run(classifier, 5)) == []
    assert not (tmp_path / "maps").exists()


def test_channels_other_than_three_are_drawn(tmp_path):
    torch.manual_seed(0)
    settings = PLAIN | {"in_chans": 1}
    model = VisionTransformer(
        **settings, img_size=32, num_classes=10, embed_dim=24, depth=1, num_heads=2
    ).eval()
    grey = dataclasses.replace(PROBES, images=PROBES.images[:, :1])
    preprocess = Preprocess((32, 32), (0.5,), (0.25,))
    classifier = Classifier(model, preprocess, IMAGES.classes, torch.device("cpu"), torch.float32)
    yielded = dict(AttentionLogging(tmp_path, grey, STEPS).run(classifier, 0))
    assert yielded["attention/rollout/probe_00"].shape[2] == 3
