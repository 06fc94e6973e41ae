"""Which file is which: names of images in tables, JSON files and records, and from Python."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

import vit
from small_runs import rows_of, small
from vit.commands.config import MapsConfig
from vit.commands.maps import run as explain_run
from vit.commands.train import train
from vit.console import printable
from vit.tensorboard_plugin.encoding import FRAMES_TAG, decode_details

CLASSES, PARTS = ("cat", "dog", "owl"), ("train", "val", "test")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve training and six test pictures of each class, half of them in deeper folders.

    Others cannot be read, or have names that are not UTF-8.
    """
    root = tmp_path_factory.mktemp("pictures")
    for number in range(54):
        part, deeper = ("train", "test")[number % 9 > 5], ("", 'b, "ä"')[number // 3 % 2]
        path = root / part / CLASSES[number % 3] / deeper / f"{97 * number % 54}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    for folder in (root / "train/cat", root / "test/cat"):
        min(folder.glob("*.png")).rename(folder / "\udce4.png")  # not UTF-8
        (folder / "bad.png").touch()
    return root


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 20 of the pictures."""
    run = tmp_path_factory.mktemp("run") / "run"
    data = {"name": "folder", "root": str(pictures), "val_size": 6, "train_size": 20}
    parts = {"data": {**data, "on_bad_image": "skip"}, "track": {"probes": 1}}
    train(small(run, **parts, train={"epochs": 1, "batch_size": 7, "accumulate": 1}))
    return run


def in_json(row: dict[str, str]) -> dict[str, str]:
    """Return a row of a table as JSON has it, which takes no name that is not UTF-8."""
    return {key: value.encode(errors="replace").decode() for key, value in row.items()}


def test_a_run_says_what_became_of_each_file(run, pictures):
    split, predictions = rows_of(run / "split.csv"), rows_of(run / "eval/predictions.csv")
    files = {
        part: {str(path.relative_to(pictures)) for path in (pictures / part).rglob("*.png")}
        for part in ("train", "test")
    }
    found = {part: [row["file"] for row in split if row["part"] == part] for part in PARTS}
    # One of six to be held out is bad.png.
    assert [len(found[part]) for part in PARTS] == [20, 5, len(files["test"])]
    assert set(found["train"] + found["val"]) < files["train"] - {"train/cat/bad.png"}
    assert len({row["file"] for row in split}) == len(split) and set(found["test"]) == files["test"]
    assert all(Path(row["file"]).parts[1] == row["label"] for row in split)

    readable = sorted(files["test"] - {"test/cat/bad.png"})
    assert sorted(row["file"] for row in predictions) == readable
    expected = vit.load(run, "cpu", "float32").predict([pictures / r["file"] for r in predictions])
    for index, (row, shares) in enumerate(zip(predictions, expected, strict=True)):
        assert row["index"] == str(index) and row["label"] == Path(row["file"]).parts[1]
        assert (row["prediction"], row["probability"]) == (row["class_1"], row["probability_1"])
        found = {row[f"class_{n}"]: float(row[f"probability_{n}"]) for n in (1, 2, 3)}
        assert found == pytest.approx(shares, rel=1e-5)

    mistakes = json.loads((run / "eval/report.json").read_text())["mistakes"]
    wrong = [row for row in predictions if row["prediction"] != row["label"]]
    wrong.sort(key=lambda row: -float(row["probability"]))
    assert mistakes and len(mistakes) == min(16, len(wrong))
    for mistake, row in zip(mistakes, map(in_json, wrong), strict=False):
        assert mistake.pop("probability") == pytest.approx(float(row["probability"]), rel=1e-5)
        assert str(mistake.pop("index")) == row["index"]
        assert mistake == {key: row[key] for key in ("file", "label", "prediction")}


def test_maps_and_records_name_their_files(run, pictures):
    table, names = rows_of(run / "eval/predictions.csv"), {}
    odd = next(index for index, row in enumerate(table) if "\udce4" in row["file"])
    options = MapsConfig(indices=(9, odd), faithfulness=0, kinds=("rollout",))
    for _ in range(2):  # the second time, it replaces what it has written
        explain_run(str(run), options)
    entries = json.loads((run / "eval/attention/index.json").read_text())["images"]
    assert [(entry["index"], entry["file"]) for entry in entries] == [
        (index, in_json(table[index])["file"]) for index in options.indices
    ]
    for folder in (run, run / "eval/attention"):
        events = EventAccumulator(str(folder), tensor_size_guidance={"attention": 0}).Reload()
        for tag in events.PluginTagToContent("attention"):
            if tag.count("/") == 1 and tag != FRAMES_TAG:
                content = events.Tensors(tag)[-1].tensor_proto.string_val[0]
                names[tag] = decode_details(content).name
    held_out = [row["file"] for row in rows_of(run / "split.csv") if row["part"] == "val"]
    assert names.pop("attention/probe_00") in [printable(name) for name in held_out]
    assert names == {
        f"attention/image_{index:05d}": printable(table[index]["file"]) for index in options.indices
    }
