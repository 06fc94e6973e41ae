"""Records for the Attention tab, and what a run and eval.py RUN maps log with them."""

import base64
import io
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from models import PLAIN, names, randomize
from small_runs import load, make_loop, small
from vit.classifier import Classifier
from vit.commands.config import MapsConfig
from vit.commands.maps import run as explain_run
from vit.config import Config
from vit.data.config import DataConfig
from vit.data.datasets import choose_images
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.evaluation import Setup
from vit.explain.figures import attention_picture, captions_of
from vit.explain.interventions import logit_lens
from vit.explain.kinds import ALL_KINDS, RolloutOptions
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.explain.statistics import attention_distance, attention_entropy, sink_mass
from vit.model.attention_model import require_attention
from vit.model.vit import VisionTransformer
from vit.model_file import save_model
from vit.pretrained.load import load as load_model
from vit.reporting import attention_records as module
from vit.reporting.add_attention import add_attention
from vit.reporting.attention_logging import AttentionLogging, attention_logging
from vit.reporting.attention_records import attention_records, explained_classes
from vit.reporting.heads import as_grid, measure_groups
from vit.run.length import Length
from vit.tensorboard_plugin.encoding import (
    FRAMES_TAG,
    LIVE_TAG,
    LIVE_WEIGHTS_TAG,
    decode_details,
)
from vit.tensorboard_plugin.records import Record

IMAGES = load("shapes", ".", train=False, count=60)
SHAPES = IMAGES.select(torch.arange(5))
PROBES = choose_images(IMAGES, 3, 7)
STEPS = (0, 5)  # of logging
TIMM: dict[str, Any] = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}


def make_classifier(kind: str, num_classes: int) -> Classifier:
    if kind == "ours":
        settings = PLAIN | {"reg_tokens": 1, "global_pool": "avg"}
        model: Any = VisionTransformer(
            **settings, img_size=32, num_classes=num_classes, embed_dim=24, depth=2, num_heads=2
        )
    else:
        model = timm.create_model(kind, num_classes=num_classes, img_size=32, **TIMM)
    preprocess = Preprocess.from_config(DataConfig(name="shapes"))
    about = preprocess, images_of(num_classes).classes, torch.device("cpu"), torch.float32
    return Classifier(randomize(model, 0.2), *about)


def images_of(num_classes: int) -> ImageSet:
    return replace(SHAPES, labels=SHAPES.labels % num_classes, classes=names(num_classes))


def make(classifier: Classifier, images: ImageSet, **options: Any) -> list[Record]:
    parts = attention_records(classifier, images, **options)
    return [record for _, records in parts for record in records if record is not None]


CASES = [("ours", 10), ("vit_tiny_patch16_224", 12)]


@pytest.mark.parametrize(("kind", "num_classes"), CASES)
def test_record_is_what_is_computed_for_the_image_alone(kind, num_classes):
    classifier, images = make_classifier(kind, num_classes), images_of(num_classes)
    model = require_attention(classifier.model)
    records = make(classifier, images)
    assert len(records) == len(images) == 5
    for number, record in enumerate(records):
        found = record.details
        pixels = images.pixels()[number : number + 1]
        inputs = classifier.normalize(pixels)
        with torch.no_grad():
            logits, weights, tokens = model.forward_intermediates(inputs)
        drawn = np.asarray(Image.open(io.BytesIO(base64.b64decode(found.image.partition(",")[2]))))
        np.testing.assert_array_equal(drawn, pixels[0].permute(1, 2, 0).numpy())
        grid, prefix = (8, 8) if kind == "ours" else (4, 4), model.num_prefix_tokens
        assert found.grid == grid and found.image_size == (32, 32)
        assert found.prefix == ["class token", "register 1"][:prefix]
        assert found.readout == ("mean" if kind == "ours" else "class_token")
        assert found.label == images.labels[number] and tuple(found.classes) == classifier.classes
        shares, best = logits.softmax(dim=1)[0].topk(5)
        assert [index for index, _ in found.top] == best.tolist()
        close([share for _, share in found.top], shares)
        assert record.weights is not None
        close(record.weights, torch.stack(weights)[:, 0])
        close(found.statistics.entropy, attention_entropy(weights))
        size = model.patch_embed.patch_size
        close(found.statistics.distance, attention_distance(weights, grid, size, prefix))
        close(found.statistics.sink, sink_mass(weights))
        classes, probabilities = logit_lens(model.read_tokens, tokens)
        assert found.lens is not None and found.lens.classes == classes[:, 0].tolist()
        close(found.lens.probabilities, probabilities[:, 0])
        check_maps(classifier, inputs, record)


def close(found: Any, expected: Tensor) -> None:
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)


def check_maps(classifier: Classifier, inputs: Tensor, record: Record) -> None:
    """Each kind occurs once, or once for every class that it should explain."""
    found = record.details
    explained = sorted({shown.target for shown in found.maps if shown.target is not None})
    if len(classifier.classes) == 10:
        assert explained == list(range(10))
    else:
        assert len(explained) == 6 and found.label in explained
        assert {index for index, _ in found.top} <= {*explained}
    kinds = {*MAP_KINDS} - {"lrp_pixels"}
    assert {shown.kind for shown in found.maps} == kinds
    specific = sum(MAP_KINDS[kind].class_specific for kind in kinds)
    assert len(found.maps) == len(kinds) - specific + specific * len(explained)
    for shown in found.maps:
        assert (shown.target is None) == (not MAP_KINDS[shown.kind].class_specific)
        assert shown.signed == MAP_KINDS[shown.kind].signed
        assert shown.title == MAP_KINDS[shown.kind].title
        target = None if shown.target is None else torch.tensor([shown.target])
        _, maps = attention_maps(classifier.model, inputs, [shown.kind], target)
        close(shown.values, maps[shown.kind][0].flatten())


def test_batches_make_the_same_records_and_large_weights_are_left_out(monkeypatch):
    classifier, images = make_classifier("ours", 10), images_of(10)
    whole = make(classifier, images)
    monkeypatch.setattr("vit.classifier.MOST_WEIGHTS", 3 * whole[0].weights.size - 1)
    batches = attention_records(classifier, images)
    assert max(len(attention.logits) for attention, _ in batches) == 2
    monkeypatch.setattr("vit.reporting.attention_records.MAX_WEIGHTS", whole[0].weights.size - 1)
    parts = make(classifier, images)
    assert all(record.weights is None for record in parts)
    for one, other in zip(whole, parts, strict=True):
        assert (one.details.label, one.details.name) == (other.details.label, other.details.name)
        for left, right in zip(one.details.maps, other.details.maps, strict=True):
            assert (left.kind, left.target) == (right.kind, right.target)
            np.testing.assert_allclose(left.values, right.values, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "inside"), [("ours", "model"), ("ours", "call"), ("vit_tiny_patch16_224", "both")]
)
def test_inference_mode_changes_no_map_and_no_record(kind, inside, tmp_path):
    """Whether the model is made, or called, within `torch.inference_mode`."""
    expected = make_classifier(kind, 10)
    with torch.inference_mode(inside != "call"):
        classifier = make_classifier(kind, 10)
    images = images_of(10).select(torch.arange(2))
    records = make(expected, images, frames=module.read_frames(expected, images, 0))
    _, maps = expected.maps(images.pixels(), tuple(ALL_KINDS))
    with torch.inference_mode(inside != "model"):
        pixels, target = images.pixels().clone(), expected.logits(images).argmax(dim=1)
        for kinds, aim in ((ALL_KINDS, None), (MAP_KINDS, target)):
            for name, values in classifier.maps(pixels, tuple(kinds), aim)[1].items():
                assert torch.equal(values, maps[name]), name
        inputs = classifier.normalize(pixels)
        explained, _ = attention_maps(classifier.model, inputs, ["lrp", "relevance"], target)
        frames = module.read_frames(classifier, images, 0)
        for record, same in zip(make(classifier, images, frames=frames), records, strict=True):
            assert record.details == same.details
            assert np.array_equal(record.weights, same.weights)
            assert np.array_equal(record.features, same.features)
        reader = require_attention(classifier.model)
        logits, weights, tokens = reader.forward_intermediates(inputs)
        with SummaryWriter(str(tmp_path)) as writer:
            add_attention(
                writer, "image", pixels, weights, 0, grid=reader.patch_embed.grid(32, 32),
                num_prefix_tokens=reader.num_prefix_tokens, logits=logits, tokens=tokens,
            )  # fmt: skip
    torch.testing.assert_close(explained, expected.logits(images))


def test_chosen_class_is_explained_too():
    logits = torch.arange(20.0).expand(2, -1)  # class 19 is the most probable one
    found = explained_classes(logits, [torch.tensor([3, 18]), torch.tensor([0, 0])])
    assert found.T.tolist() == [[3, 0, 19, 18, 17, 16], [18, 0, 19, 17, 16, 15]]
    assert explained_classes(logits[:, :10], [torch.tensor([3, 18])]).shape == (10, 2)
    classifier, images = make_classifier("ours", 12), images_of(12)
    for record in make(classifier, images, target=7):
        assert 7 in {shown.target for shown in record.details.maps}


def test_attention_pooling_has_no_lens():
    sizes = TIMM | {"img_size": 32, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", global_pool="map", class_token=False, **sizes)
    classifier = replace(make_classifier("ours", 5), model=model.eval())
    assert all(record.details.lens is None for record in make(classifier, images_of(5)))


# What the evaluator yields at a milestone


@pytest.fixture
def classifier() -> Classifier:
    return make_classifier("ours", 10)


def logged(classifier: Classifier, step: int = 5, **options: Any) -> dict[str, Any]:
    """Return what is yielded after a step, by tag."""
    return dict(AttentionLogging(PROBES, STEPS, seed=7, **options).run(classifier, step))


def test_records_come_first_then_numbers_then_pictures(classifier):
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
        ("distance", attention_distance(weights, (8, 8), 4, 2)),
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


def test_numbers_that_are_not_finite_are_not_logged(classifier, capsys):
    with torch.no_grad():
        classifier.model.head.bias.fill_(math.nan)
    assert logged(classifier, fitted=IMAGES).keys() <= {"attention/frames"}
    assert "the attention of step 5 is not logged" in capsys.readouterr().err


def test_importance_is_that_of_muted_heads_and_measured_at_the_last_step(classifier):
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


@pytest.mark.parametrize(("steps", "count"), [(1, 0), (20, 19), (1000, 60)])
def test_muting_takes_at_most_one_percent_of_the_images_of_a_run(classifier, steps, count):
    """A forward pass is a third of a step; the model has 4 heads."""
    config, model, sizes = Config(), classifier.model, lambda _: (32, 32)
    setup = Setup(config, model, classifier.preprocess, IMAGES, IMAGES, (), Length(steps), sizes)
    evaluator = attention_logging(setup)
    assert evaluator is not None
    muted = len(evaluator.held_out or ())
    assert muted == count
    assert muted * 4 <= 0.01 * 3 * steps * config.train.batch_size


@pytest.mark.parametrize(
    ("size", "steps", "logged"),
    [
        (32, 750, (8, 10)), (32, 10, (8, 4)),  # 64 patches: a minute of CIFAR-10, a second
        (128, 750, (8, 7)), (128, 40, (1, 3)),  # 1,024 patches, of which training takes longer
        (224, 4000, (8, 10)), (224, 60, (1, 2)), (224, 1, (1, 1)),  # 3,136 patches
    ],
)  # fmt: skip
def test_logging_attention_takes_a_tenth_of_a_run_by_images_and_tokens(size, steps, logged, capsys):
    """An image costs as much as training on 80, and more with many tokens; some are free."""
    preprocess = Preprocess.from_config(DataConfig(name="shapes", image_size=size))
    sizes = {"img_size": size, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 1}
    model = VisionTransformer(**PLAIN | sizes | {"num_classes": 10}).eval()
    setup = Setup(
        Config(), model, preprocess, IMAGES, IMAGES, (), Length(steps), lambda _: (size, size)
    )
    evaluator = attention_logging(setup)
    assert evaluator is not None
    assert (len(evaluator.probes), len(evaluator.steps)) == logged
    printed = capsys.readouterr().err
    said = re.search(r"at (\d+) steps?; 8 at (\d+) would take over a tenth of the run\n", printed)
    assert bool(said) == (logged != (8, 10))
    assert said is None or int(said[1]) == logged[1] <= int(said[2]) <= min(10, steps + 1)
    assert printed.count("\n") == (logged != (8, 10))


# What eval.py RUN maps writes


def test_the_command_writes_records_of_the_images_that_are_asked_for(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    ours, model = small(run), {"name": "timm:vit_tiny_patch16_224", "timm_args": TIMM}
    config = Config(data=ours.data, train=ours.train, model=model, out=str(run))  # type: ignore[arg-type]
    save_model(run / "model.safetensors", make_loop(config).classifier(), config, 7)
    options = MapsConfig(indices=(1, 4), device="cpu", precision="float32", head_fusion="max")
    for _ in range(2):  # the second time replaces what the first wrote
        explain_run(str(run), options)
    folder, names = run / "eval/attention", [f"attention/image_{index:05d}" for index in (1, 4)]
    assert f"tensorboard --logdir {folder}" in capsys.readouterr().out
    events = EventAccumulator(str(folder), tensor_size_guidance={"attention": 0}).Reload()
    found = {tag: events.Tensors(tag) for tag in events.PluginTagToContent("attention")}
    parts = [f"{name}{part}" for name in names for part in ("", "/weights", "/features")]
    assert sorted(found) == sorted([*parts, FRAMES_TAG, LIVE_TAG, LIVE_WEIGHTS_TAG.format(7)])
    assert all([event.step for event in one] == [7] for one in found.values())
    classifier, test = load_model(run, "cpu", "float32"), load("shapes", "", train=False)
    for index, name in zip(options.indices, names, strict=True):
        details = decode_details(found[name][0].tensor_proto.string_val[0])
        assert details.label == test.labels[index]
        assert details.maps[0].title == "attention rollout (max over heads)"
        inputs = classifier.normalize(test.pixels()[index : index + 1])
        _, maps = attention_maps(classifier.model, inputs, rollout=RolloutOptions("max"))
        np.testing.assert_allclose(
            details.maps[0].values, maps["rollout"][0].flatten(), rtol=1e-3, atol=1e-4
        )
    with Image.open(folder / "features.png") as sheet:  # two images, and a map of each layer
        assert sheet.height > 2 * 96 and sheet.width > (1 + TIMM["depth"]) * 96
