"""What muting heads costs; test_live.py compares muted models with hooks."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from models import save_untrained
from vit.commands.config import HeadsConfig
from vit.commands.heads import as_table
from vit.commands.heads import run as measure_run
from vit.data.datasets import load_training
from vit.explain.importance import (
    Effect,
    as_grid,
    layers_of,
    measure_heads,
    pairs_of_largest,
    single_heads,
    true_class,
)
from vit.pretrained.load import load as load_model


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
    data = {"name": "shapes", "train_size": 40, "val_size": val_size}
    return save_untrained(out, {"embed_dim": 24, "depth": 2, "patch_size": 8}, data=data)


def test_command_mutes_on_the_held_out_images_of_the_run(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 20)
    measure_run(str(run), HeadsConfig(device="cpu", precision="float32", pairs=2))
    content = json.loads((run / "eval/heads.json").read_text())
    assert content["images"] == 20
    assert [len(content[part]) for part in ("heads", "layers", "pairs")] == [6, 2, 1]
    saved = load_model(run, "cpu", "float32")
    _, held_out = load_training(saved.config.data, saved.config.train.seed)
    classifier, labels = saved, held_out.labels[:, None]
    before = classifier.logits(held_out.pixels()).softmax(dim=1).gather(1, labels)
    saved.model.blocks[1].attn.proj.weight.data[:, 8:16] = 0
    after = classifier.logits(held_out.pixels()).softmax(dim=1).gather(1, labels)
    found = next(row for row in content["heads"] if row["heads"] == [[1, 1]])
    assert found["probability"][0] == pytest.approx((before - after).mean().item(), abs=1e-5)
    with Image.open(run / "eval/heads.png") as picture:
        assert picture.width > 300


def test_a_run_without_held_out_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no images were held out \(data.val_size=0\)"):
        measure_run(str(saved_run(tmp_path / "run", 0)), HeadsConfig(device="cpu"))


def test_the_table_lists_the_heads_that_cost_most_and_those_that_can_go() -> None:
    effects = [
        Effect(((number // 5, number % 5),), (value, 0.001), (value / 2, 0.002))
        for number, value in enumerate(np.random.default_rng(0).permutation(20) / 100)
    ]
    lines = as_table({"heads": effects, "layers": effects[:3]}).splitlines()[1:]
    falls = [float(line.split()[4]) for line in lines if "head " in line and "between" not in line]
    assert falls == [0.19, 0.18, 0.17, 0.16, 0.15, 0.14, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0]
    assert lines[6] == "8 heads between" and len(lines) == 6 + 1 + 6 + 3
