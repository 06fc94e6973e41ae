"""Benchmarks: sanity checks of maps, fillings, ratios and tables; each starts as it says."""

import copy
import importlib
import json
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from benchmarks import tables, timing
from benchmarks.maps import faithfulness, sanity, watermark
from benchmarks.maps.filling import FILLINGS, blurred, derangement, impute, make_filling
from benchmarks.maps.randomization import cascade, rank_correlation, stages
from benchmarks.scale import speedrun
from models import PLAIN, draw, randomize, save_untrained
from vit.commands.config import MapsConfig
from vit.commands.maps import run as draw_maps
from vit.data.shapes import draw_shapes
from vit.model.vit import VisionTransformer
from vit.pretrained.load import load as load_model
from vit.seeding import fold_in


def test_rank_correlation_is_that_of_scipy():
    maps, others = draw(20, 4, 6).round(decimals=1).float(), draw(20, 4, 6, seed=1).float()  # ties
    pairs = zip(maps.flatten(1), others.flatten(1), strict=True)
    expected = [spearmanr(*pair).statistic for pair in pairs]
    torch.testing.assert_close(rank_correlation(maps, others), torch.tensor(expected))
    assert rank_correlation(torch.ones(1, 2, 2), torch.rand(1, 2, 2)).item() == 0


def test_a_cascade_replaces_one_stage_after_the_other():
    sizes = {"img_size": 32, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
    parts = {"stem": "conv", "reg_tokens": 1, "mlp_conv": True}
    vit = randomize(VisionTransformer(**(PLAIN | sizes | parts)), 0.3)
    before = copy.deepcopy(vit.state_dict())
    weights = {name: torch.rand_like(values.float()) for name, values in before.items()}
    groups = stages(vit)
    assert list(groups) == ["head", "block 1", "block 0", "stem"]
    assert sorted(name for names in groups.values() for name in names) == sorted(before)
    assert "head.weight" in groups["head"] and "pos_embed" in groups["stem"]
    done: set[str] = set()
    for stage, changed in cascade(vit, weights):
        done |= {*groups[stage]}
        for name, values in changed.state_dict().items():
            assert torch.equal(values, (weights if name in done else before)[name].to(values)), name
    assert done == {*before}
    assert all(torch.equal(values, before[name]) for name, values in vit.state_dict().items())


def test_nothing_but_the_mark_tells_the_marked_class():
    images = watermark.draw_set(1100, "train")
    plain, kinds, _ = draw_shapes(1100, fold_in(0, "watermark", "train"))
    differs = (images.pixels() != plain).any(dim=1)
    marked = images.labels == watermark.CLASSES.index(watermark.MARKED)
    assert torch.equal(differs.any(dim=(1, 2)), marked)
    assert torch.equal(images.labels[~marked], kinds[~marked])
    assert marked.sum() == 100
    corners = torch.zeros(32, 32, dtype=torch.bool)
    corners[:4, :4] = corners[:4, 28:] = corners[28:, :4] = corners[28:, 28:] = True
    assert not differs[:, ~corners].any()
    assert (differs[marked].sum(dim=0)[corners] > 10).all()  # 25 on average
    plain, marked = watermark.draw_pairs(50, "pairs")
    assert marked.masks.sum(dim=(1, 2)).tolist() == [16] * 50
    assert not ((plain.pixels() != marked.pixels()).any(dim=1) & ~marked.masks).any()


def test_the_benchmark_of_a_tiny_model(monkeypatch, tmp_path, capsys):
    model = {"embed_dim": 12, "depth": 1, "num_heads": 2, "stem": "linear"}
    saved = save_untrained(tmp_path, model) / "model.safetensors"
    monkeypatch.setattr(sys, "argv", ["sanity.py", str(saved), *TINY.split()])
    sanity.main()
    out = capsys.readouterr().out
    assert [title for title in TABLES if title not in out] == []
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| layer-wise")]
    assert [len(row) for row in rows] == [*[6] * 6, *[5] * 3, *[3] * 2]
    assert rows[9][1:] == ["1.00 ± 0.00", "0.00 ± 0.00 |"]  # shifted inputs
    rollout = next(line for line in out.splitlines() if line.startswith("| attention rollout"))
    assert rollout.startswith("| attention rollout | 1.00 ± 0.00 |")  # without the trained head


TINY = "--images 10 --draws 1 --few 50 --epochs 1 --kinds lrp rollout"
TABLES = ("weights replaced by those of an untrained model, 1 draws", "shuffled", "test accuracy")


SIZE = (10, 14)


def draw_images(count: int, size: tuple[int, int] = SIZE) -> Tensor:
    return draw(count, 3, *size, dtype=torch.float32)


def draw_hidden(fractions: list[float], size: tuple[int, int] = SIZE, seed: int = 1) -> Tensor:
    """Hide a fraction of the pixels of each image, (B, 1, H, W)."""
    chances = torch.rand(len(fractions), 1, *size, generator=torch.Generator().manual_seed(seed))
    return chances < torch.tensor(fractions)[:, None, None, None]


def solve_by_numpy(image: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Solve ROAD's linear system for one channel (H, W), with the weights of arXiv 2202.00449."""
    rows, columns = image.shape
    unknown = {(int(r), int(c)): n for n, (r, c) in enumerate(np.argwhere(hidden))}
    matrix, right = np.zeros((len(unknown), len(unknown))), np.zeros(len(unknown))
    for (row, column), n in unknown.items():
        for down, across in np.ndindex(3, 3):
            place = row + down - 1, column + across - 1
            if place == (row, column) or not (0 <= place[0] < rows and 0 <= place[1] < columns):
                continue
            weight = 1 / 6 if down == 1 or across == 1 else 1 / 12
            matrix[n, n] += weight
            if place in unknown:
                matrix[n, unknown[place]] -= weight
            else:
                right[n] += weight * image[place]
    filled = image.copy()
    filled[hidden] = np.linalg.solve(matrix, right)
    return filled


@pytest.mark.parametrize("size", [SIZE, (9, 5)])
def test_imputation_solves_the_published_system(size):
    images, hidden = draw_images(4, size), draw_hidden([0.05, 0.5, 0.95, 0.0], size)
    hidden[3, :, : size[0] // 2] = True  # half the image, with three of its borders
    found = impute(images.double(), hidden, tolerance=1e-12)
    for b in range(4):
        expected = solve_by_numpy(images[b, 1].double().numpy(), hidden[b, 0].numpy())
        torch.testing.assert_close(found[b, 1], torch.from_numpy(expected), rtol=0, atol=1e-9)
    torch.testing.assert_close(impute(images, hidden), found.float(), rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", FILLINGS)
def test_a_filling_changes_hidden_pixels_only(name):
    images, hidden = draw_images(6), draw_hidden([0.1, 0.3, 0.5, 0.7, 0.9, 0.9])
    before = images.clone()
    fill = make_filling(name, images, seed=3)
    found = fill(images, hidden)
    everywhere = hidden.expand_as(images)
    assert found.shape == images.shape and found.dtype == torch.float32
    assert torch.equal(images, before)
    assert torch.equal(found[~everywhere], images[~everywhere])
    assert (found[everywhere] != images[everywhere]).all()
    assert torch.equal(make_filling(name, images, seed=3)(images, hidden), found)
    assert torch.equal(fill(images, hidden & False), images)


def test_hidden_pixels_show_another_image_at_the_same_place():
    images = draw_images(5, (4, 6))
    found = make_filling("other", images, seed=0)(images, torch.ones(5, 1, 4, 6).bool())
    assert torch.equal(found, images[derangement(5, seed=0)])
    for seed in range(5):
        other = derangement(101, seed)
        assert sorted(other.tolist()) == list(range(101)) and (other != torch.arange(101)).all()


def test_blur_by_hand():
    # An eighth of each side: 1 pixel down, 2 across.
    image = torch.zeros(1, 1, 8, 16)
    image[0, 0, 4, 8] = 1
    found = blurred(image)[0, 0]
    assert found.sum().item() == pytest.approx(1, abs=0.01)  # the borders are mirrored
    assert (found[5, 8] / found[4, 8]).item() == pytest.approx(math.exp(-1 / 2), abs=1e-4)
    assert (found[4, 10] / found[4, 8]).item() == pytest.approx(math.exp(-1 / 2), abs=1e-4)


FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = [
    f"benchmarks.{path.parent.name}.{path.stem}"
    for path in sorted(FOLDER.glob("*/*.py"))
    if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_benchmark_starts(name, monkeypatch, capsys):
    script = importlib.import_module(name)
    assert f"\n    python -m {name}" in script.__doc__
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


def test_ratios_come_from_the_same_round():
    """The machine is twice as slow in the second round, which affects both alike."""
    first, second = timing.compare({"a": [1.0, 2.0, 1.0], "b": [0.5, 1.0, 0.4]}).values()
    assert first.speed() == "1.00 x  (1.00 to 1.00)"
    assert second.speed() == "2.00 x  (2.00 to 2.50)"
    assert second.speed(scale=0.5) == "1.00 x  (1.00 to 1.25)"
    assert second.cost() == "0.50 x  (0.40 to 0.50)"
    assert second.fraction() == "50.0%  (40.0% to 50.0%)"
    assert second.seconds == 0.5
    busy = timing.Timing(1.0, 1.2, 1.0, high=1.6)  # rounds may differ by half, and no more
    assert busy.cost() == "no verdict: the machine is busy, rounds differ by 1.6 x; run again"


def test_functions_take_turns_after_a_round_of_warm_up():
    calls: list[str] = []
    works = {name: partial(calls.append, name) for name in "ab"}
    assert list(timing.take_turns(works, rounds=2)) == ["a", "b"] and calls == ["a", "b"] * 3


def test_the_table_of_records_is_that_of_their_files():
    paths = sorted(speedrun.RECORDS.glob("*.json"))
    assert paths
    page = (speedrun.REPOSITORY / "docs/speedrun.md").read_text()
    assert page.endswith(f"\n{speedrun.table(paths)}\n")


def test_tables_by_hand():
    assert tables.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    assert tables.plus_minus(1.5, 0.25, "+.2f") == "+1.50 ± 0.25"
    assert tables.spread([3.0, 1.0, 2.0]) == "2.00 (1.00 to 3.00)"
    # Student's t with two degrees of freedom: 4.3027.
    found = tables.mean_of_runs([0.1, 0.2, 0.3])
    assert found == pytest.approx((0.2, 4.3027 * 0.1 / 3**0.5), abs=1e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with a small random model of scikit-learn's digits."""
    model = {"embed_dim": 24, "depth": 1, "patch_size": 4, "zero_init": False}
    out, data = tmp_path_factory.mktemp("run"), {"name": "digits"}
    return save_untrained(out, model, classes=tuple("0123456789"), data=data)


def test_scores_with_mean_filling_are_those_of_eval(run, tmp_path, capsys):
    saved, kinds = load_model(run), ["rollout", "lrp_pixels", "occlusion"]
    draw_maps(str(run), MapsConfig(kinds=kinds, probes=1, faithfulness=12, out=str(tmp_path)))
    table = json.loads((tmp_path / "attention/faithfulness.json").read_text())["maps"]
    words = ["--images", "12", "--fillings", "mean", "other", "--kinds", *kinds]
    faithfulness.main([str(run), *words])
    text = capsys.readouterr().out
    mean, half = table["lrp_pixels"]["over_centred"]
    row = text[text.index("| layer-wise relevance of pixels") :].split("\n")[0]
    assert row.endswith(f"| {mean:.3f} ± {half:.3f} |") and "12 digits test images" in text
    assert text.count("| occlusion |") == 3 and f"### {run}, another image" in text
    measured = json.loads(json.dumps(faithfulness.measure(saved, kinds, ["mean", "other"], 12, 0)))
    assert measured["mean"] == table and measured["other"] != table


def test_ranks_by_hand():
    scores = {"lrp": 0.2, "random": 0.5, "rollout": 0.1, "centred": 0.15}
    table = {
        kind: {"lerf_morf": (mean, 0.0), "over_centred": (mean - 0.15, 0.0)}
        for kind, mean in scores.items()
    }
    del table["centred"]["over_centred"]
    found = faithfulness.ranks_of(table)
    assert found == {"lrp": "1 (+0.050)", "centred": "2", "rollout": "3 (-0.050)"}
