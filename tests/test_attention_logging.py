"""What the attention evaluator yields at a milestone."""

from typing import Any

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
from vit.explain.statistics import attention_distance, attention_entropy, sink_mass
from vit.model.vit import VisionTransformer
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


def logged(classifier: Classifier, step: int = 5, **options: Any) -> dict[str, Any]:
    """Return what the evaluator yields after a step, by tag."""
    return dict(AttentionLogging(PROBES, STEPS, seed=7, **options).run(classifier, step))


def test_records_come_first_then_numbers_then_pictures(classifier: Classifier) -> None:
    yielded = logged(classifier)
    records = [f"attention/probe_{number:02d}" for number in range(3)]
    assert [*yielded] == [
        *records,
        *(
            f"attention/{name}/layer_{layer:02d}"
            for name in ("entropy", "distance", "sink", "patch_norm")
            for layer in range(2)
        ),
        "attention/statistics", *(f"attention/rollout/probe_{number:02d}" for number in range(3)),
    ]  # fmt: skip
    for tag in records:
        assert [value.tag for value in yielded[tag].value] == [tag, f"{tag}/weights"]
    inputs = classifier.normalize(PROBES.images)
    with torch.no_grad():
        _, weights, _ = classifier.model.forward_intermediates(inputs)
    for name, expected in (
        ("entropy", attention_entropy(weights)),
        ("distance", attention_distance(weights, (8, 8), 4, 1)),
        ("sink", sink_mass(weights)),
    ):
        found = [yielded[f"attention/{name}/layer_{layer:02d}"] for layer in range(2)]
        np.testing.assert_allclose(found, expected.mean(dim=1), rtol=1e-4)
    logits, maps = attention_maps(classifier.model, inputs)
    captions = captions_of(logits, PROBES.labels, PROBES.classes)
    for number in range(3):
        picture = attention_picture(
            PROBES.images[number], {"rollout": maps["rollout"][number]}, captions[number]
        )
        difference = np.abs(yielded[f"attention/rollout/probe_{number:02d}"] - picture.astype(int))
        assert (difference > 2).mean() < 1e-3  # a value between two colours may go either way


def test_numbers_that_are_not_finite_are_not_logged(
    classifier: Classifier, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch.no_grad():
        classifier.model.head.bias.fill_(float("nan"))
    assert logged(classifier, fitted=IMAGES).keys() <= {"attention/frames"}
    assert "the attention of step 5 is not logged" in capsys.readouterr().err


def test_importance_is_that_of_muted_heads_and_measured_at_the_last_step(
    classifier: Classifier,
) -> None:
    for step in STEPS:
        shown = logged(classifier, step, held_out=IMAGES)
        assert isinstance(shown["attention/probe_01"], Summary)
        details = decode_details(shown["attention/probe_01"].value[0].tensor.string_val[0])
        if step == STEPS[-1]:
            falls = as_grid(measure_groups(classifier, IMAGES)["heads"])
            np.testing.assert_allclose(details.statistics.importance, falls, rtol=1e-3)
        else:
            assert details.statistics.importance is None
        assert ("attention/importance" in shown) == (step == STEPS[-1])


@pytest.mark.parametrize(("steps", "count"), [(1, 0), (20, 38), (1000, 60)])
def test_muting_takes_at_most_two_percent_of_the_images_of_a_run(
    classifier: Classifier, steps: int, count: int
) -> None:
    """A forward pass is a third of a step; the model has 4 heads."""
    config = Config()
    setup = Setup(config, classifier.model, classifier.preprocess, IMAGES, IMAGES, (), steps)
    evaluator = attention_logging(setup)
    assert evaluator is not None
    assert len(evaluator.held_out or ()) == count
    assert count * 4 <= 0.02 * 3 * steps * config.train.batch_size
