"""Comparison of groups of runs over seeds, with SciPy as reference."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import scipy.stats
import torch

from models import save_untrained
from vit.data import shapes
from vit.data.datasets import load_test_images
from vit.evaluation import evaluate
from vit.intervals import student
from vit.model_file import BUNDLED
from vit.pretrained.load import load as load_model
from vit.reporting.loading import load_test

SAME = ("--device", "cpu", "--precision", "float32")
TESTS = {
    "paired t-test over seeds": scipy.stats.ttest_rel,
    "Welch's t-test": partial(scipy.stats.ttest_ind, equal_var=False),
}


def test_t_tests_are_those_of_scipy():
    """For few and many runs, and p-values from below 1e-12 to 1; without variation, none."""
    random = np.random.default_rng(0)
    smallest = 1.0
    for sizes in ((2, 2), (3, 3), (2, 9), (5, 40), (300, 300)):
        for shift in (0.0, 0.01, 0.3):
            first = 0.5 + shift + random.normal(size=sizes[0]) * 0.02
            second = 0.5 + random.normal(size=sizes[1]) * 0.005
            for name, test in TESTS.items():
                samples = [torch.from_numpy(first), torch.from_numpy(second)]
                if name.startswith("paired"):
                    if sizes[0] != sizes[1]:
                        continue
                    samples = [samples[0] - samples[1]]
                mean, p_value = student("x", *samples)
                expected = test(first, second)
                assert mean["x"] == pytest.approx(first.mean() - second.mean())
                assert mean["x_95"] == pytest.approx([*expected.confidence_interval()], rel=1e-5)
                assert p_value == pytest.approx(expected.pvalue, rel=1e-3, abs=0)
                smallest = min(smallest, p_value)
    assert smallest < 1e-12
    for alike in ([0.1, 0.1, 0.1], [0.3]):
        sample = torch.tensor(alike, dtype=torch.float64)
        assert student("x", sample) == ({"x": pytest.approx(alike[0]), "x_95": None}, None)


def test_an_included_model_is_compared_on_its_eight_images(tmp_path, monkeypatch, call):
    (tmp_path / "run").mkdir()
    shutil.copy(BUNDLED / "cifar10_quick.safetensors", tmp_path / "run/model.safetensors")
    monkeypatch.chdir(tmp_path)  # without data/
    loaded = Mock(wraps=load_test)
    monkeypatch.setattr("vit.commands.compare.load_test", loaded)
    assert call("cifar10", "compare", "run", "--out", "out").code == 0
    assert loaded.call_count == 1  # for both models
    (result,) = (tmp_path / "out").rglob("comparison.json")
    assert json.loads(result.read_text())["images"] == 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained runs of two models with several seeds, and some that differ in more."""
    folder = tmp_path_factory.mktemp("runs")
    for name, depth in (("cls", 2), ("avg", 1)):
        for seed in range(3):
            write(folder / f"{name}_{seed}", seed, depth)
    write(folder / "cls_long", 3, 2, optim={"lr": 0.01})
    save_untrained(folder / "other", {"depth": 1}, data={"name": "cifar10"})
    save_untrained(folder / "fewer", {"depth": 1}, classes=shapes.KINDS[:-1])
    return folder


def write(out: Path, seed: int, depth: int, **groups: dict[str, Any]) -> None:
    model = {"embed_dim": 48, "depth": depth, "num_heads": 2, "patch_size": 8}
    # With other weights, some guess alike.
    save_untrained(out, model, seed=seed + 3 - depth, train={"seed": seed}, **groups)


@pytest.fixture
def compared(call: Any, runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Compare, `a b -- c d` in short; return what is printed, the Markdown and the JSON."""
    monkeypatch.setattr(shapes, "TEST", 400)
    out = tmp_path / "out"

    def compare(words: str) -> Any:
        first, *names = words.replace("--", "--against").split()
        given = [name if name.startswith("--") else runs / name for name in names]
        before = {*out.glob("*")}
        ended = call(runs / first, "compare", *given, "--out", out, *SAME)
        if ended.code:
            return ended
        (folder,) = {*out.glob("*")} - before
        content = json.loads((folder / "comparison.json").read_text())
        return ended, (folder / "comparison.md").read_text(), content

    return compare


def accuracies(runs: Path, names: list[str]) -> list[float]:
    """Accuracy of each run by itself."""
    found = []
    for name in names:
        saved = load_model(runs / name, "cpu", "float32")
        found.append(evaluate(saved, load_test_images(saved.config.data))[0]["accuracy"])
    return found


@pytest.mark.parametrize(
    ("words", "test"),
    [
        ("cls_2 cls_0 cls_1 -- avg_0 avg_1 avg_2", "paired t-test over seeds"),
        ("cls_0 cls_1 cls_2 -- avg_0 avg_1", "Welch's t-test"),
        ("cls_0 cls_1 -- avg_1 avg_2", "Welch's t-test"),
    ],
)
def test_groups_are_tested_as_scipy_does(compared, runs, words, test):
    """The order of runs does not matter for pairs; other seeds make other tests."""
    ended, text, content = compared(words)
    groups = [sorted(part.split()) for part in words.split("--")]
    first, second = (accuracies(runs, names) for names in groups)
    assert min(np.std(first), np.std(second)) > 0
    measured, difference = (content["over_runs"][key] for key in ("groups", "difference"))
    for group, names, values in zip(measured, groups, (first, second), strict=True):
        assert group["runs"] == names
        assert group["accuracy"] == pytest.approx(np.mean(values))
        interval = scipy.stats.t.interval(
            0.95, len(values) - 1, np.mean(values), scipy.stats.sem(values)
        )
        assert group["accuracy_95"] == pytest.approx(interval, rel=1e-5)
    expected = TESTS[test](first, second)
    assert difference["accuracy"] == pytest.approx(np.mean(first) - np.mean(second))
    assert difference["accuracy_95"] == pytest.approx([*expected.confidence_interval()], rel=1e-4)
    assert difference["p"] == pytest.approx(expected.pvalue, rel=1e-4)
    assert difference["test"] == test
    assert content["over_runs"]["notes"] == []
    assert f"{test}: p = {expected.pvalue:.2g}" in text and text in ended.out


def test_a_group_of_one_run_and_runs_that_differ_are_pointed_out(compared):
    _, text, content = compared("cls_0 cls_1 cls_long -- avg_0")
    first, second = content["over_runs"]["groups"]
    difference = content["over_runs"]["difference"]
    assert first["accuracy_95"] and second["accuracy_95"] is difference["accuracy_95"] is None
    assert difference["p"] is None
    assert "no test: one run" in text
    assert "cls_long/model.safetensors differs from " in text
    (line,) = content["over_runs"]["notes"]  # of no other run, and of nothing else
    assert line.endswith("in more than the seed: optim.lr: 0.002 to 0.01")
    # The same runs divided in another way have a folder of their own.
    compared("cls_0 cls_1 -- cls_long avg_0")


def test_what_cannot_be_compared_is_refused_in_one_line(compared, runs, tmp_path):
    for words, part in (
        ("cls_0 cls_1 -- avg_0 cls_0/model.safetensors", "cls_0/model.safetensors is given twice"),
        (f"cls_0 cls_1 -- avg_0 ../{runs.name}/avg_0", "avg_0/model.safetensors is given twice"),
        ("cls_0 cls_1 -- avg_0 other", "was trained on cifar10, not on shapes"),
        ("cls_0 cls_1 -- avg_0 fewer", "must have the same classes"),
    ):
        ended = compared(words)
        assert ended.code == 2 and ended.error.count("\n") == 1 and part in ended.error, ended
        assert not (tmp_path / "out").exists()
