"""Benchmarks start from any folder, with the command in their docstring, and share no images."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vit.data.datasets import ImageSet

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_benchmark_starts(script, tmp_path):
    done = subprocess.run(
        [sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name}")
    assert f"python benchmarks/{script.name}" in script.read_text()


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("timing")


def test_ratios_come_from_the_same_round(timing):
    """The machine is twice as slow in the second round, which affects both alike."""
    first, second = timing.compare({"a": [1.0, 2.0, 1.0], "b": [0.5, 1.0, 0.4]}).values()
    assert first.speed() == "1.00 x  (1.00 to 1.00)"
    assert second.speed() == "2.00 x  (2.00 to 2.50)"
    assert second.speed(scale=0.5) == "1.00 x  (1.00 to 1.25)"
    assert second.cost() == "0.50 x  (0.40 to 0.50)"
    assert second.fraction() == "50.0%  (40.0% to 50.0%)"
    assert second.seconds == 0.5


@pytest.mark.parametrize("text", ["speed", "cost", "fraction"])
def test_there_is_no_verdict_on_a_busy_machine(timing, text):
    """Rounds may differ by half, and no more."""
    calm, busy = (timing.Timing(1.0, 1.2, 1.0, high) for high in (1.5, 1.6))
    assert "no verdict" not in getattr(calm, text)()
    assert getattr(busy, text)() == (
        "no verdict: the machine is busy, rounds differ by 1.6 x; run again"
    )


def test_functions_take_turns_after_a_round_of_warm_up(timing):
    calls = []
    found = timing.take_turns({name: lambda n=name: calls.append(n) for name in "ab"}, rounds=2)
    assert calls == ["a", "b"] * 3
    assert list(found) == ["a", "b"]


def test_images_that_choose_hyperparameters_are_in_no_run_of_the_table(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import finetuning as bench

    labels, classes = torch.arange(50_000) % 10, ("a", "b", "c", "cat", "d", "dog", *"ghij")
    images = ImageSet(torch.empty(50_000, 0), labels, classes)
    table = [bench.drawn(images, 0, bench.POOL, 100, seed) for seed in bench.SEEDS]
    middle = bench.POOL + bench.PER_CLASS
    trained = bench.drawn(images, bench.POOL, middle, 100, seed=0)
    chosen = bench.drawn(images, middle, middle + bench.CHOICE, bench.CHOICE, seed=0)
    assert [len(part) for part in (*table, trained, chosen)] == [200, 200, 200, 200, 2000]
    assert {int(label) for label in labels[chosen]} == {3, 5}  # cat and dog
    parts = [{*torch.cat(table).tolist()}, {*trained.tolist()}, {*chosen.tolist()}]
    assert len(set.union(*parts)) == sum(map(len, parts))
    assert len({tuple(part.tolist()) for part in table}) == 3
