"""The benchmark of maps and fillings: its scores, its files and its tables."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from vit.classifier import Classifier, build_model
from vit.data.preprocess import Preprocess
from vit.data.sampling import balanced_subset
from vit.explain.faithfulness import score_maps
from vit.explain.filling import make_filling
from vit.explain.references import rise
from vit.model_file import load_model, save_model
from vit.reporting.loading import load_test
from vit.reporting.map_faithfulness import measure_maps
from vit.seeding import generator
from vit.training.config import from_dict

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import map_faithfulness as bench
import map_tables


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
    """Results of a few cheap kinds and of RISE, measured one after the other into one file."""
    out = tmp_path_factory.mktemp("results") / "results.json"
    common = [str(run), "--images", "12", "--fillings", "mean", "other", "--out", str(out)]
    bench.main([*common, "--kinds", "rollout", "lrp", "lrp_pixels", "occlusion"])
    first = json.loads(out.read_text())
    bench.main([*common, "--kinds", "lrp", "rise", "--masks", "4", "2"])
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


def test_rise_with_more_masks_includes_the_masks_before(run, measured):
    classifier, images = chosen_images(run)
    inputs = classifier.normalize(images.pixels())
    target = classifier.logits(images.pixels()).argmax(dim=1)
    fill = make_filling("other", inputs)
    for number in (2, 4):
        found = rise(classifier.forward, inputs, (2, 2), target, number, generator(0, "rise"))
        expected = score_maps(classifier.forward, inputs, {"rise": found}, target, fill=fill)
        scores = measured["last"]["runs"][str(run)]["fillings"]["other"][f"rise_{number}"]
        assert scores["deletion"] == pytest.approx(expected["rise"]["deletion"].tolist(), abs=2e-6)


def test_a_second_call_measures_only_what_is_missing(run, measured):
    first, last = (measured[name]["runs"][str(run)] for name in ("first", "last"))
    assert {*last["passes"]} - {*first["passes"]} == {"rise_2", "rise_4"}
    assert {kind: last["passes"][kind] for kind in first["passes"]} == first["passes"]
    for filling, kinds in first["fillings"].items():
        assert {kind: last["fillings"][filling][kind] for kind in kinds} == kinds
        assert {*last["fillings"][filling]} - {*kinds} == {"rise_2", "rise_4"}
    before = measured["path"].read_text()
    bench.main([str(run), "--images", "12", "--fillings", "mean", "--kinds", "lrp", "--out",
                str(measured["path"])])  # fmt: skip
    assert measured["path"].read_text() == before


def test_an_interrupted_measurement_keeps_the_kinds_before(run, measured, tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    arguments = [str(run), "--images", "12", "--fillings", "mean", "other", "--out", str(out),
                 "--kinds", "rise", "rollout", "lrp", "lrp_pixels", "occlusion",
                 "--masks", "2", "4"]  # fmt: skip

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench, "rise_maps", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bench.main(arguments)
    scores = json.loads(out.read_text())["runs"][str(run)]["fillings"]
    assert scores == measured["first"]["runs"][str(run)]["fillings"]
    bench.main(["--add", str(out)])
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
    message = (
        f"{changed}: its scores of {run} are those of another model file; give another --out, or "
        "leave the file out of --add"
    )
    for arguments in (
        [str(run), "--images", "12", "--kinds", "lrp", "--out", str(changed)],
        [str(run), "--images", "12", "--kinds", "lrp", "--add", str(changed)],
        ["--add", str(measured["path"]), str(changed)],
    ):
        with pytest.raises(ValueError) as error:
            bench.main(arguments)
        assert str(error.value) == message
    assert json.loads(changed.read_text()) == content


def test_results_without_a_digest_get_it(run, measured, tmp_path):
    content = json.loads(json.dumps(measured["last"]))
    entry = content["runs"].pop(str(run))
    del entry["digest"]
    content["runs"][f"{run}/"] = entry
    out = tmp_path / "old.json"
    out.write_text(json.dumps(content))
    bench.main([str(run), "--images", "12", "--fillings", "mean", "--kinds", "lrp", "--out",
                str(out)])  # fmt: skip
    assert json.loads(out.read_text()) == measured["last"]


def test_a_run_named_twice_is_measured_once(run, tmp_path, capsys):
    bench.main([str(run), f"{run}/", "--images", "12", "--fillings", "mean", "--kinds", "lrp"])
    text = capsys.readouterr().out
    assert text.count("12 digits test images") == 1
    assert "mean ± 95% interval over 2 runs" not in text
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    with pytest.raises(ValueError) as error:
        bench.main([str(run), str(copy), "--images", "12"])
    assert str(error.value) == f"{copy}: the same model as {run}; give only one of them"


SCORES = {"deletion": [0.1, 0.2], "insertion": [0.5, 0.4]}


@pytest.mark.parametrize(
    "content",
    [
        "no JSON",
        [],
        {"images": 12, "seed": 0},
        {"images": 12, "seed": 0, "runs": []},
        {"images": 12, "seed": 0, "runs": {"x": {}}},
        {"images": 12, "seed": 0, "runs": {"x": {"fillings": {}, "passes": {}}}},
        {"images": 12, "seed": 0, "runs": {"x": {"fillings": {"mean": []}, "passes": {}}}},
        {"images": 12, "seed": 0,
         "runs": {"x": {"fillings": {"mean": {"lrp": SCORES}}, "passes": {}}}},
        {"images": 12, "seed": 0,
         "runs": {"x": {"fillings": {"mean": {"centred": 1}}, "passes": {}}}},
    ],
)  # fmt: skip
def test_other_files_are_refused(content, run, tmp_path):
    path = tmp_path / "other.json"
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text)
    for arguments in ([str(run), "--images", "12", "--out", str(path)], ["--add", str(path)]):
        with pytest.raises(ValueError) as error:
            bench.main(arguments)
        assert str(error.value) == f"{path}: not a file that --out wrote"
    assert path.read_text() == text


def test_tables_of_files(run, measured, tmp_path, capsys):
    parts = []
    for name, kinds in (("a", ["rollout", "lrp"]), ("b", ["rise_2", "rise_4"])):
        content = json.loads(json.dumps(measured["last"]))
        for found in content["runs"][str(run)]["fillings"].values():
            for kind in [*found]:
                if kind not in (*kinds, "random", "centred"):
                    del found[kind]
        (tmp_path / name).write_text(json.dumps(content))
        parts.append(str(tmp_path / name))
    capsys.readouterr()
    bench.main(["--add", *parts])
    text = capsys.readouterr().out
    assert "12 test images" in text
    assert "| attention rollout |" in text and "| RISE, 4 masks |" in text
    assert "| masks of RISE |" in text and "layer-wise relevance / RISE" in text
    assert "| layer-wise relevance of pixels |" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a RUN to measure, or --add files whose tables to print"),
        (["x", "--images", "1"], "--images: 1 is not allowed; it must be at least 2"),
        (["x", "--masks", "4", "5"], "--masks: 5 is not allowed; it must be an even number from 2"),
        (["x", "--out", "no/such.json"], "--out: folder not found: no"),
        (["--add", "nothing.json"], "nothing.json: not a file that --out wrote"),
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


def test_intervals_by_hand():
    # Student's t with two degrees of freedom: 4.3027.
    mean, half = map_tables.interval_over_runs([0.1, 0.2, 0.3])
    assert (mean, half) == pytest.approx((0.2, 4.3027 * 0.1 / 3**0.5), abs=1e-5)
    below = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)
    assert map_tables.ratio_interval(2 * below, below) == pytest.approx((2, 0))
    # 1,000 images, as measured by drawing them anew.
    draws = torch.Generator().manual_seed(0)
    above, below = 0.2 + 0.1 * torch.randn(2, 1000, generator=draws, dtype=torch.float64)
    picks = torch.randint(1000, (2000, 1000), generator=draws)
    ratios = above[picks].mean(dim=1) / below[picks].mean(dim=1)
    ratio, half = map_tables.ratio_interval(above, below)
    assert half == pytest.approx(1.96 * ratios.std().item(), rel=0.1)
    assert ratio == pytest.approx(ratios.mean().item(), abs=half / 10)


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
        made_scores(lrp=0.1, rollout=0.2, centred=0.0, rise_4=0.3, rise_2=0.1),
        made_scores(lrp=0.3, rollout=0.2, centred=0.0, rise_4=0.4, rise_2=0.1),
    ]
    lines = map_tables.table_over_runs(runs).splitlines()
    # 12.706 times the deviation 0.1414 by the root of 2.
    assert lines[3] == (
        "| layer-wise relevance | 0.100 ± 1.271 | 0.500 ± 1.271 | 0.200 ± 1.271 | 0.200 ± 1.271 "
        "| 3, 2 |"
    )
    assert lines[4].startswith("| RISE, 2 masks |") and lines[4].endswith("| – |")
    assert lines[5].startswith("| RISE, 4 masks |") and lines[5].endswith("| 1, 1 |")
    assert lines[6].startswith("| centred Gaussian | 0.300 ± 0.000 |")
    assert lines[6].endswith("| – | 4, 4 |")


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
