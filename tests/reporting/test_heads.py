"""What muting heads costs; test_live.py compares muted models with hooks."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from models import save_untrained
from vit.commands.config import HeadsConfig
from vit.commands.heads import as_table
from vit.commands.heads import run as measure_run
from vit.data.datasets import load_training
from vit.intervals import mean_interval
from vit.pretrained.load import load as load_model
from vit.reporting.heads import Effect, as_grid, ranked, true_class


def test_falls_are_paired_and_by_hand():
    """Muting head (0, 0) turns the logits of two of four images around."""
    labels, sure = torch.tensor([0, 1, 0, 1]), torch.log(torch.tensor([[0.9, 0.1]]))
    right = torch.cat([sure, sure.flip(1), sure, sure.flip(1)])
    wrong = torch.cat([right[:2], right[2:].flip(1)])
    falls = true_class(right, labels) - true_class(wrong, labels)
    effect = Effect(((0, 0),), *map(mean_interval, falls))
    spread = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64).std().item()
    half = 3.182446 * spread / 2  # the 97.5% point of Student's t with three degrees of freedom
    assert effect.accuracy == pytest.approx((0.5, half))
    assert effect.probability == pytest.approx((0.4, 0.8 * half))
    probability, hits = true_class(wrong, labels)
    assert probability.tolist() == pytest.approx([0.9, 0.9, 0.1, 0.1])
    assert hits.tolist() == [1, 1, 0, 0]


def test_effects_as_a_grid_and_ranked():
    falls = {(0, 0): 0.1, (0, 1): -0.2, (1, 0): 0.3, (1, 1): 0.2}
    effects = [Effect((head,), (fall, 0.0), (0.0, 0.0)) for head, fall in falls.items()]
    assert [effect.heads[0] for effect in ranked(effects)] == [(1, 0), (1, 1), (0, 0), (0, 1)]
    torch.testing.assert_close(as_grid(effects), torch.tensor([[0.1, -0.2], [0.3, 0.2]]))


def saved_run(out: Path, val_size: int) -> Path:
    data = {"name": "shapes", "train_size": 40, "val_size": val_size}
    return save_untrained(out, {"embed_dim": 24, "depth": 2, "patch_size": 8}, data=data)


def test_command_mutes_on_the_held_out_images_of_the_run(tmp_path):
    run = saved_run(tmp_path / "run", 20)
    measure_run(str(run), HeadsConfig(device="cpu", precision="float32", pairs=3))
    content = json.loads((run / "eval/heads.json").read_text())
    assert content["images"] == 20
    muted = {part: [row["heads"] for row in content[part]] for part in ("heads", "layers", "pairs")}
    layers = [[[layer, head] for head in range(3)] for layer in range(2)]
    assert muted["layers"] == layers
    assert muted["heads"] == [[head] for layer in layers for head in layer]
    falls = [row["probability"][0] for row in content["heads"]]
    largest = sorted(np.argsort(falls)[-3:].tolist())
    pairs = [[*muted["heads"][a], *muted["heads"][b]] for a, b in combinations(largest, 2)]
    assert muted["pairs"] == pairs
    saved = load_model(run, "cpu", "float32")
    _, held_out = load_training(saved.config.data, saved.config.train.seed)
    classifier, labels = saved, held_out.labels[:, None]
    before = classifier.logits(held_out.pixels()).softmax(dim=1).gather(1, labels)
    saved.model.blocks[1].attn.proj.weight.data[:, 8:16] = 0
    after = classifier.logits(held_out.pixels()).softmax(dim=1).gather(1, labels)
    row = next(row for row in content["heads"] if row["heads"] == [[1, 1]])
    assert row["probability"][0] == pytest.approx((before - after).mean().item(), abs=1e-5)
    with Image.open(run / "eval/heads.png") as picture:
        assert picture.width > 300


def test_a_run_without_held_out_images_is_refused(tmp_path):
    run = saved_run(tmp_path / "run", 0)
    with pytest.raises(ValueError, match=r"0 images held out \(data.val_size=0\); 2 are needed"):
        measure_run(str(run), HeadsConfig(device="cpu"))


def test_files_of_others_are_not_replaced(tmp_path):
    run = saved_run(tmp_path / "run", 10)
    (tmp_path / "heads.json").write_text("mine")
    with pytest.raises(ValueError, match=r"heads\.json exists and is not part of heads"):
        measure_run(str(run), HeadsConfig(device="cpu", images=2, out=str(tmp_path)))
    assert (tmp_path / "heads.json").read_text() == "mine"


def test_the_table_lists_the_heads_that_cost_most_and_those_that_can_go():
    effects = [
        Effect(((number // 5, number % 5),), (value, 0.001), (value / 2, 0.002))
        for number, value in enumerate(np.random.default_rng(0).permutation(20) / 100)
    ]
    lines = as_table({"heads": effects, "layers": effects[:3]}).splitlines()[1:]
    falls = [float(line.split()[4]) for line in lines if "head " in line and "between" not in line]
    assert falls == [0.19, 0.18, 0.17, 0.16, 0.15, 0.14, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0]
    assert lines[6] == "8 heads between" and len(lines) == 6 + 1 + 6 + 3
