"""Muting heads: exact for any model, and the model stays as it is."""

import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from vit.classifier import Classifier, build_model
from vit.data.config import DataConfig
from vit.data.datasets import load_training
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.explain.importance import (
    Effect,
    Heads,
    as_grid,
    layers_of,
    measure_heads,
    pairs_of_largest,
    single_heads,
    true_class,
)
from vit.explain.interventions import gates_of, with_gates
from vit.model.config import ModelConfig
from vit.model.vit import VisionTransformer
from vit.model_file import load_model, save_model
from vit.reporting.config import HeadsConfig
from vit.reporting.heads import measure_run
from vit.training.config import Config

SMALL = {
    "img_size": 16, "in_chans": 3, "num_classes": 5, "patch_size": 4, "embed_dim": 24, "depth": 2,
    "num_heads": 3,
}  # fmt: skip
MODELS = {
    "ours": lambda: VisionTransformer(**SMALL),
    "differential": lambda: VisionTransformer(**SMALL, attention="differential"),
    "timm": lambda: timm.models.vision_transformer.VisionTransformer(**SMALL),
}


def muted(model: nn.Module, heads: Heads) -> nn.Module:
    gates = gates_of(model)
    gates[tuple(zip(*heads, strict=True))] = 0
    return with_gates(model, gates)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_muting_equals_hooks(name: str) -> None:
    """A head's columns of the projection's input are zeroed; a layer without heads adds nothing."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    images = torch.randn(4, 3, 16, 16)
    plain = model(images)
    for group in (*single_heads(2, 3), *layers_of(2, 3)):
        attn, (layer, head) = model.blocks[group[0][0]].attn, group[0]
        if len(group) == 1:
            keep = (torch.arange(24) // 8 != head).float()
            handle = attn.proj.register_forward_pre_hook(lambda _, inputs, k=keep: inputs[0] * k)
        else:
            handle = attn.register_forward_hook(lambda _, __, output: torch.zeros_like(output))
        expected = model(images)
        handle.remove()
        assert not torch.equal(expected, plain)
        torch.testing.assert_close(muted(model, group)(images), expected)
        assert not torch.equal(muted(model, (*group, (1 - layer, 2)))(images), expected)
    assert torch.equal(model(images), plain)


def test_falls_are_paired_and_by_hand() -> None:
    """A stand-in for a model: muting head (0, 0) turns the logits of two of four images around."""
    labels, sure = torch.tensor([0, 1, 0, 1]), torch.log(torch.tensor([[0.9, 0.1]]))
    right = torch.cat([sure, sure.flip(1), sure, sure.flip(1)])
    wrong = torch.cat([right[:2], right[2:].flip(1)])

    def classify(gates: Tensor) -> Tensor:
        return right if gates[0, 0] else wrong

    unmuted = true_class(right, labels)
    (effect,) = measure_heads(classify, torch.ones(2, 3), labels, [((0, 0),)], unmuted)
    spread = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64).std().item()
    half = 1.959964 * spread / 2
    assert effect.accuracy == pytest.approx((0.5, half))
    assert effect.probability == pytest.approx((0.4, 0.8 * half))
    probability, hits = true_class(wrong, labels)
    assert probability.tolist() == pytest.approx([0.9, 0.9, 0.1, 0.1])
    assert hits.tolist() == [1, 1, 0, 0]


def test_groups() -> None:
    assert single_heads(2, 2) == [((0, 0),), ((0, 1),), ((1, 0),), ((1, 1),)]
    assert layers_of(2, 2) == [((0, 0), (0, 1)), ((1, 0), (1, 1))]
    falls = {(0, 0): 0.1, (0, 1): -0.2, (1, 0): 0.3, (1, 1): 0.2}
    effects = [Effect((head,), (fall, 0.0), (0.0, 0.0)) for head, fall in falls.items()]
    assert pairs_of_largest(effects, 2) == [((1, 0), (1, 1))]
    assert len(pairs_of_largest(effects, 3)) == 3
    torch.testing.assert_close(as_grid(effects), torch.tensor([[0.1, -0.2], [0.3, 0.2]]))


def saved_run(out: Path, val_size: int) -> Path:
    """A run folder with a small random model of drawn shapes."""
    data = DataConfig(name="shapes", train_size=40, val_size=val_size)
    config = Config(out=str(out), data=data, model=ModelConfig(embed_dim=24, depth=2, patch_size=8))
    preprocess = Preprocess.from_config(data)
    torch.manual_seed(0)
    model = build_model(config.model, preprocess, len(KINDS)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    classifier = Classifier(model, preprocess, KINDS, torch.device("cpu"), torch.float32)
    out.mkdir()
    save_model(out / "model.safetensors", classifier, config, 1)
    return out


def test_command_mutes_on_the_held_out_images_of_the_run(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 20)
    measure_run(str(run), HeadsConfig(device="cpu", precision="float32", pairs=2))
    content = json.loads((run / "eval/heads.json").read_text())
    assert content["images"] == 20
    assert [len(content[part]) for part in ("heads", "layers", "pairs")] == [6, 2, 1]
    saved = load_model(run, "cpu", "float32")
    _, held_out = load_training(saved.config.data, saved.config.train.seed)
    classifier, labels = saved.classifier, held_out.labels[:, None]
    before = classifier.logits(held_out.pixels()).softmax(dim=1).gather(1, labels)
    saved.classifier.model.blocks[1].attn.proj.weight.data[:, 8:16] = 0
    after = classifier.logits(held_out.pixels()).softmax(dim=1).gather(1, labels)
    found = next(row for row in content["heads"] if row["heads"] == [[1, 1]])
    assert found["probability"][0] == pytest.approx((before - after).mean().item(), abs=1e-5)
    with Image.open(run / "eval/heads.png") as picture:
        assert picture.width > 300


def test_a_run_without_held_out_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no images were held out \(data.val_size=0\)"):
        measure_run(str(saved_run(tmp_path / "run", 0)), HeadsConfig(device="cpu"))
