"""The benchmark of maps and fillings: its scores, its files and its tables."""

import hashlib
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


def test_a_second_call_measures_only_what_is_missing(run, measured):
    first, last = (measured[name]["runs"][str(run)] for name in ("first", "last"))
    assert {*last["passes"]} - {*first["passes"]} == {"occlusion"}
    assert {kind: last["passes"][kind] for kind in first["passes"]} == first["passes"]
    for filling, kinds in first["fillings"].items():
        assert {kind: last["fillings"][filling][kind] for kind in kinds} == kinds
        assert {*last["fillings"][filling]} - {*kinds} == {"occlusion"}
    before = measured["path"].read_text()
    bench.main([str(run), "--images", "12", "--fillings", "mean", "--kinds", "lrp", "--out",
                str(measured["path"])])  # fmt: skip
    assert measured["path"].read_text() == before


def test_an_interrupted_measurement_keeps_the_kinds_before(run, measured, tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    arguments = [str(run), "--images", "12", "--fillings", "mean", "other", "--out", str(out),
                 "--kinds", "rollout", "lrp", "lrp_pixels", "occlusion"]  # fmt: skip

    def interrupt(classifier, pixels, kinds, *others):
        if kinds == ["occlusion"]:
            raise KeyboardInterrupt
        return maps(classifier, pixels, kinds, *others)

    maps = Classifier.maps
    with monkeypatch.context() as patch:
        patch.setattr(Classifier, "maps", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.main(arguments)
    scores = json.loads(out.read_text())["runs"][str(run)]["fillings"]
    assert scores == measured["first"]["runs"][str(run)]["fillings"]
    bench.main(["--out", str(out)])
    bench.main(arguments)
    scores = json.loads(out.read_text())["runs"][str(run)]["fillings"]
    assert scores == measured["last"]["runs"][str(run)]["fillings"]


def test_scores_of_a_model_that_has_changed_are_refused(run, measured, tmp_path):
    digest = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    assert measured["last"]["runs"][str(run)]["digest"] == digest
    content = json.loads(json.dumps(measured["last"]))
    content["runs"][str(run)]["digest"] = "0" * 64
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        bench.main([str(run), "--images", "12", "--kinds", "lrp", "--out", str(changed)])
    assert str(error.value) == (
        f"--out: its scores of {run} are those of another model; use another file"
    )
    assert json.loads(changed.read_text()) == content


def test_a_run_named_twice_is_measured_once(run, capsys):
    bench.main([str(run), f"{run}/", "--images", "12", "--fillings", "mean", "--kinds", "lrp"])
    text = capsys.readouterr().out
    assert text.count("12 digits test images") == 1
    assert "mean ± 95% interval over 2 runs" not in text


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        [],
        {"images": 12, "seed": 0},
    ],
)  # fmt: skip
def test_other_files_are_refused(content, run, tmp_path):
    path = tmp_path / "other.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text)
    for arguments in ([str(run), "--images", "12", "--out", str(path)], ["--out", str(path)]):
        with pytest.raises(ValueError) as error:
            bench.main(arguments)
        assert str(error.value) == f"{path}: not a file that --out wrote"
    assert path.read_text() == text


def test_tables_of_a_file(measured, capsys):
    bench.main(["--out", str(measured["path"])])
    text = capsys.readouterr().out
    assert "12 test images" in text
    assert "| attention rollout |" in text and "| occlusion |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a RUN to measure, or the --out whose tables to print"),
        (["x", "--images", "1"], "--images: 1 is not allowed; it must be at least 2"),
        (["x", "--out", "no/such.json"], "--out: folder not found: no"),
        (["--out", "nothing.json"], "nothing.json: not a file that --out wrote"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as error:
        bench.main(arguments)
    assert str(error.value) == message


def test_results_of_other_images_are_not_mixed(measured, run):
    with pytest.raises(ValueError, match=r"has --images 12 --seed 0, not --images 13 --seed 0"):
        bench.main([str(run), "--images", "13", "--out", str(measured["path"])])


# The tables.


def made_scores(**means: float) -> map_tables.Scores:
    """Scores of four images, whose (LeRF - MoRF) / 2 is spread by 0.01 around each mean."""
    spread = torch.tensor([-0.01, 0.01, 0.01, -0.01], dtype=torch.float64)
    return map_tables.with_differences(
        {
            kind: {
                "deletion": (0.3 - mean - spread).tolist(),
                "insertion": (0.3 + mean + spread).tolist(),
            }
            for kind, mean in means.items()
        }
    )


def test_scores_of_images_by_hand():
    kinds = {
        "lrp": {"deletion": [0.1, 0.2], "insertion": [0.5, 0.3]},
        "centred": {"deletion": [0.1, 0.4], "insertion": [0.2, 0.6]},
    }
    scores = map_tables.with_differences(kinds)
    assert scores["lrp"]["lerf_morf"].tolist() == pytest.approx([0.2, 0.05])
    assert scores["lrp"]["over_centred"].tolist() == pytest.approx([0.15, -0.05])
    assert "over_centred" not in scores["centred"]


def test_ranks_and_agreement_by_hand():
    fillings = {
        "mean": made_scores(lrp=0.2, rollout=0.1, raw=0.05, random=0.0, centred=0.15),
        "blur": made_scores(raw=0.2, rollout=0.15, lrp=0.1, random=0.5, centred=0.12),
        "linear": made_scores(lrp=0.3, rollout=0.1, raw=0.05, random=0.0, centred=0.05001),
    }
    text = "\n".join(map_tables.comparison(fillings))
    assert "| layer-wise relevance | 1 (+0.050) | 4 (-0.020) | 1 (+0.250) |" in text
    assert "| centred Gaussian | 2 | 3 | 3 |" in text
    # Of six pairs, the blur reverses all, and linear imputation one.
    assert "| mean colour | 1.00 | -1.00 | 0.67 |" in text
    assert "| blurred image | -1.00 | 1.00 | -0.67 |" in text
    assert "random" not in text


def test_maps_that_change_places_are_named():
    fillings = {
        "mean": made_scores(lrp=0.2, rollout=0.1, raw=0.101, centred=0.3),
        "blur": made_scores(lrp=0.1, rollout=0.2, raw=0.3, centred=0.4),
    }
    found = list(map_tables.reversals(fillings, ["lrp", "rollout", "raw", "centred"]))
    assert found == [
        "layer-wise relevance is above attention rollout with mean colour (0.100 ± 0.000), and "
        "below it with blurred image (0.100 ± 0.000)",
        "layer-wise relevance is above last layer's attention with mean colour (0.099 ± 0.000), "
        "and below it with blurred image (0.200 ± 0.000)",
    ]
    assert list(map_tables.reversals({"mean": fillings["mean"]}, ["lrp", "rollout"])) == []
    noisy = made_scores(lrp=0.2, rollout=0.201, centred=0.0)
    noisy["rollout"]["lerf_morf"] += torch.tensor([0.1, 0.1, -0.1, -0.1])  # not significant
    fillings["blur"] = noisy
    assert list(map_tables.reversals(fillings, ["lrp", "rollout"])) == []


def test_means_over_runs():
    runs = [
        made_scores(lrp=0.1, rollout=0.2, centred=0.0, occlusion=0.3),
        made_scores(lrp=0.3, rollout=0.2, centred=0.0, occlusion=0.4),
    ]
    lines = map_tables.table_over_runs(runs).splitlines()
    # 12.706 times the deviation 0.1414 by the root of 2.
    assert lines[3] == (
        "| layer-wise relevance | 0.100 ± 1.271 | 0.500 ± 1.271 | 0.200 ± 1.271 | 0.200 ± 1.271 "
        "| 3, 2 |"
    )
    assert lines[4].startswith("| occlusion |") and lines[4].endswith("| 1, 1 |")
    assert lines[5].startswith("| centred Gaussian | 0.300 ± 0.000 |")
    assert lines[5].endswith("| – | 4, 4 |")


def test_tables_of_several_runs():
    kinds = {
        kind: {"deletion": [0.1, 0.2], "insertion": [0.5, 0.4]}
        for kind in ("lrp", "random", "centred")
    }
    entry = {"fillings": {"mean": kinds, "blur": kinds}, "passes": {"lrp": 3.14159}}
    text = map_tables.tables({"images": 2, "seed": 0, "runs": {"a": entry, "b": entry}})
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [
        "## a, 2 test images, mean ± 95% interval over them",
        "### a, mean colour", "### a, blurred image", "### a, by filling",
        "## b, 2 test images, mean ± 95% interval over them",
        "### b, mean colour", "### b, blurred image", "### b, by filling",
        "## mean ± 95% interval over 2 runs",
        "### mean colour", "### blurred image",
    ]  # fmt: skip
    assert "| layer-wise relevance | 0.150 ± 0.098 | 0.450 ± 0.098 |" in text
    assert "| 3.1 |" in text and "No two maps change places." in text
