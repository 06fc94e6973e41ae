"""Records for the Attention tab, against what is computed for one image at a time."""

import base64
import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor

from models import PLAIN
from vit.classifier import Classifier
from vit.data.config import DataConfig
from vit.data.datasets import load
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.explain.lens import logit_lens
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.explain.statistics import attention_distance, attention_entropy, sink_mass
from vit.model.attention_model import require_attention
from vit.model.vit import VisionTransformer
from vit.reporting import attention_records as module
from vit.reporting.attention_records import attention_records, explained_classes
from vit.tensorboard_plugin.records import Record

SHAPES = load("shapes", ".", train=False, count=5)
TIMM = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": 32}


def make_classifier(kind: str, num_classes: int) -> Classifier:
    torch.manual_seed(0)
    if kind == "ours":
        settings = PLAIN | {"reg_tokens": 1, "global_pool": "avg"}
        model: Any = VisionTransformer(
            **settings, img_size=32, num_classes=num_classes, embed_dim=24, depth=2, num_heads=2
        )
    else:
        model = timm.create_model(kind, num_classes=num_classes, **TIMM)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    preprocess = Preprocess.from_config(DataConfig(name="shapes"))
    classes = tuple(f"class {number}" for number in range(num_classes))
    return Classifier(model.eval(), preprocess, classes, torch.device("cpu"), torch.float32)


def images_of(num_classes: int) -> ImageSet:
    classes = tuple(f"class {number}" for number in range(num_classes))
    return replace(SHAPES, labels=SHAPES.labels % num_classes, classes=classes)


def make(classifier: Classifier, images: ImageSet, **options: Any) -> list[Record]:
    parts = attention_records(classifier, images, **options)
    return [record for _, records in parts for record in records if record is not None]


CASES = [("ours", 10), ("vit_tiny_patch16_224", 12)]


@pytest.mark.parametrize(("kind", "num_classes"), CASES)
def test_record_is_what_is_computed_for_the_image_alone(kind: str, num_classes: int) -> None:
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
    """All kinds are there, for the classes that they should explain, and none twice."""
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


def test_batches_make_the_same_records_and_large_weights_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classifier, images = make_classifier("ours", 10), images_of(10)
    whole = make(classifier, images)
    monkeypatch.setattr(module, "BATCH_SIZE", 2)
    monkeypatch.setattr("vit.tensorboard_plugin.summary.MAX_WEIGHTS", whole[0].weights.size - 1)
    parts = make(classifier, images)
    assert all(record.weights is None for record in parts)
    for one, other in zip(whole, parts, strict=True):
        assert (one.details.label, one.details.name) == (other.details.label, other.details.name)
        for left, right in zip(one.details.maps, other.details.maps, strict=True):
            assert (left.kind, left.target) == (right.kind, right.target)
            np.testing.assert_allclose(left.values, right.values, rtol=1e-3, atol=1e-4)


def test_chosen_class_is_explained_too() -> None:
    logits = torch.arange(20.0).expand(2, -1)  # class 19 is the most probable one
    found = explained_classes(logits, [torch.tensor([3, 18]), torch.tensor([0, 0])])
    assert found.T.tolist() == [[3, 0, 19, 18, 17, 16], [18, 0, 19, 17, 16, 15]]
    assert explained_classes(logits[:, :10], [torch.tensor([3, 18])]).shape == (10, 2)
    classifier, images = make_classifier("ours", 12), images_of(12)
    for record in make(classifier, images, target=7):
        assert 7 in {shown.target for shown in record.details.maps}


def test_attention_pooling_has_no_lens() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, global_pool="map", class_token=False, **TIMM
    )
    classifier = replace(make_classifier("ours", 5), model=model.eval())
    assert all(record.details.lens is None for record in make(classifier, images_of(5)))


def test_numbers_that_are_not_finite_make_no_records() -> None:
    classifier = make_classifier("ours", 10)
    with torch.no_grad():
        classifier.model.head.bias.fill_(math.nan)
    assert make(classifier, images_of(10)) == []
