"""eval.py on a trained model: maps, photos, and invalid input."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from small_runs import load
from vit.data.images import ImageSet
from vit.data.shapes import KINDS
from vit.explain.kinds import RolloutOptions
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.explain.statistics import attention_by_offset
from vit.intervals import mean_interval
from vit.model_file import SavedModel
from vit.pretrained.load import load as load_model
from vit.reporting.faithfulness import baselines, pointing_game

ROOT = Path(__file__).resolve().parents[2]
SAME = ("--device", "cpu", "--precision", "float32")  # so that numbers can be computed again
CHOSEN = (3, 17)
MEASURED = 40  # images


@pytest.fixture(scope="module")
def opened(demo: Path) -> SavedModel:
    return load_model(demo, "cpu", "float32")


@pytest.fixture(scope="module")
def shapes() -> ImageSet:
    return load("shapes", "", train=False)


def map_images(
    opened: SavedModel, images: Tensor, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and every kind of map of (n, 3, 32, 32) uint8 images."""
    model, inputs = opened.model, opened.normalize(images)
    return attention_maps(model, inputs, list(MAP_KINDS), **options)


@pytest.fixture(scope="module")
def explained(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What maps wrote for two chosen images, and what it printed, run as a user does."""
    out = tmp_path_factory.mktemp("explained")
    words = ("--indices", *CHOSEN, "--faithfulness", MEASURED, "--out", out, *SAME)
    done = subprocess.run(
        [sys.executable, ROOT / "eval.py", demo, "maps", *map(str, words)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return out / "attention", done.stdout


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def test_maps_writes_sheets_arrays_and_an_index_only(explained):
    folder, printed = explained
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {
        "image_00003.png", "image_00017.png", "features.png", "distance.png", "index.json",
        "faithfulness.json", *(f"{kind}.npy" for kind in (*MAP_KINDS, "heads", "distance")),
    }  # fmt: skip
    assert str(folder) in printed and "2 sheets" in printed and "cpu" in printed.lower()
    assert [path.name for path in folder.parent.iterdir()] == ["attention"]


def test_saved_maps_are_those_computed_directly_and_the_index_says_what_they_are(
    explained, opened, shapes
):
    folder, _ = explained
    logits, maps = map_images(opened, shapes.images[list(CHOSEN)])
    for kind, found in maps.items():
        saved = np.load(folder / f"{kind}.npy")
        assert saved.dtype == np.float32
        np.testing.assert_allclose(saved, found.numpy(), rtol=1e-4, atol=1e-5)
    _, weights, _ = opened.model.forward_intermediates(
        opened.normalize(shapes.images[list(CHOSEN)])
    )
    patches = torch.stack(weights, dim=1)[..., -64:, -64:].mean(dim=-2)  # the head reads their mean
    np.testing.assert_allclose(
        np.load(folder / "heads.npy"), patches.unflatten(-1, (8, 8)).detach(), rtol=1e-4, atol=1e-6
    )
    offsets = np.load(folder / "distance.npy")
    np.testing.assert_allclose(offsets, attention_by_offset(weights, (8, 8), 0).detach(), rtol=1e-4)
    index = read_index(folder)
    assert (index["data"], index["split"], index["readout"]) == ("shapes", "test", "mean")
    assert index["maps"] == {
        kind: {"file": f"{kind}.npy", "class_specific": entry.class_specific, "unit": entry.unit}
        for kind, entry in MAP_KINDS.items()
    }
    shares, predicted = opened.scaled(logits).softmax(dim=1).max(dim=1)
    for row, entry in enumerate(index["images"]):
        assert entry.pop("probability") == pytest.approx(shares[row].item(), abs=1e-5)
        assert entry == {
            "row": row,
            "index": CHOSEN[row],
            "label": KINDS[shapes.labels[CHOSEN[row]]],
            "prediction": KINDS[predicted[row]],
            "explained_class": KINDS[predicted[row]],
            "sheet": f"image_{CHOSEN[row]:05d}.png",
        }
        assert (folder / entry["sheet"]).is_file()


def test_printed_table_is_the_one_saved(explained):
    folder, printed = explained
    saved = json.loads((folder / "faithfulness.json").read_text())
    assert saved["images"] == MEASURED and f"{MEASURED} test images" in printed
    assert list(saved["maps"]) == [*MAP_KINDS, "random", "centred"]
    lines = printed.split("mean ± 95% interval\n")[1].splitlines()[1:]
    for line, values in zip(lines[: len(saved["maps"])], saved["maps"].values(), strict=True):
        numbers = [(float(a), float(b)) for a, b in re.findall(r"(-?[\d.]+) ± ([\d.]+)", line)]
        assert numbers == [pytest.approx(pair, abs=6e-4) for pair in values.values()]
    assert lines[0].startswith("attention rollout, class-agnostic")
    assert lines[2].startswith("class relevance  ")


def test_a_chosen_class_changes_only_class_specific_maps(call, demo, tmp_path):
    found = {}
    for target in ("star", "circle"):
        words = ("--indices", *CHOSEN, "--target", target, "--faithfulness", 0, "--out", tmp_path)
        ended, folder = call(demo, "maps", *words, *SAME), tmp_path / "attention"
        assert ended.code == 0 and "faithfulness" not in ended.out
        assert not (folder / "faithfulness.json").exists()
        entries = read_index(folder)["images"]
        assert [entry["explained_class"] for entry in entries] == [target, target]
        found[target] = {kind: np.load(folder / f"{kind}.npy") for kind in MAP_KINDS}
    for kind in MAP_KINDS:
        far = np.abs(found["star"][kind] - found["circle"][kind]).max(axis=(1, 2))
        assert (far > 0.01).all() if MAP_KINDS[kind].class_specific else (far == 0).all()


def test_maps_of_a_batch_are_computed_at_once(call, demo, tmp_path, monkeypatch):
    sizes, draw = [], attention_maps

    def watched(model: Any, images: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(len(images))
        return draw(model, images, *args, **options)

    monkeypatch.setattr("vit.classifier.attention_maps", watched)
    words = ("--probes", 5, "--batch_size", 2, "--faithfulness", 0, "--out", tmp_path)
    assert call(demo, "maps", *words, *SAME).code == 0
    assert sizes == [2, 2, 1]
    sizes.clear()
    monkeypatch.setattr("vit.classifier.MOST_WEIGHTS", 0)  # one image at a time
    assert call(demo, "maps", *words, *SAME).code == 0
    assert sizes == [1, 1, 1, 1, 1]


def test_a_rerun_replaces_its_files_and_leaves_others_alone(call, demo, tmp_path, explained):
    folder = tmp_path / "attention"
    shutil.copytree(explained[0], folder)
    np.save(folder / "mine.npy", np.zeros(3))
    words = ("maps", "--indices", 5, 5, "--faithfulness", 0, "--out", tmp_path)
    assert call(demo, *words).code == 0
    assert (folder / "mine.npy").exists()
    assert [path.name for path in folder.glob("image_*")] == ["image_00005.png"]
    assert np.load(folder / "rollout.npy").shape == (1, 8, 8)
    assert [entry["index"] for entry in read_index(folder)["images"]] == [5]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    measured = (explained[0] / "faithfulness.json").read_text()  # until it is measured again
    assert (folder / "faithfulness.json").read_text() == measured
    (folder / "index.json").write_text('{"images": []}')  # of something else
    ended = call(demo, *words)
    assert ended.code == 2 and "is not part of maps" in ended.error
    assert (folder / "index.json").read_text() == '{"images": []}'


def test_the_best_map_points_at_the_object_more_often_than_the_centre(opened, shapes):
    """How often the strongest patch lies on the true mask, with half of the 95% interval."""
    images, masks = shapes.images[:500], shapes.masks[:500]
    _, maps = map_images(opened, images)
    maps |= baselines(len(images), (8, 8), seed=0)
    pointing = {kind: mean_interval(pointing_game(found, masks)) for kind, found in maps.items()}
    best, centred = max(pointing[kind] for kind in MAP_KINDS), pointing["centred"]
    assert best[0] >= 0.90 and best[0] >= centred[0] + 0.1
    assert best[0] - best[1] > centred[0] + centred[1]


def test_faithfulness_is_measured_unless_images_are_chosen(call, demo, tmp_path, monkeypatch):
    counts = []

    def measure(classifier, images, *_, **__):
        counts.append(len(images))
        return {}

    monkeypatch.setattr("vit.commands.maps.score_maps", measure)
    for number, words in enumerate([("--indices", 3), ("--probes", 1)]):
        ended = call(demo, "maps", *words, "--kinds", "raw", "--out", tmp_path / str(number))
        assert ended.code == 0
    assert counts == [500]


def test_rollout_takes_its_options_and_they_are_recorded(call, demo, opened, shapes, tmp_path):
    options = {"head_fusion": "max", "discard_ratio": 0.5, "start_layer": 1}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    words += ["--indices", *CHOSEN, "--kinds", "rollout", "raw", "--faithfulness", 20]
    assert call(demo, "maps", *words, "--out", tmp_path, *SAME).code == 0
    folder = tmp_path / "attention"
    assert read_index(folder)["rollout"] == options
    assert json.loads((folder / "faithfulness.json").read_text())["rollout"] == options
    _, maps = map_images(opened, shapes.images[list(CHOSEN)], rollout=RolloutOptions(**options))
    for kind in ("rollout", "raw"):
        found = np.load(folder / f"{kind}.npy")
        np.testing.assert_allclose(found, maps[kind].numpy(), rtol=1e-4, atol=1e-5)


def test_photos_get_their_best_classes_and_the_sheet_that_python_draws(
    call, demo, opened, tmp_path
):
    """Photos of one name keep apart, also in later calls."""
    paths = [tmp_path / name / "same.png" for name in ("a", "b", "c")]
    for size, path in zip(((300, 40), (1, 1), (64, 48)), paths, strict=True):
        path.parent.mkdir()
        Image.effect_noise(size, 100).save(path)
    sheets = {}
    for given in (paths[:2], paths[2:], paths[:1]):  # the last one once more
        ended = call(demo, "photo", *given, "--out", tmp_path / "out", *SAME)
        _, *blocks = ended.out.split("\n\n")
        for path, block in zip(given, blocks, strict=False):
            head, *rows, wrote = block.splitlines()
            assert head.startswith(f"{path}, ")
            found = [re.fullmatch(r"  (\w+) +([\d.]+)%", row).groups() for row in rows]
            best = opened.predict(path)
            assert [name for name, _ in found] == list(best)
            shares = [float(share) / 100 for _, share in found]
            assert shares == pytest.approx(list(best.values()), abs=1e-4)
            sheets[path] = Path(wrote.removeprefix("  wrote "))
    assert {*sheets.values()} == {*(tmp_path / "out/photos").iterdir()} and len(sheets) == 3
    for path, sheet in sheets.items():
        expected = opened.explain(path, ("rollout", "lrp_pixels")).sheet()
        with Image.open(sheet) as file:
            np.testing.assert_array_equal(np.asarray(file), np.asarray(expected))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of things that are not what they are given for, and one good picture."""
    folder = tmp_path_factory.mktemp("bad")
    Image.effect_noise((40, 40), 100).save(folder / "good.png")
    Image.new("1", (9500, 9500)).save(folder / "huge.png")  # more than Pillow trusts
    (folder / "no_run").mkdir()
    return folder


# What is typed after eval.py, and what the one line must say; DEMO and BAD are folders.
BAD_WORDS = [
    ("DEMO photo BAD/huge.png", "photo: BAD/huge.png cannot be read as an image: it has more"),
    ("DEMO photo BAD/good.png --target ship", "target: ship is not allowed; it must be a class"),
    ("DEMO maps --indices 2000", "indices: 2000 is not a test image; it must be 0 to 1999"),
    ("DEMO compare BAD/none", "BAD/none does not exist"),
    ("DEMO maps --start_layer 4", "start_layer: 4 is not allowed; it must be a layer of"),
    ("/dev/zero", "/dev/zero is not a regular file"),
    ("DEMO photo /dev/zero", "photo: /dev/zero: not a regular file"),
    ("BAD/no_run", "contains neither model.safetensors nor"),
]


@pytest.mark.parametrize(("words", "part"), BAD_WORDS, ids=[words for words, _ in BAD_WORDS])
def test_bad_input_is_one_line_and_leaves_nothing(call, demo, bad, tmp_path, words, part):
    for word, place in {"DEMO": str(demo), "BAD": str(bad)}.items():
        words, part = words.replace(word, place), part.replace(word, place)
    ended = call(*words.split(), "--out", tmp_path / "out")
    assert ended.code == 2 and ended.out == ""
    assert ended.error.startswith("error: ") and ended.error.count("\n") == 1, ended.error
    assert part in ended.error
    assert not (tmp_path / "out").exists()
