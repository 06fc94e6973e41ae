"""Results of eval.py: which stay, where others are written, and what is said before the work."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from models import ONE_BLOCK, save_untrained
from small_runs import ROOT, draw_pictures, rows_of, small, tiny
from vit.calibration import Calibration
from vit.commands.train import train
from vit.data.severities import CORRUPTIONS
from vit.data.stream import ImageFiles
from vit.files import write_json
from vit.model_file import SavedModel, save_model
from vit.pretrained.load import load as load_model
from vit.reporting.loading import load_test, results_folder
from vit.reporting.model_card import model_card
from vit.reporting.report import _kept_parts
from vit.run.folder import written_files

KINDS = ("shot_noise", "glass_blur", "fog", "jpeg")  # of each group, to be quick


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and a finished run."""
    base = tmp_path_factory.mktemp("results")
    pictures = draw_pictures(base / "pictures", 80)
    how = {"data": {"val_size": 20}, "train": {"precision": "bfloat16"}, "track": {"probes": 0}}
    train(tiny(base / "run", pictures, **how))
    return base


@pytest.fixture
def base(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run; its pictures stay where they were in training."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_result_of_other_images_or_settings_replaces_one_of_the_run(trained, base, call):
    run, others = base / "run", base / "others"
    shutil.copytree(trained / "pictures", others / "test")  # 80 images, most of the training
    draw_pictures(base / "more/test", 30, seed=1)
    (checkpoint,) = (run / "checkpoints").glob("step_*.pt")
    assert call(run, "maps", "--probes", 2, "--faithfulness", 0).code == 0
    card, before = model_card(load_model(run)), content(run)
    for words in (
        ("report", "--data.root", others),
        ("report", "--data.root", base / "more"),
        ("report", "--flip"),
        ("report", "--views", 6),
        ("maps", "--probes", 2, "--faithfulness", 0, "--data.root", others),
    ):
        ended = call(run, *words)
        assert ended.code == 0
        # Those of `others` are, and a report says so.
        seen = "44 of the 80 test images are training images, too" in ended.error
        assert seen == (words == ("report", "--data.root", others))
    assert call(checkpoint, "report").code == 0
    step = results_folder(load_model(checkpoint), None, top="export")
    assert step.parent == run / "export" and step.name.startswith("with_step_")
    now = content(run)
    assert {path: now[path] for path in before} == before
    reports = {path.parent: json.loads(path.read_text()) for path in run.rglob("report.json")}
    own = reports.pop(run / "eval")
    assert own["source"] == {"data": "folder", "root": str(trained / "pictures"), "own": True}
    found = {(r["n"], r["source"]["root"], r.get("views", 1)) for r in reports.values()}
    here = (own["n"], str(trained / "pictures"))
    assert found == {(80, str(others), 1), (30, str(base / "more"), 1),
                     (*here, 1), (*here, 2), (*here, 6)}  # fmt: skip
    assert len(reports) == 5
    assert model_card(load_model(run)) == card and f", {own['n']} images" in card
    assert {*now} - {*before} <= {*written_files(run)}  # which --overwrite deletes
    # The images of the run by another path are still its own.
    (base / "link").symlink_to(trained / "pictures")
    assert call(run, "report", "--data.root", base / "link").code == 0
    assert {path.parent for path in run.rglob("report.json")} == {run / "eval", *reports}
    # Whoever asks for it gets other results in the folder of the run, which the card leaves out.
    assert call(run, "report", "--data.root", others, "--out", run / "eval").code == 0
    assert "Not measured." in model_card(load_model(run))


def test_maps_decode_only_the_images_that_they_need(base, call, monkeypatch):
    draw_pictures(base / "others/test", 30)
    monkeypatch.setattr("vit.reporting.attention_records.FITTED_PATCHES", 1)
    read, numbers = ImageFiles.read, list[int]()
    monkeypatch.setattr(ImageFiles, "read", lambda self: numbers.append(len(self)) or read(self))
    ended = call(base / "run", "maps", "--indices", 3, "--data.root", base / "others")
    assert ended.code == 0 and 0 < sum(numbers) < 10


def test_parts_of_a_report_stay_until_they_are_measured_again_or_the_model_has_changed(
    base, call, monkeypatch
):
    run, folder = base / "run", base / "run/eval"
    few = {kind: CORRUPTIONS[kind] for kind in KINDS}
    monkeypatch.setattr("vit.reporting.corruptions.CORRUPTIONS", few)
    parts = ("--coverage", "0.8", "--unfamiliar", "noise", "--corruptions", "--seed", "3")
    ended = call(run, "report", *parts)
    assert ended.code == 0 and "\nenergy " in ended.out
    first, drawn = json.loads((folder / "report.json").read_text()), content(folder)
    for name, settings in {
        "sets": {"coverage": 0.8},
        "unfamiliar": {"seed": 3, "images": "noise"},
        "corruptions": {"seed": 3},
    }.items():
        assert settings.items() <= first[name].items()
        date.fromisoformat(first[name]["date"])
    table = (folder / "predictions.csv").read_bytes()
    assert b"set_lac,set_raps" in table
    assert call(run, "report").code == 0
    second = json.loads((folder / "report.json").read_text())
    assert {k: v for k, v in second.items() if k != "images_per_second"} == {
        k: v for k, v in first.items() if k != "images_per_second"
    }
    assert (folder / "predictions.csv").read_bytes() == table
    for name in ("unfamiliar.png", "corruptions.png", "corrupted_images.png"):
        assert (folder / name).read_bytes() == drawn[folder / name]
    assert call(run, "report", "--coverage", "0.7").code == 0
    third = json.loads((folder / "report.json").read_text())
    assert third["sets"]["coverage"] == 0.7 and third["corruptions"] == first["corruptions"]
    # Training goes on: a single weight is another.
    saved = load_model(run, "cpu", "float32")
    with torch.no_grad():
        next(saved.model.parameters()).view(-1)[0].add_(1e-3)
    file = run / "model.safetensors"
    save_model(file, saved, saved.config, saved.step + 1, saved.fingerprint)
    ended = call(run, "report")
    assert ended.code == 0 and "unfamiliar" in ended.error and "dropped" in ended.error
    fourth = json.loads((folder / "report.json").read_text())
    assert not fourth.keys() & {"sets", "unfamiliar", "corruptions"}
    assert b"set_lac" not in (folder / "predictions.csv").read_bytes()
    assert not (folder / "corruptions.png").exists() and not (folder / "unfamiliar.png").exists()
    assert "training" not in fourth
    # With other test images, what training took is still of this model.
    write_json(folder / "report.json", first)
    kept = _kept_parts(folder, "another digest", first["weights"])
    assert kept == {"training": first["training"]}
    assert _kept_parts(folder, "another digest", fourth["weights"]) == {}


@pytest.mark.parametrize(
    "words",
    [("report",), ("maps",), ("photo", "PHOTO"), ("predict", "PHOTO"), ("heads", "--images", "4"),
     ("compare", "RUN"), ("export", "timm")],
    ids=lambda words: words[0],
)  # fmt: skip
def test_a_folder_that_cannot_be_written_is_named_before_the_work(words, trained, call, tmp_path):
    """Not even root can write there, as on a read-only disk."""
    names = {"PHOTO": trained / "pictures/a/0.png", "RUN": tmp_path / "again"}
    shutil.copytree(trained / "run", names["RUN"])
    for place in ("/proc/here", "/sys/kernel"):
        out = f"{place}/table.csv" if words[0] == "predict" else place
        ended = call(trained / "run", *(names.get(word, word) for word in words), "--out", out)
        assert (ended.code, ended.out) == (2, "")
        named = place.removesuffix("/here")
        assert ended.error.startswith(f"error: out: cannot write to {named} (")
        assert ended.error.endswith("; use another --out\n") and ended.error.count("\n") == 1
        if words == ("report",):
            with pytest.raises(ValueError, match=rf"^out: cannot write to {place}/run "):
                train(small(Path(f"{place}/run")))


def test_ctrl_c_keeps_the_rows_so_far_and_an_earlier_table(tmp_path, call):
    photo, out = tmp_path / "in/0000.jpg", tmp_path / "out"
    photo.parent.mkdir()
    Image.effect_noise((1600, 1200), 50).save(photo)
    for number in range(1, 3000):
        (tmp_path / f"in/{number:04}.jpg").hardlink_to(photo)
    table = out / "table.csv"
    words = ["cifar10_quick", "predict", str(photo.parent), "--out", str(table)]

    def interrupt() -> str:
        command = [sys.executable, str(ROOT / "eval.py"), *words, "--batch_size", "4"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            while not [*out.glob(".*.tmp")]:  # the first rows are there
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)[0]
        assert process.returncode == 130
        return said

    said, part = interrupt(), out / "table_part.csv"
    files = [line.partition(",")[0] for line in part.read_text().splitlines()[1:]]
    assert files == [str(photo.with_name(f"{number:04}.jpg")) for number in range(len(files))]
    assert 0 < len(files) < 3000
    assert f"classified {len(files):,} of 3,000 files" in said and f"wrote {part}\n" in said
    assert not table.exists()
    before = part.rename(table).read_bytes()
    said = interrupt()
    assert f"{table} exists and will be replaced when" in said and f"wrote {part}\n" in said
    assert table.read_bytes() == before and part.read_text().startswith("file,class,")
    ended = call("cifar10_quick", "predict", photo, "--out", table)
    assert ended.code == 0 and f"{table} exists and will be replaced" in ended.out
    assert [*out.iterdir()] == [table] and table.read_text().count("\n") == 2


def test_an_error_keeps_the_rows_so_far(tmp_path, call, monkeypatch):
    """Of a worker that was killed."""
    decode, photos = ImageFiles.decode_all, draw_pictures(tmp_path / "in", 40, [""])

    def killed(files: ImageFiles, title: str) -> Any:
        yield next(decode(files, title))
        raise ValueError("data.workers: a process ended with exit code -9")

    monkeypatch.setattr(ImageFiles, "decode_all", killed)
    ended = call("cifar10_quick", "predict", photos, "--out", tmp_path / "all.csv")
    assert ended.code == 2 and "exit code -9" in ended.error
    assert (tmp_path / "all_part.csv").read_text().count("\n") == 33
    assert not (tmp_path / "all.csv").exists() and "classified 32 of 40" in ended.out


def test_maps_that_are_interrupted_leave_the_earlier_ones(trained, call, tmp_path, monkeypatch):
    words = (trained / "run", "maps", "--probes", "2", "--faithfulness", "2", "--out", tmp_path)
    assert call(*words).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "attention").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(SavedModel, "maps", interrupted)
        assert call(*words).code == 130
    assert {path: path.read_bytes() for path in (tmp_path / "attention").iterdir()} == before
    with monkeypatch.context() as patch:
        patch.setattr("vit.commands.maps.attention_records", interrupted)
        assert call(*words).code == 130
    assert call(*words).code == 0


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def test_predictions_and_calibration_are_float32_after_training_in_bfloat16(trained, base, call):
    run, files = base / "run", sorted((trained / "pictures").rglob("*.png"))
    assert load_model(run).config.train.precision == "bfloat16"
    classifier = vit.load(run, "cpu")
    pixels = [torch.from_numpy(np.array(Image.open(file))).movedim(2, 0) for file in files]
    with torch.no_grad():
        logits = classifier.model.float()(classifier.normalize(torch.stack(pixels)))
    own = {path.relative_to(trained / "pictures").as_posix(): n for n, path in enumerate(files)}
    split = rows_of(run / "split.csv")
    held_out = [own[row["file"]] for row in split if row["part"] == "val"]
    labels = torch.tensor(["ab".index(files[number].parent.name) for number in held_out])
    temperature = classifier.calibration.temperature
    energies = Calibration.fit(logits[held_out], labels).energies
    assert classifier.calibration.energies == pytest.approx(energies, abs=1e-6)
    expected = (logits / temperature).softmax(dim=1).max(dim=1).values
    assert json.loads((run / "eval/report.json").read_text())["precision"] == "float32"
    assert call(run, "predict", trained / "pictures").code == 0
    for table, rows in {
        "predictions.csv": [own[row["file"]] for row in split if row["part"] == "test"],
        "photos.csv": [*range(len(files))],
    }.items():
        found = [float(row["probability"]) for row in rows_of(run / "eval" / table)]
        assert sorted(found) == pytest.approx(sorted(expected[rows].tolist()), abs=2e-6)


def test_the_page_of_an_earlier_checkpoint_shows_what_it_attends_to(base, call):
    """Not the images that were logged with the final model."""
    (checkpoint,) = (base / "run/checkpoints").glob("step_*.pt")
    assert call(base / "run", "maps", "--probes", 2, "--faithfulness", 0).code == 0
    shown = []
    for name in (base / "run", checkpoint):
        assert call(name, "export", "html").code == 0
        page = results_folder(load_model(name), None, top="export") / "live.html"
        shown.append({*re.findall(r"details\?run=[^&]*&amp;tag=([^&]+)", page.read_text())})
    assert len(shown[0]) == 2 < len(shown[1])


def test_compare_says_once_which_images_models_were_trained_on(trained, base, call):
    shutil.copytree(trained / "pictures", base / "others/test")
    shutil.copytree(base / "run", base / "again")
    ended = call(base / "run", "compare", base / "again", "--data.root", base / "others")
    assert ended.error.count("44 of the 80 test images are training images, too") == 1


def test_classes_are_found_whatever_the_encoding_of_their_names(tmp_path):
    names = ("é", "b")
    run = save_untrained(tmp_path / "run", ONE_BLOCK, classes=names, data={"name": "folder"})
    draw_pictures(tmp_path / "test", 4, [unicodedata.normalize("NFD", "é"), "b "])
    test = load_test(load_model(run), str(tmp_path))
    assert (test.classes, test.class_counts()) == (names, [2, 2])
