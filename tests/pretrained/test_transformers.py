"""Weights as transformers saves them; transformers itself is the reference."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.testing import assert_close

import vit
from models import randomize
from vit.classifier import build_model
from vit.data.config import DataConfig
from vit.data.shapes import KINDS
from vit.model.attention_model import require_attention
from vit.model.config import ModelConfig
from vit.pretrained.adapt import fit
from vit.pretrained.architecture import adopt
from vit.pretrained.transformers import read_transformers

pytestmark = [
    pytest.mark.slow,  # importing transformers takes seconds
    pytest.mark.filterwarnings("ignore"),  # of other packages
]

SIZE, LABELS = 32, 10
SHAPE = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIZE,
    "patch_size": 8, "num_labels": LABELS,
}  # fmt: skip
WIDE = {**SHAPE, "intermediate_size": 80}
EVA, BEIT = "timm:vit_small_patch16_dinov3", "timm:beit_base_patch16_224"
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Arguments of the config of each model; the timm model where our VisionTransformer lacks a part.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "vit": ("ViTForImageClassification", WIDE, "vit"),
    "vit-without-bias": (
        "ViTForImageClassification", {**WIDE, "qkv_bias": False, "hidden_act": "quick_gelu"}, "vit"
    ),
    "vit-named": ("ViTForImageClassification", WIDE, "timm:vit_tiny_patch16_224"),
    "vit-backbone": ("ViTModel", {**WIDE, "layer_norm_eps": 1e-2}, "vit"),
    "deit": ("DeiTForImageClassification", WIDE, "vit"),
    "deit-distilled": (
        "DeiTForImageClassificationWithTeacher", {**WIDE, "layer_norm_eps": 1e-2},
        "timm:deit_base_distilled_patch16_224",
    ),
    "dinov2": ("Dinov2Model", SHAPE, "vit"),
    "dinov2-classifier": ("Dinov2ForImageClassification", SHAPE, "vit"),
    "dinov2-giant": (
        "Dinov2Model", {**SHAPE, "use_swiglu_ffn": True}, "timm:vit_giant_patch14_dinov2"
    ),
    "dinov2-registers": ("Dinov2WithRegistersModel", {**SHAPE, "num_register_tokens": 3}, "vit"),
    "dinov3": ("DINOv3ViTModel", {**WIDE, "num_register_tokens": 4, "rope_theta": 50.0}, EVA),
    "dinov3-gated": ("DINOv3ViTModel", {**WIDE, "use_gated_mlp": True, "hidden_act": "silu"}, EVA),
    "beit": ("BeitForImageClassification", {**WIDE, "use_relative_position_bias": True}, BEIT),
    "beit-shared": (
        "BeitForImageClassification",
        {**WIDE, "use_shared_relative_position_bias": True, "use_mean_pooling": False,
         "use_absolute_position_embeddings": True, "layer_norm_eps": 1e-2},
        BEIT,
    ),
    "siglip": ("SiglipVisionModel", WIDE, "timm:vit_base_patch16_siglip_224"),
    "siglip-classifier": ("SiglipForImageClassification", WIDE, "vit"),
}  # fmt: skip


def draw(name: str, **changes: Any) -> Any:
    """Build a model of transformers all of whose weights are random."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    transformers.logging.set_verbosity_error()
    class_name, values, _ = MODELS[name]
    kind = getattr(transformers, class_name)
    values = {**values, **changes, "attn_implementation": "eager"}
    if class_name == "SiglipForImageClassification":
        vision = transformers.SiglipVisionConfig(**values).to_dict()
        config = transformers.SiglipConfig(vision_config=vision, num_labels=LABELS)
        config._attn_implementation = "eager"
    else:
        config = kind.config_class(**values)
    return randomize(kind(config), 0.1)


def expected(model: Any, images: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return logits, or else features, and the attention weights."""
    with torch.no_grad():
        output = model(images, output_attentions=True)
    if "logits" in output:
        return output.logits, output.attentions
    is_vit = type(model).__name__ == "ViTModel"  # whose pooler is a layer of pretraining
    return output.last_hidden_state[:, 0] if is_vit else output.pooler_output, output.attentions


@pytest.mark.parametrize("name", MODELS)
def test_logits_or_features_and_attention_are_those_of_transformers(name, tmp_path):
    original = draw(name)
    original.save_pretrained(tmp_path)
    source, preprocess = read_transformers(tmp_path)
    assert (source.classes is None) == ("head.weight" not in source.weights)
    # There is no preprocessor_config.json, so images are normalized as usual.
    is_imagenets = name.startswith(("deit", "dinov"))
    usual = IMAGENET if is_imagenets else ((0.5,) * 3, (0.5,) * 3)
    assert (source.mean, source.std) == (preprocess.mean, preprocess.std) == usual
    (note,) = [note for note in source.notes if "mean and std" in note]
    assert ("those of ImageNet" in note) == is_imagenets
    named = {"name": MODELS[name][2]} if name == "vit-named" else {}
    config = adopt(ModelConfig(pretrained=str(tmp_path), **named), source.settings, str(tmp_path))
    assert config.name == MODELS[name][2]
    source = fit(source, config, DataConfig(name="folder", image_size=SIZE).spec)
    model: Any = build_model(config, preprocess, LABELS).eval()
    result = model.load_state_dict(source.weights, strict=False)
    heads = [] if source.classes else ["head.bias", "head.weight"]
    assert sorted(result.missing_keys) == heads and not result.unexpected_keys
    images = torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    # The head of DINOv2 reads more than one vector of an image, and is left out.
    values, weights = expected(getattr(original, "dinov2", original), images)
    with torch.no_grad():
        ours = model(images)
        if source.classes is None:
            ours = model.forward_head(model.forward_features(images), pre_logits=True)
        found = require_attention(model).forward_intermediates(images)[1]
    assert values.std() > 0.1
    assert_close(ours, values, rtol=0, atol=1e-4)
    assert len(found) == len(weights) == 2
    for ours, theirs in zip(found, weights, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_config_of_siglip_may_leave_out_defaults(tmp_path):
    """As google/siglip-base-patch16-224 does, whose folder has the tower of texts, too."""
    model = draw("siglip", num_attention_heads=12, image_size=224, patch_size=56)
    model.save_pretrained(tmp_path)
    path, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text('{"model_type": "siglip", "vision_config": {}, "text_config": {}}')
    renamed = {f"vision_model.{key}": value for key, value in load_file(weights).items()}
    save_file(
        {**renamed, "logit_scale": torch.ones(1), "text_model.head.bias": torch.ones(1)}, weights
    )
    source, preprocess = read_transformers(tmp_path)
    assert source.settings["num_heads"] == 12
    assert preprocess.image_size == (224, 224)
    assert source.weights.keys() == read_transformers(tmp_path)[0].weights.keys()


PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "do_normalize": False}),
    ("ViTImageProcessor", {"size": {"height": 32, "width": 32}, "rescale_factor": 1 / 127.5}),
    ("DeiTImageProcessor", {"size": {"height": 37, "width": 37},
                            "crop_size": {"height": 32, "width": 32}}),
    ("BitImageProcessor", {"size": {"shortest_edge": 44},
                            "crop_size": {"height": 32, "width": 32}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values"), PROCESSORS)
def test_photos_are_prepared_as_by_transformers(kind, values, tmp_path):
    names = {index: "crane" if index in (1, 3) else f"bird {index}" for index in range(LABELS)}
    draw("vit", id2label=names).save_pretrained(tmp_path)
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, kind)(**values)
    processor.save_pretrained(tmp_path)
    assert read_transformers(tmp_path)[0].notes == ()
    generator = np.random.default_rng(0)
    blocks = generator.integers(0, 256, (9, 12, 3), np.uint8)
    photo = blocks.repeat(10, axis=0).repeat(10, axis=1)
    classifier = vit.load(tmp_path, "cpu")
    assert classifier.classes[:4] == ("bird 0", "crane (1)", "bird 2", "crane (3)")
    preprocess = classifier.preprocess
    ours = preprocess.normalize(preprocess.resize(photo)[None])
    theirs = processor(torch.from_numpy(photo).permute(2, 0, 1), return_tensors="pt").pixel_values
    step = float((theirs.max() - theirs.min()) / 255)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1.5 * step  # filters of Pillow and torch round differently


def test_a_classifier_of_shapes_is_loaded_as_it_is(tmp_path):
    transformers = pytest.importorskip("transformers")
    names = dict(enumerate(KINDS))
    model = draw("beit", id2label=names, label2id={v: k for k, v in names.items()})
    model.save_pretrained(tmp_path)
    size = {"height": SIZE, "width": SIZE}
    transformers.BeitImageProcessor(size=size, image_mean=[0.4] * 3).save_pretrained(tmp_path)
    classifier = vit.load(tmp_path, "cpu", "float32")
    assert classifier.classes == KINDS and classifier.preprocess.mean == (0.4, 0.4, 0.4)
    assert vit.load(tmp_path / "model.safetensors", "cpu").classes == classifier.classes
    photo = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    with torch.no_grad():
        inputs = classifier.normalize(classifier.preprocess.resize(photo)[None])
        expected = model(inputs).logits.softmax(dim=1)[0]
    found = classifier.predict(photo, len(KINDS))
    assert_close(torch.tensor([found[kind] for kind in KINDS]), expected, rtol=0, atol=1e-4)
    assert all(map_.isfinite().all() for map_ in classifier.explain(photo).maps.values())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vit-backbone", {}, "is not a classifier .* with a head .*; train a new classifier with"),
        ("vit", {"model_type": "swin"}, "model of type swin .* must be of type vit, deit"),
        ("vit", {"problem_type": "multi_label_classification"}, "not a classifier of one class"),
        ("vit", {"hidden_act": "relu"}, "has hidden_act=relu; it must be gelu or"),
        ("vit", {"num_attention_heads": None}, "is incomplete or damaged: TypeError"),
        ("vit", {"image_size": 64}, "does not fit .* size mismatch for pos_embed"),
        ("beit", {"use_shared_relative_position_bias": True}, "tensors differ in rel_pos_bias"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(name, change, message, tmp_path):
    draw(name).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message) as error:
        vit.load(tmp_path, "cpu")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
