"""The report: its mistakes and its folder; comparisons of untrained models."""

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor

from models import grey_classifier, save_untrained
from vit.classifier import Classifier
from vit.commands.compare import as_text, differences, name_architectures
from vit.commands.compare import run as compare_runs
from vit.commands.config import CompareConfig
from vit.data import shapes
from vit.data.datasets import load_test_images
from vit.data.images import ImageSet
from vit.evaluation import evaluate
from vit.explain.canvas import BAR
from vit.explain.lrp import propagate
from vit.files import write_json
from vit.model.config import ModelConfig
from vit.pretrained.load import load as load_model
from vit.reporting.report import (
    contrast,
    draw_gallery,
    require_own_report,
    worst_mistakes,
    write_report,
)


def test_worst_mistakes_are_wrong_and_the_surest_first():
    logits = torch.tensor([[9.0, 0.0], [0.0, 1.0], [0.0, 5.0], [3.0, 0.0], [0.0, 2.0]])
    labels = torch.tensor([0, 0, 0, 1, 1])  # the first and the last are right
    assert worst_mistakes(logits, labels, 2).tolist() == [2, 3]
    assert worst_mistakes(logits, labels, 10).tolist() == [2, 3, 1]
    assert worst_mistakes(logits, logits.argmax(dim=1), 10).tolist() == []


@pytest.fixture(scope="module")
def mistakes() -> tuple[Classifier, ImageSet]:
    """A classifier of grey images that are not square, and images it classifies."""
    classifier = grey_classifier()
    for parameter in classifier.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    images = torch.randint(256, (3, 1, 16, 24), dtype=torch.uint8)
    return classifier, ImageSet(images, torch.tensor([0, 1, 2]), classifier.classes)


def test_relevance_for_predicted_and_true_class_has_one_unit(mistakes):
    """So their difference is the relevance of the difference of the two logits."""
    classifier, images = mistakes
    inputs = classifier.normalize(images.pixels())
    logits = classifier.forward(inputs)
    maps = contrast(classifier, images.pixels(), logits.argmax(dim=1), images.labels)
    assert maps.shape == (3, 2, 16, 24)
    _, single = classifier.maps(images.pixels(), ["lrp_pixels"])
    torch.testing.assert_close(maps[:, 0], single["lrp_pixels"])
    right = logits.argmax(dim=1) == images.labels
    assert 0 < right.sum() < 3 and torch.equal(maps[right, 0], maps[right, 1])

    def difference(x: Tensor) -> Tensor:
        found = classifier.model(x)
        return (found.max(dim=1).values - found[torch.arange(3), images.labels])[:, None]

    expected = propagate(difference, inputs)[1].sum(dim=1)[~right]
    found = (maps[:, 0] - maps[:, 1])[~right]
    units = expected.norm(dim=(1, 2), keepdim=True) / found.norm(dim=(1, 2), keepdim=True)
    torch.testing.assert_close(units * found, expected, rtol=1e-3, atol=1e-4)


def test_gallery_shows_both_classes_and_leaves_out_maps_that_do_not_exist(mistakes, monkeypatch):
    classifier, images = mistakes
    logits = classifier.logits(images.pixels())
    with_maps = draw_gallery(classifier, images, logits)
    assert with_maps.shape == (192, 3 * 360 + 12 + BAR, 3)
    swapped = draw_gallery(classifier, replace(images, labels=images.labels.flip(0)), logits)
    changed = np.argwhere((swapped != with_maps).any(-1))
    assert changed[:, 1].min() < 124  # the caption of the first image and its last map
    first = changed[changed[:, 1] < 360]
    assert first[:, 1].max() > 248 and not ((first[:, 1] >= 130) & (first[:, 1] < 248)).any()
    monkeypatch.setattr(Classifier, "has_maps", False)
    assert draw_gallery(classifier, images, logits).shape == (177, 3 * 124 + 12, 3)


def test_a_folder_with_a_part_of_a_report_takes_the_next_one(mistakes, tmp_path, monkeypatch):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("vit.reporting.report.picture_tag", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(*mistakes, tmp_path, step=1)
    assert any(tmp_path.glob("events.out.tfevents.*"))
    require_own_report(tmp_path)  # raises nothing


@torch.no_grad()
def test_a_report_of_images_that_changed_in_their_files_keeps_no_part(mistakes, tmp_path):
    classifier, images = copy.deepcopy(mistakes[0]), replace(mistakes[1], fingerprint="of names")
    changed = replace(images, images=torch.zeros_like(images.images))
    both = torch.cat([images.images, changed.images])
    # So that the predictions differ.
    classifier.model.get_classifier().bias -= classifier.logits(both).mean(dim=0)
    result = write_report(classifier, images, tmp_path, 1)
    write_json(tmp_path / "report.json", result | {"corruptions": {"mean": 0.5}})
    assert "corruptions" in write_report(classifier, images, tmp_path, 1)
    assert "corruptions" not in write_report(classifier, changed, tmp_path, 1)


# Comparisons.


SMALL = {"embed_dim": 24, "depth": 1, "patch_size": 8}
MEAN = {"global_pool": "avg"}


@torch.no_grad()
def rolled(classifier: Classifier, test: ImageSet, prefix: int) -> np.ndarray:
    """Rollout through the only layer by its formula: prefix tokens together, then patches."""
    _, (layer,), _ = classifier.model.forward_intermediates(classifier.normalize(test.pixels()))
    weights = layer.double().mean(dim=1).numpy()
    through = (weights + np.eye(weights.shape[-1])) / 2
    rows = through[:, 0] if prefix else through.mean(axis=1)
    return np.concatenate([rows[:, :prefix].sum(axis=1)[:, None], rows[:, prefix:]], axis=1)


def test_numbers_are_those_of_separate_evaluations(tmp_path, monkeypatch, capsys):
    """Each model gets images of its size; models of one name are numbered."""
    monkeypatch.setattr(shapes, "TEST", 100)
    first = save_untrained(tmp_path / "a/run", {**SMALL, "reg_tokens": 2})
    others = [
        save_untrained(tmp_path / "b/run", {**SMALL, "class_token": False} | MEAN, seed=5),
        save_untrained(tmp_path / "c", SMALL, data={"image_size": [16, 24]}, seed=6),
    ]
    same = {"device": "cpu", "precision": "float32"}
    compare_runs(str(first), CompareConfig(others=tuple(map(str, others)), batch_size=30, **same))
    (folder,) = (first / "eval").glob("compare_run_2_c_3_*")
    content = json.loads((folder / "comparison.json").read_text())
    assert [model["name"] for model in content["models"]] == ["run_1", "run_2", "c_3"]
    right, maps = [], []
    for run, model in zip((first, *others), content["models"], strict=True):
        classifier = load_model(run, **same)
        test = load_test_images(load_model(run).config.data)
        result, logits = evaluate(classifier, test)
        for key in ("accuracy", "balanced_accuracy"):
            assert model[key] == pytest.approx(result[key])
        right.append(logits.argmax(dim=1) == test.labels)
        maps.append(rolled(classifier, test, prefix=(3, 0, 1)[len(maps)]))
    _, one, two = content["models"]
    for pair, hits in zip((one, two), right[1:], strict=True):
        only = [int((right[0] & ~hits).sum()), int((hits & ~right[0]).sum())]
        assert pair["only_right"] == only and min(only) > 0 and (right[0] & hits).any()
        assert pair["mcnemar_p"] == pytest.approx(binomtest(only[0], sum(only)).pvalue)
    moved = torch.from_numpy(abs(maps[0] - maps[1]).sum(axis=1) / 2)
    assert one["moved_attention"] == pytest.approx(moved.mean().item(), rel=1e-4)
    assert 0 < two["moved_attention"] < 1  # of grids of different sizes
    most = moved.topk(8)
    assert [entry["index"] for entry in one["most_moved"]] == most.indices.tolist()
    assert [e["moved"] for e in one["most_moved"]] == pytest.approx(most.values.tolist(), rel=1e-4)
    assert (folder / "comparison.md").read_text() in capsys.readouterr().out


def test_each_comparison_has_a_folder_that_only_it_writes_again(tmp_path, monkeypatch):
    """Whatever the models are called, and wherever the results go."""
    monkeypatch.setattr(shapes, "TEST", 8)
    long = "experiment_with_a_long_name" * 3
    runs = [save_untrained(tmp_path / name, SMALL) for name in ("a", "b", f"{long}1", f"{long}2")]
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(runs[1], tmp_path / "elsewhere" / "b")
    out = tmp_path / "out"

    def compare(*names: str) -> set[Path]:
        first, *others = (str(tmp_path / name) for name in names)
        compare_runs(first, CompareConfig(others=tuple(others), out=str(out)))
        return set(out.iterdir())

    found: set[Path] = set()
    different = [("a", "b"), ("b", "a"), ("a", "elsewhere/b"), ("a", "b", f"{long}1"),
                 ("a", f"{long}1"), ("a", f"{long}2"), (f"{long}1", "b")]  # fmt: skip
    for count, names in enumerate(different, start=1):
        found = compare(*names)
        assert len(found) == count
    before = {folder: (folder / "comparison.json").read_bytes() for folder in found}
    assert compare("a", "elsewhere/../b") == found
    changed = [f for f in found if (f / "comparison.json").read_bytes() != before[f]]
    (folder,) = changed  # its speed is another
    for mine in ("comparison.json", "comparison.md"):
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / mine).write_text("mine")
        with pytest.raises(ValueError, match="exists and is not part of a comparison; move it"):
            compare("a", "b")
        assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(mine, "mine")]


def test_architectures_are_named_with_all_that_differs():
    """Keys and values from the configs; timm models differ in their arguments."""
    base = {"depth": 4, "embed_dim": 64, "patch_size": 4}
    timm = [{"name": "timm:resnet18", "timm_args": args} for args in (None, {"stem_width": 32})]
    own = [{}, {"num_heads": 4}, {"attention": "talking_heads", "mlp_ratio": 2.0}]
    models = [ModelConfig(**one) for one in [*({**base, **changes} for changes in own), *timm]]
    vit = "vit, patch_size=4, embed_dim=64, depth=4"
    assert name_architectures(models) == [
        f"{vit}, num_heads=3, mlp_ratio=4.0, attention=dot",
        f"{vit}, num_heads=4, mlp_ratio=4.0, attention=dot",
        f"{vit}, num_heads=3, mlp_ratio=2.0, attention=talking_heads",
        "timm:resnet18, timm_args=None", "timm:resnet18, timm_args={'stem_width': 32}",
    ]  # fmt: skip
    assert name_architectures(models[:1]) == [f"{vit}, attention=dot"]


def test_attention_that_moves_altogether_is_all_and_never_more():
    """Between any grids, and to other tokens; on grids that fit, the sum over common patches."""
    labels = torch.zeros(3, dtype=torch.long)
    test = ImageSet(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), labels, ("one",))
    right = torch.ones(3, dtype=torch.bool)

    def moved(one: Tensor, other: Tensor) -> list[float]:
        entries = differences(right, one, right, other, test)["most_moved"]
        return [e["moved"] for e in sorted(entries, key=lambda entry: entry["index"])]

    def corner(rows: int, columns: int, row: int = 0) -> Tensor:
        maps = torch.zeros(3, rows, columns)
        maps[0, row, row], maps[1, row, row] = 1, 0.25  # the third is of other tokens alone
        return maps

    for size in ((4, 4), (3, 5), (7, 2), (1, 1)):
        apart = moved(corner(4, 4), corner(*size, row=-1))
        assert apart == pytest.approx([1, 0.25, 0] if size != (1, 1) else [15 / 16, 15 / 64, 0])
        nothing = moved(corner(*size), torch.zeros(3, 4, 4))
        assert nothing == pytest.approx([1, 0.25, 0]), "all of it moved to other tokens"
        assert moved(corner(*size), corner(*size)) == [0, 0, 0]
    coarse, fine = (torch.rand(3, side, side) / side**2 for side in (2, 6))
    spread = coarse.repeat_interleave(3, dim=1).repeat_interleave(3, dim=2) / 9
    there = [torch.cat([1 - m.sum(dim=(1, 2))[:, None], m.flatten(1)], 1) for m in (spread, fine)]
    expected = (there[0] - there[1]).relu().sum(dim=1)  # what is there, and not elsewhere
    assert moved(coarse, fine) == pytest.approx(expected.tolist())


def test_table_says_what_was_compared():
    common = {"architecture": "timm:resnet18", "parameters": 1_234_567, "steps": 4_000,
              "finished": True, "accuracy": 0.5, "accuracy_95": [0.4, 0.6],
              "balanced_accuracy": 1.0, "images_per_second": 1234.5}  # fmt: skip
    differs = {"only_right": [1, 1200], "mcnemar_p": 0.25, "moved_attention": 0.125}
    models = [{**common, "name": "a|b"}, {**common, "name": "猫", "finished": False, **differs}]
    text = as_text({"data": "folder", "images": 1500, "hardware": "CPU", "models": models})
    rows = [line for line in text.splitlines() if line.startswith("|")]
    shared = "timm:resnet18 | 1,234,567 | 4,000"
    measured = "| 50.00% (40.00% to 60.00%) | 100.00% | 1,234 |"
    assert [re.sub(" +", " ", row) for row in rows[2:]] == [
        f"| a&#124;b | {shared} {measured} – | – | – |",
        f"| 猫 | {shared} (unfinished) {measured} 1,200 : 1 | 0.25 | 12.5% |",
    ]
    assert len({row.index("timm") + row.count("猫") for row in rows[2:]}) == 1  # aligned
