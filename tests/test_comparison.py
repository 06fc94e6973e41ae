"""Comparisons of untrained models: their names, images, and the cells of the table."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from vit.classifier import Classifier, build_model
from vit.data.datasets import load_test_images
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.data.shapes import KINDS
from vit.evaluation import evaluate
from vit.model_file import SavedModel, load_model, save_model
from vit.reporting.comparison import (
    Measured,
    _choose,
    _compare,
    _short_names,
    compare_runs,
)
from vit.reporting.comparison_table import as_markdown, as_text
from vit.reporting.config import CompareConfig
from vit.training.config import from_dict


def untrained(out: Path, seed: int, **data: Any) -> Path:
    """A run folder with a small random model of drawn shapes."""
    config = from_dict(
        {
            "out": str(out),
            "data": {"name": "shapes", **data},
            "model": {"embed_dim": 24, "depth": 1, "patch_size": 8, "zero_init": False},
        }
    )
    preprocess = Preprocess.from_config(config.data)
    torch.manual_seed(seed)
    model = build_model(config.model, preprocess, len(KINDS)).eval()
    torch.nn.init.normal_(model.head.weight)
    classifier = Classifier(model, preprocess, KINDS, torch.device("cpu"), torch.float32)
    out.mkdir()
    save_model(out / "model.safetensors", classifier, config, 1)
    return out


@pytest.mark.slow
def test_each_model_gets_images_of_its_own_size(tmp_path):
    first = untrained(tmp_path / "first", 0)
    other = untrained(tmp_path / "other", 1, image_size=[16, 24])
    options = CompareConfig(others=(str(other),), device="cpu", precision="float32", probes=1)
    compare_runs(str(first), options)
    content = json.loads((first / "eval/compare_other/comparison.json").read_text())
    for run, model in zip((first, other), content["models"], strict=True):
        saved = load_model(run, "cpu", "float32")
        test = load_test_images(saved.config.data)
        assert model["accuracy"] == evaluate(saved.classifier, test)[0]["accuracy"]
    assert test.images.shape[2:] == (16, 24)


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["a", "b"], ["a", "b"]),
        (["a", "a"], ["a_1", "a_2"]),
        (["a", "b", "a"], ["a_1", "b_2", "a_3"]),
        (["a_2", "a", "a"], ["a_2_1", "a_2", "a_3"]),
        (["x" * 30 + "1", "x" * 30 + "2"], ["x" * 20 + "_1", "x" * 20 + "_2"]),
        (["a\nb", "c"], ["a b", "c"]),
    ],
)
def test_names_are_short_and_differ(names, short):
    assert _short_names(names) == short


def test_images_on_which_models_disagree_are_drawn_where_maps_cannot_be_compared(tmp_path):
    saved = load_model(untrained(tmp_path / "run", 0), "cpu")
    labels = torch.arange(40) % 2
    test = ImageSet(torch.zeros(40, 3, 8, 8, dtype=torch.uint8), labels, ("cat", "dog"))
    disagree = [3, 4, 8, 9, 10, 22]

    def guess(saved: SavedModel, others: list[int]) -> Measured:
        guesses = torch.zeros(40, dtype=torch.int64)
        guesses[others] = 1
        return Measured("name", saved, torch.eye(2)[guesses], None, 1.0)

    measured = [guess(saved, []), guess(saved, disagree[:3]), guess(saved, disagree[3:])]
    assert _compare(*measured[:2], test, 8)["only_right"] == [2, 1]  # on 4 and 8; on 3
    assert _choose(measured, test, 8, 0).tolist() == disagree
    chosen = _choose(measured, test, 4, 0)
    assert {*chosen.tolist()} < {*disagree}
    assert sorted(labels[chosen].tolist()) == [0, 0, 1, 1]  # balanced
    assert any(_choose(measured, test, 4, seed).tolist() != chosen.tolist() for seed in range(1, 5))


def described(name: str, **values: Any) -> dict[str, Any]:
    return {
        "name": name,
        "architecture": "timm:resnet18",
        "parameters": 1_234_567,
        "steps": 40,
        "finished": True,
        "epochs": 1,
        "budget_minutes": None,
        "pretrained": None,
        "accuracy": 0.5,
        "accuracy_95": [0.4, 0.6],
        "images_per_second": 1234.5,
        **values,
    }


def test_table_says_how_long_models_were_trained_and_from_what():
    content = {
        "data": "folder",
        "images": 1500,
        "hardware": "CPU with 2 threads, float32",
        "batch_size": 500,
        "models": [
            described("a", balanced_accuracy=0.25),
            described("b|c", balanced_accuracy=0.5, epochs=None, budget_minutes=2.5),
            described("猫", balanced_accuracy=1.0, epochs=3, pretrained="x", finished=False),
        ],
        "pairs": [
            {"first": "a", "other": "b|c", "only_right": [0, 1200], "mcnemar_p": 0.0},
            {
                "first": "a", "other": "猫", "only_right": [2, 3], "mcnemar_p": 0.25,
                "moved_attention": 0.125, "most_moved": [{"index": 7, "moved": 0.5}],
            },
        ],
        "drawn": ["a", "猫"],
    }  # fmt: skip
    text, table = as_text(content), as_markdown(content, None)
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [re.sub(" +", " ", row) for row in rows[2:]] == [
        r"| a | timm:resnet18 | 1,234,567 | 1 epoch | 50.00% (40.00% to 60.00%) | 25.00% | – "
        r"| 1,234 |",
        r"| b\|c | timm:resnet18 | 1,234,567 | 40 steps, budget of 2.5 min "
        r"| 50.00% (40.00% to 60.00%) | 50.00% | < 1e-300 | 1,234 |",
        r"| 猫 | timm:resnet18 | 1,234,567 | 3 epochs, pretrained, unfinished: step 40 "
        r"| 50.00% (40.00% to 60.00%) | 100.00% | 0.25 | 1,234 |",
    ]
    assert len({row.index("timm") + row.count("猫") for row in rows[2:]}) == 1  # aligned
    for words in (text, table):
        assert (
            "only a is right on 0 images, only b|c on 1,200; McNemar's exact test: p < 1e-3"
            in words
        )
        assert "p = 0.25; the difference is not significant at the 5% level; 12.5% of" in words
        assert "most on images 7" in words
    assert "comparison.png" not in table and "not corrected for the number" in table
