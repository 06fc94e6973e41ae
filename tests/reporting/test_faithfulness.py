"""The benchmark of maps and fillings: its scores and its tables."""

import json
from pathlib import Path

import pytest

from benchmarks.maps import faithfulness as bench
from models import save_untrained
from vit.commands.config import MapsConfig
from vit.commands.maps import run as draw_maps
from vit.pretrained.load import load as load_model


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
