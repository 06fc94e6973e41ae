"""Faithfulness of maps, compared with a loop and by hand, and its benchmark."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.maps import faithfulness as bench
from models import save_untrained
from vit.commands.config import MapsConfig
from vit.commands.maps import run as draw_maps
from vit.pretrained.load import load as load_model
from vit.reporting.faithfulness import baselines, faithfulness, hiding_curves, pointing_game

GRID, PATCH = (2, 3), (4, 5)  # not square on purpose: pictures of 8 x 15 pixels
IMPORTANCE = [[0.5, 3.0, -1.0], [2.0, 0.0, 1.0]]  # of the patches to the toy's class 1


def classify(images: Tensor) -> Tensor:
    """Return three logits; that of class 1 is a weighted sum of the brightness of patches."""
    bright = images.mean(1).unflatten(2, (GRID[1], -1)).unflatten(1, (GRID[0], -1))
    logit = (bright.mean((2, 4)) * torch.tensor(IMPORTANCE)).sum((1, 2))
    return torch.stack([torch.zeros_like(logit), logit, torch.ones_like(logit)], dim=1)


def curves_by_loop(images, maps, target, levels):
    """Hide patches of one image at a time: (K, B) for the most and the least important first."""
    curves = np.zeros((2, len(levels), len(images)))
    for (k, level), (b, image) in itertools.product(enumerate(levels), enumerate(images)):
        places = np.argsort(
            -maps[b].flatten().numpy(), kind="stable"
        )  # of equals the earlier first
        for curve, order in zip(curves, (places, places[::-1]), strict=True):
            hidden = image.clone()
            patches = hidden.unflatten(2, (GRID[1], -1)).unflatten(1, (GRID[0], -1))  # views
            for place in order[: round(level * len(places))]:
                patches[:, place // GRID[1], :, place % GRID[1]] = 0
            curve[k, b] = classify(hidden[None])[0].softmax(dim=0)[target[b]].item()
    return curves


@settings(max_examples=20)
@given(st.integers(0, 1000), st.lists(st.floats(0, 1), min_size=1, max_size=4))
def test_curves_are_those_of_a_loop(seed, levels):
    torch.manual_seed(seed)
    images = 0.5 + torch.rand(3, 3, GRID[0] * PATCH[0], GRID[1] * PATCH[1])
    maps, target = torch.randint(4, (3, *GRID)).float(), torch.tensor([0, 1, 2])
    found = hiding_curves(classify, images, maps, target, levels)
    expected = curves_by_loop(images, maps, target, levels)
    for curve, by_loop in zip(found, expected, strict=True):
        assert curve.shape == (len(levels), 3) and curve.dtype == torch.float32
        np.testing.assert_allclose(curve.numpy(), by_loop, rtol=0, atol=1e-5)


def test_faithfulness_by_hand():
    # Two levels of three images.
    morf = torch.tensor([[0.5, 1.0, 0.2], [0.25, 0.0, 0.4]])
    lerf = torch.tensor([[1.0, 0.0, 0.4], [0.75, 0.0, 0.2]])
    found = {name: values.tolist() for name, values in faithfulness(morf, lerf).items()}
    assert found == {
        "deletion": pytest.approx([0.375, 0.5, 0.3]),
        "insertion": pytest.approx([0.875, 0.0, 0.3]),
        "lerf_morf": pytest.approx([0.25, -0.25, 0.0]),
    }


def test_baselines_by_hand():
    found = baselines(2, (2, 3), 0)
    assert found["random"].shape == (2, 2, 3) and found["random"].std() > 0.1
    # Of two rows each lies one quarter of the side from the middle, of three columns 4/3 of one.
    low, side = math.exp(-0.5), math.exp(-0.5 * (4 / 3) ** 2)
    row = torch.tensor([low * side, low, low * side])
    torch.testing.assert_close(found["centred"], row.expand(2, 2, 3))


def test_pointing_game_by_hand():
    rows = "###.#.", "##.#..", "....##", "..#..#"
    mask = torch.tensor([[[pixel == "#" for pixel in row] for row in rows]])
    for one_map, expected in (
        ([[0.9, 0.1, 0.2], [0.3, 0.0, 0.8]], 1),  # all of the patch
        ([[0.1, 0.9, 0.2], [0.3, 0.0, 0.8]], 1),  # exactly half of it
        ([[0.1, 0.2, 0.9], [0.3, 0.0, 0.8]], 0),  # a quarter of it
        ([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]], 1 / 2),
    ):
        assert pointing_game(torch.tensor([one_map]), mask).item() == pytest.approx(expected)


# The benchmark.


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
    bench.main([str(run), "--images", "12", "--fillings", "mean", "other", "--kinds", *kinds])
    text = capsys.readouterr().out
    mean, half = table["lrp_pixels"]["over_centred"]
    row = text[text.index("| layer-wise relevance of pixels") :].split("\n")[0]
    assert row.endswith(f"| {mean:.3f} ± {half:.3f} |") and "12 digits test images" in text
    assert text.count("| occlusion |") == 3 and f"### {run}, another image" in text
    measured = json.loads(json.dumps(bench.measure(saved, kinds, ["mean", "other"], 12, 0)))
    assert measured["mean"] == table and measured["other"] != table


def test_ranks_by_hand():
    scores = {"lrp": 0.2, "random": 0.5, "rollout": 0.1, "centred": 0.15}
    table = {
        kind: {"lerf_morf": (mean, 0.0), "over_centred": (mean - 0.15, 0.0)}
        for kind, mean in scores.items()
    }
    del table["centred"]["over_centred"]
    assert bench.ranks_of(table) == {"lrp": "1 (+0.050)", "centred": "2", "rollout": "3 (-0.050)"}
