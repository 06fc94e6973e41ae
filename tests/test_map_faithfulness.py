"""The benchmark of maps and fillings: its scores, its files and its tables."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.maps import faithfulness as bench
from benchmarks.maps import faithfulness_tables as map_tables
from vit.classifier import Classifier, build_model
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset
from vit.model_file import load_model, save_model
from vit.reporting.loading import load_test
from vit.reporting.map_faithfulness import measure_maps
from vit.training.config import from_dict


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder with a small random model of scikit-learn's digits."""
    out = tmp_path_factory.mktemp("run")
    model = {"embed_dim": 24, "depth": 1, "patch_size": 4, "zero_init": False}
    config = from_dict({"out": str(out), "data": {"name": "digits"}, "model": model})
    preprocess = Preprocess.from_config(config.data)
    torch.manual_seed(0)
    built = build_model(config.model, preprocess, 10).eval()
    torch.nn.init.normal_(built.head.weight)
    classes = tuple("0123456789")
    classifier = Classifier(built, preprocess, classes, torch.device("cpu"), torch.float32)
    save_model(out / "model.safetensors", classifier, config, 1)
    return out


@pytest.fixture(scope="module")
def measured(run, tmp_path_factory) -> dict:
    """Results of a few cheap kinds and of occlusion, measured one after the other into one file."""
    out = tmp_path_factory.mktemp("results") / "results.json"
    common = [str(run), "--images", "12", "--fillings", "mean", "other", "--out", str(out)]
    bench.main([*common, "--kinds", "rollout", "lrp", "lrp_pixels"])
    first = json.loads(out.read_text())
    bench.main([*common, "--kinds", "lrp", "occlusion"])
    return {"first": first, "last": json.loads(out.read_text()), "path": out}


def chosen_images(run: Path):
    saved = load_model(run)
    test = load_test(saved)
    chosen = balanced_subset(test.labels, 12, 0, "eval.faithfulness")
    return saved.classifier, test.select(chosen)


def test_scores_with_mean_filling_are_those_of_eval(run, measured):
    classifier, images = chosen_images(run)
    kinds = ["rollout", "lrp", "lrp_pixels", "occlusion"]
    table = measure_maps(classifier, images, kinds, 500, 0)
    scores = map_tables.with_differences(measured["last"]["runs"][str(run)]["fillings"]["mean"])
    for kind in [*kinds, "random", "centred"]:
        for metric in ("deletion", "insertion", "lerf_morf"):
            found = map_tables.mean_interval(scores[kind][metric])
            assert found == pytest.approx(table[kind][metric], abs=2e-6), (kind, metric)
    found = map_tables.mean_interval(scores["lrp"]["over_centred"])
    assert found == pytest.approx(table["lrp"]["over_centred"], abs=2e-6)


def test_a_second_call_measures_only_what_is_missing(measured, capsys):
    (first,), (last,) = (measured[name]["runs"].values() for name in ("first", "last"))
    assert {*last["passes"]} - {*first["passes"]} == {"occlusion"}
    assert {kind: last["passes"][kind] for kind in first["passes"]} == first["passes"]
    for filling, kinds in first["fillings"].items():
        assert {kind: last["fillings"][filling][kind] for kind in kinds} == kinds
        assert {*last["fillings"][filling]} - {*kinds} == {"occlusion"}
    bench.main(["--out", str(measured["path"])])
    text = capsys.readouterr().out
    assert "12 test images" in text and "| occlusion |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a RUN to measure, or the --out whose tables to print"),
        (["x", "--images", "1"], "--images: 1 is not allowed; it must be at least 2"),
        (["x", "--out", "no/such.json"], "--out: folder not found: no"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        bench.main(arguments)
