"""Other people's tools on our model: each as its documentation uses it, against the plain model."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from captum.attr import IntegratedGradients
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.tensorboard import SummaryWriter
from torchvision.models.feature_extraction import create_feature_extractor

from models import PLAIN, randomize
from vit.model.vit import VisionTransformer
from vit.pretrained.load import load as load_model

SIZES = {
    "img_size": (16, 24), "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3,
    "num_classes": 5,
}  # fmt: skip
OURS = {"stem": "conv", "mlp_conv": True, "class_token": False, "global_pool": "avg"}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers, positions of patches only": {"reg_tokens": 2, "no_embed_class": True},
    "sincos, mean": {"pos_embed": "sincos", "global_pool": "avg"},
    "convolutions": OURS,
}
with_variants = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
IMAGES = torch.randn(3, 3, 16, 24, generator=torch.Generator().manual_seed(0))


def build(variant: dict[str, Any] | None = None) -> VisionTransformer:
    return randomize(VisionTransformer(**(PLAIN | SIZES | (variant or {}))), 0.2)


@with_variants
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_of_each_image(variant):
    model, labels = build(variant), torch.tensor([4, 0, 2])
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, image[None]), label[None])

    found = vmap(grad(loss), (None, 0, 0))(parameters, IMAGES, labels)
    for number in range(3):
        model.zero_grad()
        F.cross_entropy(model(IMAGES[number, None]), labels[number, None]).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name][number], parameter.grad, rtol=1e-4, atol=1e-5)


@with_variants
@pytest.mark.parametrize("training", [False, True])
def test_torchvision_extracts_features(variant, training):
    model = build(variant | {"drop_path_rate": 0.2, "attn_drop_rate": 0.1, "drop_rate": 0.1})
    model.train(training)
    nodes = {"patch_embed": "patches", "blocks.0": "first", "blocks.2": "last", "head": "logits"}
    extract = create_feature_extractor(model, nodes)
    assert model.training == extract.training == training
    found = extract.eval()(IMAGES)
    model.eval()
    prefix = model.num_prefix_tokens
    torch.testing.assert_close(found["logits"], model(IMAGES))
    layers = model.get_intermediate_layers(IMAGES, [0, 2], return_prefix_tokens=True)
    for name, (patches, tokens) in zip(("first", "last"), layers, strict=True):
        torch.testing.assert_close(found[name][:, prefix:], patches)
        torch.testing.assert_close(found[name][:, :prefix], tokens)
    torch.testing.assert_close(found["patches"][0], model.patch_embed(IMAGES)[0])
    with pytest.raises(ValueError, match=r"^patch_size: 8 does not divide img_size=16 x 7 "):
        extract(IMAGES[..., :7])
    other_size = torch.randn(1, 3, 24, 8)
    torch.testing.assert_close(extract(other_size)["logits"], model(other_size))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("n", [1, 2, (0, 2)])
def test_intermediate_layers_are_timms(n, norm):
    ours = build({"reg_tokens": 1})
    theirs = timm.create_model("vit_tiny_patch16_224", **SIZES, reg_tokens=1).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert (ours.num_features, ours.num_classes) == (theirs.num_features, theirs.num_classes)
    for options in ({}, {"reshape": True}, {"reshape": True, "return_prefix_tokens": True}):
        found = ours.get_intermediate_layers(IMAGES, n, norm=norm, **options)
        expected = theirs.get_intermediate_layers(IMAGES, n, norm=norm, **options)
        torch.testing.assert_close(list(found), list(expected), rtol=1e-4, atol=1e-5)


def test_classifier_is_reset():
    model = build({"reg_tokens": 1, "num_classes": 0}).double()
    features = model.forward_head(model.forward_features(IMAGES.double()), pre_logits=True)
    assert torch.equal(model(IMAGES.double()), features)
    model.reset_classifier(7)
    assert model.num_classes == 7 and model.get_classifier() is model.head
    torch.testing.assert_close(model(IMAGES.double()), model.head(features))
    assert model.head.weight.std() < 0.03 and model(IMAGES.double()).shape == (3, 7)
    model.reset_classifier(0, "avg")
    mean = model.forward_features(IMAGES.double())[:, 2:].mean(dim=1)
    torch.testing.assert_close(model(IMAGES.double()), mean)
    with pytest.raises(ValueError, match="global_pool: 'max' is not token or avg"):
        model.reset_classifier(3, "max")
    with pytest.raises(ValueError, match="needs class_token"):
        build(OURS).reset_classifier(3, "token")


def test_grad_cam_is_that_of_timms_model():
    cam = pytest.importorskip("pytorch_grad_cam").GradCAM
    targets = pytest.importorskip("pytorch_grad_cam.utils.model_targets")
    ours = build({"reg_tokens": 1})
    theirs = timm.create_model("vit_tiny_patch16_224", **SIZES, reg_tokens=1).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    maps = []
    for model in (ours, theirs):
        with cam(model, [model.blocks[-1].norm1], lambda x: x[:, 2:].mT.unflatten(2, (2, 3))) as gc:
            maps.append(gc(IMAGES, [targets.ClassifierOutputTarget(k) for k in (4, 0, 2)]))
    assert maps[0].shape == (3, 16, 24) and maps[0].std() > 0.01
    np.testing.assert_allclose(maps[0], maps[1], atol=1e-4)


@pytest.fixture(params=["small", "cifar10_quick"])
def model(request: pytest.FixtureRequest) -> VisionTransformer:
    small = request.param == "small"
    return build() if small else load_model(request.param, "cpu", "float32").model


def images_for(model: VisionTransformer) -> Tensor:
    patch = model.patch_embed
    rows, columns = patch.grid_size
    size = (3, 3, rows * patch.patch_size, columns * patch.patch_size)
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def exported(model: VisionTransformer) -> nn.Module:
    free = {"images": {0: torch.export.Dim("batch")}}
    return torch.export.export(model, (images_for(model),), dynamic_shapes=free).module()


SAME: dict[str, Callable[[VisionTransformer], nn.Module]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "jit.trace": lambda model: torch.jit.trace(model, images_for(model)),
    "export": exported,
    "compile": lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "quantization": lambda model: torch.ao.quantization.quantize_dynamic(model, {nn.Linear}),
}


@pytest.mark.parametrize("tool", SAME)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::UserWarning")
@torch.no_grad()
def test_logits_stay(tool, model):
    images = images_for(model)[:2]  # three of them are traced and exported
    expected, size = model(images), 0.2 if tool in ("bfloat16", "half", "quantization") else 1e-4
    dtype = {"bfloat16": torch.bfloat16, "half": torch.half}.get(tool, torch.float32)
    found = SAME[tool](model)(images.to(dtype)).float()
    torch.testing.assert_close(found, expected, rtol=size, atol=size)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_attributions_derivatives_and_the_graph(tmp_path, model):
    images = images_for(model)[:1]
    black = torch.zeros_like(images)
    assert copy.deepcopy(model).to("meta")(images.to("meta")).shape == (1, model.num_classes)
    attributions = IntegratedGradients(model).attribute(images, black, target=2, n_steps=200)
    rise = model(images)[0, 2] - model(black)[0, 2]
    torch.testing.assert_close(attributions.sum().float(), rise, rtol=0.02, atol=0.02)
    seen: list[Tensor] = []
    with model.blocks[1].register_forward_hook(lambda _, __, output: seen.append(output)):
        expected = torch.autograd.functional.jacobian(model, images)
    torch.testing.assert_close(jacrev(model)(images), expected, rtol=1e-3, atol=1e-5)
    [patches] = model.get_intermediate_layers(images, [1])
    torch.testing.assert_close(seen[0][:, model.num_prefix_tokens :], patches)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_graph(model, images)
    assert any(b"blocks" in path.read_bytes() for path in tmp_path.iterdir())
