"""Benchmarks start from any folder, with the command in their docstring, and share no images."""

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
