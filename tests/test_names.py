"""Which file is which: names of images in tables, JSON files and records, and from Python."""

import csv
import dataclasses
import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

import vit
from vit.console import printable
from vit.data.config import DataConfig
from vit.data.datasets import load, open_images
from vit.data.preprocess import Preprocess
from vit.data.sampling import held_out
from vit.reporting.attention import explain_run
from vit.reporting.config import MapsConfig
from vit.reporting.report import _require_own_report
from vit.tensorboard_plugin.encoding import decode_details
from vit.tensorboard_plugin.records import FRAMES_TAG
from vit.training.config import from_dict
from vit.training.train import train

CLASSES, PARTS = ("cat", "dog", "owl"), ("train", "val", "test")


def make_pictures(root: Path) -> Path:
    """Make twelve training and six test pictures of each class, half of them in deeper folders."""
    for number in range(54):
        part, deeper = ("train", "test")[number % 9 > 5], ("", 'b, "ä"')[number // 3 % 2]
        path = root / part / CLASSES[number % 3] / deeper / f"{97 * number % 54}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(256, size=(16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return root


def rearrange(pictures: Path, layout: str) -> DataConfig:
    """Describe the pictures in a table, or pack them into tar files."""
    files = [path.relative_to(pictures) for path in sorted(pictures.rglob("*.png"))]
    if layout == "table":
        with (pictures / "labels.csv").open("w", encoding="utf-8") as table:
            csv.writer(table).writerows([["path", "label"], *((f, f.parts[1]) for f in files)])
        return DataConfig(name="table", root=str(pictures / "labels.csv"))
    if layout != "shards":
        root = pictures if layout == "parts" else pictures / "train"
        return DataConfig(name="folder", root=str(root))
    for number, file in enumerate(files):
        with tarfile.open(pictures / file.parts[0] / f"{number % 2}.tar", "a") as tar:
            tar.add(pictures / file, f"{number}.png")
            label = tarfile.TarInfo(f"{number}.cls")
            label.size = 1
            tar.addfile(label, io.BytesIO(str(CLASSES.index(file.parts[1])).encode()))
    return DataConfig(name="shards", root=str(pictures))


def read(path: Path) -> torch.Tensor:
    """Read the image in a file, or in a tar file as if that were a folder."""
    if path.parent.suffix == ".tar":
        with tarfile.open(path.parent) as tar:
            content = tar.extractfile(path.name)
            assert content is not None
            return torch.from_numpy(np.array(Image.open(content))).movedim(-1, 0)
    return torch.from_numpy(np.array(Image.open(path))).movedim(-1, 0)


@pytest.mark.parametrize("layout", ["parts", "split", "table", "shards"])
def test_names_are_the_files_of_the_images_in_every_selection(tmp_path: Path, layout: str) -> None:
    data = rearrange(make_pictures(tmp_path), layout)
    folder = Path(data.root).parent if layout == "table" else Path(data.root)
    for train_part in (True, False):
        images = open_images(data, train_part).resized(Preprocess((16, 16), (0.5,) * 3, (0.5,) * 3))
        parts = [
            images,
            images.in_memory(),
            *images.divide(held_out(images.labels, images.classes, 0.2, 0)),
        ]
        for part in [*parts, parts[1].select(torch.tensor([4, 1, 4]))]:
            for index, pixels in enumerate(part.pixels()):
                assert not Path(part.name(index)).is_absolute()
                assert torch.equal(read(folder / part.name(index)), pixels)
            assert part.entry(1) == {"index": 1, "file": part.name(1)}


def test_images_without_files_are_called_by_their_indices() -> None:
    images = load("shapes", "", train=False, count=10)
    chosen = images.select(torch.tensor([7, 2, 5])).select(torch.tensor([2, 0]))
    assert [chosen.name(0), chosen.name(1), images.name(3)] == ["no. 5", "no. 7", "no. 3"]
    assert images.entry(3) == {"index": 3}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and files that cannot be read or have names that are not UTF-8."""
    pictures = make_pictures(tmp_path_factory.mktemp("pictures"))
    for folder in (pictures / "train/cat", pictures / "test/cat"):
        min(folder.glob("*.png")).rename(folder / "\udce4.png")  # not UTF-8
        (folder / "bad.png").touch()
    return pictures


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on 20 of the pictures."""
    run = tmp_path_factory.mktemp("run") / "run"
    config = {
        "out": str(run),
        "data": {
            "name": "folder", "root": str(pictures), "val_size": 6, "train_size": 20,
            "on_bad_image": "skip",
        },
        "model": {"embed_dim": 12, "depth": 1, "patch_size": 8},
        "train": {"epochs": 1, "batch_size": 7, "device": "cpu", "precision": "float32"},
        "track": {"probes": 1, "live_mb": 0},
    }  # fmt: skip
    train(from_dict(config))
    return run


def test_a_run_says_what_became_of_each_file(run: Path, pictures: Path) -> None:
    classifier = vit.load(run, "cpu", "float32")
    split, predictions = classifier.split(), classifier.predictions()
    files = {
        part: {str(path.relative_to(pictures)) for path in (pictures / part).rglob("*.png")}
        for part in ("train", "test")
    }
    found = {part: [row["file"] for row in split if row["part"] == part] for part in PARTS}
    assert [len(found[part]) for part in PARTS] == [20, 6, len(files["test"])]
    assert set(found["train"] + found["val"]) < files["train"] - {"train/cat/bad.png"}
    assert len({row["file"] for row in split}) == len(split) and set(found["test"]) == files["test"]
    assert all(Path(row["file"]).parts[1] == row["label"] for row in split)

    readable = sorted(files["test"] - {"test/cat/bad.png"})
    assert sorted(row["file"] for row in predictions) == readable
    for index, row in enumerate(predictions):
        expected = classifier.predict(pictures / row["file"])
        assert row["index"] == index and row["label"] == Path(row["file"]).parts[1]
        assert (row["prediction"], row["probability"]) == (row["class_1"], row["probability_1"])
        assert [row[f"class_{n}"] for n in (1, 2, 3)] == list(expected)
        shares = [row[f"probability_{n}"] for n in (1, 2, 3)]
        assert shares == pytest.approx(list(expected.values()), rel=1e-5)

    mistakes = json.loads((run / "eval/report.json").read_text())["mistakes"]
    wrong = [row for row in predictions if row["prediction"] != row["label"]]
    wrong.sort(key=lambda row: -row["probability"])
    assert mistakes and len(mistakes) == min(16, len(wrong))
    for mistake, row in zip(mistakes, wrong, strict=False):
        assert mistake.pop("probability") == pytest.approx(row["probability"], rel=1e-5)
        assert mistake == {key: row[key] for key in ("index", "file", "label", "prediction")}


def test_maps_and_records_name_their_files(run: Path, pictures: Path) -> None:
    table, names = vit.load(run).predictions(), {}
    options = MapsConfig(indices=(9, 2), faithfulness=0, kinds=("rollout",))
    explain_run(str(run), options)
    entries = json.loads((run / "eval/attention/index.json").read_text())["images"]
    assert [(entry["index"], entry["file"]) for entry in entries] == [
        (index, table[index]["file"]) for index in options.indices
    ]
    for folder in (run, run / "eval/attention"):
        events = EventAccumulator(str(folder), tensor_size_guidance={"attention": 0}).Reload()
        for tag in events.PluginTagToContent("attention"):
            if tag.count("/") == 1 and tag != FRAMES_TAG:
                content = events.Tensors(tag)[-1].tensor_proto.string_val[0]
                names[tag] = decode_details(content).name
    held_out = [row["file"] for row in vit.load(run).split() if row["part"] == "val"]
    assert names.pop("attention/probe_00") in [printable(name) for name in held_out]
    assert names == {
        f"attention/image_{index:05d}": printable(table[index]["file"]) for index in options.indices
    }


def test_resuming_leaves_the_split_alone(run: Path, tmp_path: Path) -> None:
    config = from_dict(yaml.safe_load((run / "config.yaml").read_text()))
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/model.safetensors").unlink()
    before = (tmp_path / "run/split.csv").stat()
    train(dataclasses.replace(config, out=str(tmp_path / "run")))
    after = (tmp_path / "run/split.csv").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_predictions_that_were_not_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"^runs/cifar10_quick/eval/predictions.csv: file not fou"):
        vit.load("cifar10_quick").predictions()
    with pytest.raises(ValueError, match=r"split.csv: file not found; train.py writes it, for ima"):
        vit.load("cifar10_quick").split()
    with pytest.raises(ValueError, match=r"not found; `vit-eval cifar10_quick` writes it$"):
        vit.load("cifar10_quick").predictions()
    with pytest.raises(ValueError, match=r"^eval/predictions.csv: only for a model that vit.load"):
        dataclasses.replace(vit.load("cifar10_quick"), run=None).predictions()


def test_a_table_of_other_predictions_is_not_replaced(tmp_path: Path) -> None:
    """As an earlier version wrote it there."""
    (tmp_path / "predictions.csv").write_text("file,class,probability,class_1,probability_1\n")
    with pytest.raises(ValueError, match="contains files other than a report"):
        _require_own_report(tmp_path)
