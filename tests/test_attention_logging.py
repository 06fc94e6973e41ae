"""What the attention evaluators yield and save at a milestone."""

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
from vit.evaluation import Setup
from vit.explain.figures import attention_picture, captions_of
from vit.explain.importance import as_grid
from vit.explain.maps import attention_maps
from vit.model.vit import VisionTransformer
from vit.reporting import attention_records as records_module
from vit.reporting.attention_logging import AttentionLogging, attention_logging
from vit.reporting.heads import measure_groups
from vit.tensorboard_plugin.encoding import decode_details
from vit.training.config import Config

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
    evaluator = AttentionLogging(folder, PROBES, STEPS, seed=7)
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


def test_records_come_first_then_numbers_then_pictures(classifier, tmp_path):
    (yielded,) = look(classifier, tmp_path, [5])
    assert [*yielded] == [
        *(f"attention/probe_{number:02d}" for number in range(3)),
        *(
            f"attention/{name}/layer_{layer:02d}"
            for name in ("entropy", "distance", "sink", "patch_norm")
            for layer in range(2)
        ),
        "attention/statistics", "attention/heads/probe_00",
        *(f"attention/rollout/probe_{number:02d}" for number in range(3)), "attention/filmstrip",
        *(f"attention/lrp/probe_{number:02d}" for number in range(3)),
    ]  # fmt: skip
    for number in range(3):
        tag = f"attention/probe_{number:02d}"
        assert [value.tag for value in yielded[tag].value] == [tag, f"{tag}/weights"]
    for value in yielded.values():
        assert not isinstance(value, np.ndarray) or (
            value.dtype == np.uint8 and value.shape[2] == 3
        )


def test_relevance_is_drawn_for_the_predicted_class(classifier, tmp_path):
    (yielded,) = look(classifier, tmp_path, [5])
    inputs = classifier.normalize(PROBES.images)
    logits, maps = attention_maps(classifier.model, inputs, ["lrp"])
    captions = captions_of(logits, PROBES.labels, PROBES.classes)
    for number, guess in enumerate(logits.argmax(dim=1).tolist()):
        expected = attention_picture(
            PROBES.images[number], {"lrp": maps["lrp"][number]}, captions[number],
            PROBES.classes[guess],
        )  # fmt: skip
        found = yielded[f"attention/lrp/probe_{number:02d}"]
        difference = np.abs(found.astype(int) - expected.astype(int))
        assert (difference > 2).mean() < 1e-3  # a value between two colours may go either way


def test_weights_of_a_run_have_a_budget(classifier, tmp_path, capsys, monkeypatch):
    size = 2 * 2 * 65**2  # of two layers, two heads, 8 x 8 patches and the class token
    monkeypatch.setattr(records_module, "WEIGHT_BYTES", len(STEPS) * 2 * size + 1)
    for yielded in look(classifier, tmp_path, [0, 5]):
        sums = [value for value in yielded.values() if isinstance(value, Summary)]
        assert [len(found.value) for found in sums] == [2, 2, 1]
    assert "has the attention weights of 2 of 3 images (at most 0 MB" in capsys.readouterr().err


def test_maps_that_are_not_finite_cost_records_and_relevance(classifier, tmp_path, capsys):
    with torch.no_grad():
        classifier.model.head.bias.fill_(float("nan"))
    (yielded,) = look(classifier, tmp_path, [5])
    assert not any(isinstance(value, Summary) for value in yielded.values())
    assert "attention/filmstrip" in yielded and "attention/lrp/probe_00" not in yielded
    assert "the Attention tab misses images of step 5" in capsys.readouterr().err


def test_full_disk_costs_only_the_saved_maps(classifier, tmp_path, capsys, monkeypatch):
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    whole = look(classifier, tmp_path / "whole", [0])[0]
    monkeypatch.setattr("vit.reporting.attention_logging.write_atomically", full)
    yielded = look(classifier, tmp_path / "full", [0])[0]
    assert list(yielded) == list(whole)
    np.testing.assert_array_equal(yielded["attention/filmstrip"], whole["attention/filmstrip"])
    assert "maps of step 0 were not saved: [Errno 28]" in capsys.readouterr().err


def test_importance_is_that_of_muted_heads_and_measured_at_the_last_step(classifier, tmp_path):
    evaluator = AttentionLogging(tmp_path, PROBES, STEPS, seed=7, held_out=IMAGES)
    for step in STEPS:
        shown = dict(evaluator.run(classifier, step))
        details = decode_details(shown["attention/probe_01"].value[0].tensor.string_val[0])
        if step == STEPS[-1]:
            falls = as_grid(measure_groups(classifier, IMAGES)["heads"])
            np.testing.assert_allclose(details.statistics.importance, falls, rtol=1e-3)
        else:
            assert details.statistics.importance is None
        assert ("attention/importance" in shown) == (step == STEPS[-1])


@pytest.mark.parametrize(("steps", "count"), [(1, 0), (20, 38), (1000, 60)])
def test_muting_takes_at_most_two_percent_of_the_images_of_a_run(
    classifier, tmp_path, steps, count
):
    """A forward pass is a third of a step; the model has 4 heads."""
    config = Config(out=str(tmp_path))
    setup = Setup(config, classifier.model, classifier.preprocess, IMAGES, IMAGES, (), steps)
    evaluator = attention_logging(setup)
    assert evaluator is not None
    assert len(evaluator.held_out or ()) == count
    assert count * 4 <= 0.02 * 3 * steps * config.train.batch_size
