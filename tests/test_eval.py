"""eval.py on a trained model: maps, photos, comparing models, invalid input."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from scipy.stats import binomtest
from torch import Tensor

from small_runs import Call, Ended
from vit.classifier import build_model
from vit.data.datasets import load
from vit.data.images import ImageSet
from vit.data.photos import to_photo
from vit.data.shapes import KINDS
from vit.evaluation import wilson_interval
from vit.explain.faithfulness import baselines, mean_interval, pointing_game
from vit.explain.maps import MAP_KINDS, attention_maps
from vit.explain.rollout import attention_rollout
from vit.model_file import SavedModel, load_model, save_model

ROOT = Path(__file__).resolve().parent.parent
SAME = ("--device", "cpu", "--precision", "float32")  # so that numbers can be computed again
CHOSEN = (3, 17)
MEASURED = 40  # images

Pair = tuple[float, float]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run eval.py with some words in this process, which has imported torch already."""

    def run(*words: object) -> Ended:
        monkeypatch.setattr(sys, "argv", ["eval.py", *map(str, words)])
        code: Any = 0
        try:
            runpy.run_path(str(ROOT / "eval.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return Ended(code, *capsys.readouterr())

    return run


def command(*words: object) -> str:
    """Run eval.py as a user does and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "eval.py"), *map(str, words)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def refuses(ended: Ended, *parts: str) -> None:
    assert ended.code == 2
    assert ended.error.startswith("error: ") and ended.error.count("\n") == 1, ended.error
    for part in parts:
        assert part in ended.error
    assert ended.out == ""


@pytest.fixture(scope="module")
def opened(demo: Path) -> SavedModel:
    return load_model(demo, "cpu", "float32")


@pytest.fixture(scope="module")
def shapes() -> ImageSet:
    return load("shapes", "", train=False)


def map_images(opened: SavedModel, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and every kind of map of (n, 3, 32, 32) uint8 images."""
    classifier = opened.classifier
    return attention_maps(classifier.model, classifier.normalize(images), list(MAP_KINDS))


# Attention of test images.


@pytest.fixture(scope="module")
def explained(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What maps wrote for two chosen images, and what it printed."""
    out = tmp_path_factory.mktemp("explained")
    printed = command(
        demo, "maps", "--indices", *CHOSEN, "--faithfulness", MEASURED, "--out", out, *SAME
    )
    return out / "attention", printed


def read_index(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "index.json").read_text())


def indices_in(folder: Path) -> list[int]:
    return [entry["index"] for entry in read_index(folder)["images"]]


def test_attention_writes_sheets_maps_and_index_and_nothing_else(explained):
    folder, printed = explained
    names = {path.name for path in folder.iterdir() if "tfevents" not in path.name}
    assert names == {
        "image_00003.png", "image_00017.png", "features.png", "index.json", "faithfulness.json",
        *(f"{kind}.npy" for kind in MAP_KINDS),
    }  # fmt: skip
    assert str(folder) in printed and "2 sheets" in printed and "cpu" in printed.lower()
    assert [path.name for path in folder.parent.iterdir()] == ["attention"]


@pytest.mark.parametrize("kind", MAP_KINDS)
def test_saved_maps_are_those_computed_directly(explained, opened, shapes, kind):
    saved = np.load(explained[0] / f"{kind}.npy")
    grid = (32, 32) if kind == "lrp_pixels" else (8, 8)
    assert saved.shape == (len(CHOSEN), *grid) and saved.dtype == np.float32
    _, maps = map_images(opened, shapes.images[list(CHOSEN)])
    np.testing.assert_allclose(saved, maps[kind].numpy(), rtol=1e-4, atol=1e-5)


def test_index_says_what_each_row_is(explained, opened, shapes):
    folder, _ = explained
    index = read_index(folder)
    assert (index["data"], index["split"], index["readout"]) == ("shapes", "test", "mean")
    assert index["maps"] == {
        kind: {"file": f"{kind}.npy", "class_specific": entry.class_specific, "unit": entry.unit}
        for kind, entry in MAP_KINDS.items()
    }
    logits, _ = map_images(opened, shapes.images[list(CHOSEN)])
    shares, predicted = opened.classifier.scaled(logits).softmax(dim=1).max(dim=1)
    assert len(index["images"]) == len(CHOSEN)
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
        out = tmp_path / target
        ended = call(
            demo, "maps", "--indices", *CHOSEN, "--target", target, "--faithfulness", 0,
            "--out", out, *SAME,
        )  # fmt: skip
        assert ended.code == 0 and "faithfulness" not in ended.out
        assert not (out / "attention" / "faithfulness.json").exists()
        entries = read_index(out / "attention")["images"]
        assert [entry["explained_class"] for entry in entries] == [target, target]
        found[target] = {kind: np.load(out / "attention" / f"{kind}.npy") for kind in MAP_KINDS}
    for kind in MAP_KINDS:
        far = np.abs(found["star"][kind] - found["circle"][kind]).max(axis=(1, 2))
        assert (far > 0.01).all() if MAP_KINDS[kind].class_specific else (far == 0).all()


def test_a_rerun_replaces_its_files_and_leaves_others_alone(call, demo, tmp_path, explained):
    shutil.copytree(explained[0], tmp_path / "attention")
    folder = tmp_path / "attention"
    (folder / "notes.txt").write_text("mine")
    np.save(folder / "mine.npy", np.zeros(3))
    words = ("maps", "--indices", 5, 5, "--faithfulness", 0, "--out", tmp_path)
    assert call(demo, *words).code == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "mine.npy").exists()
    assert [path.name for path in folder.glob("image_*")] == ["image_00005.png"]
    assert np.load(folder / "rollout.npy").shape == (1, 8, 8)
    assert indices_in(folder) == [5]
    assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    measured = (explained[0] / "faithfulness.json").read_text()  # until it is measured again
    assert (folder / "faithfulness.json").read_text() == measured


def test_an_index_of_something_else_is_not_ours(call, demo, tmp_path):
    folder = tmp_path / "attention"
    folder.mkdir()
    (folder / "index.json").write_text('{"images": []}')
    (folder / "image_00001.png").write_text("mine")
    ended = call(demo, "maps", "--indices", 5, "--faithfulness", 0, "--out", tmp_path)
    assert ended.code == 2 and "contains files other than maps" in ended.error
    assert (folder / "index.json").read_text() == '{"images": []}'
    assert (folder / "image_00001.png").read_text() == "mine"


# The demo's true masks.


@pytest.fixture(scope="module")
def pointing(opened: SavedModel, shapes: ImageSet) -> dict[str, Pair]:
    """How often the strongest patch lies on the object, with half of the 95 % interval."""
    count = len(shapes)
    parts = [map_images(opened, part)[1] for part in shapes.images.split(500)]
    maps = {kind: torch.cat([found[kind] for found in parts]) for kind in MAP_KINDS}
    maps |= baselines(count, (8, 8), seed=0)
    return {kind: mean_interval(pointing_game(found, shapes.masks)) for kind, found in maps.items()}


def test_the_best_map_points_at_the_object_and_beats_the_centre(pointing):
    best = max((pointing[kind] for kind in MAP_KINDS), key=lambda pair: pair[0])
    centred = pointing["centred"]
    assert best[0] >= 0.90
    assert best[0] >= centred[0] + 0.1
    assert best[0] - best[1] > centred[0] + centred[1]


# Photos.


def draw_photo(height: int, width: int) -> np.ndarray:
    """A smooth picture whose every corner is another colour, (height, width, 3) uint8."""
    down, across = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    return (255 * np.stack([down, across, (1 - down) * (1 - across)], axis=-1)).astype(np.uint8)


def save_jpeg(path: Path) -> np.ndarray:
    photo = draw_photo(48, 64)
    Image.fromarray(photo).save(path, quality=95)
    return photo


def save_transparent(path: Path) -> np.ndarray:
    photo = draw_photo(40, 50)
    alpha = np.full((40, 50, 1), 255, dtype=np.uint8)
    alpha[:20], alpha[20:, :25] = 0, 51
    Image.fromarray(np.concatenate([photo, alpha], axis=-1)).save(path)
    share = alpha / 255
    return (photo * share + 255 * (1 - share)).round().astype(np.uint8)


def save_see_through_palette(path: Path) -> np.ndarray:
    numbers = np.arange(40 * 50).reshape(40, 50) // 1000
    picture = Image.fromarray(numbers.astype(np.uint8)).convert("P")
    picture.putpalette(bytes([200, 0, 0, 0, 0, 200]))
    picture.save(path, transparency=0)
    return np.array([[255, 255, 255], [0, 0, 200]], dtype=np.uint8)[numbers]


def save_damaged_notes(path: Path) -> np.ndarray:
    photo = draw_photo(48, 64)
    exif = b"Exif\0\0II*\0\x08\0\0\0\x05\0"  # five entries are announced, none is there
    Image.fromarray(photo).save(path, quality=95, exif=exif)
    return photo


def save_size(height: int, width: int) -> Callable[[Path], np.ndarray]:
    def save(path: Path) -> np.ndarray:
        photo = draw_photo(height, width)
        Image.fromarray(photo).save(path)
        return photo

    return save


PHOTOS: dict[str, Callable[[Path], np.ndarray]] = {  # each returns what is to be seen
    "colour.jpg": save_jpeg,
    "transparent.png": save_transparent,
    "see_through.gif": save_see_through_palette,
    "damaged_notes.jpg": save_damaged_notes,
    "wide.png": save_size(40, 300),
    "one_pixel.png": save_size(1, 1),
}


@pytest.mark.parametrize("name", PHOTOS)
def test_photo_is_read_as_a_person_sees_it(name, tmp_path):
    expected = PHOTOS[name](tmp_path / name)
    photo = to_photo(tmp_path / name)
    assert photo.dtype == np.uint8 and photo.shape == expected.shape
    far = np.abs(photo.astype(int) - expected).max()
    assert far <= (12 if name.endswith("jpg") else 1 if name == "transparent.png" else 0)


def blocks(printed: str) -> dict[str, list[tuple[str, float]]]:
    """The classes and percentages printed for each picture, by its path."""
    found: dict[str, list[tuple[str, float]]] = {}
    for block in printed.split("\n\n")[1:-1]:
        head, *lines = block.splitlines()
        rows = [re.fullmatch(r"  (\w+) +([\d.]+)%", line) for line in lines]
        found[head.rpartition(", ")[0]] = [(row[1], float(row[2])) for row in rows if row]
    return found


def picture(path: Path) -> np.ndarray:
    with Image.open(path) as file:
        return np.asarray(file).copy()


def sheet_of(folder: Path, name: str) -> Path:
    """The sheet of the only photo of a name."""
    (found,) = folder.glob(f"{Path(name).stem}_*_sheet.png")
    return found


@pytest.fixture(scope="module")
def classified(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The folder of the photos, that of their overlays, and what was printed."""
    photos, out = tmp_path_factory.mktemp("taken"), tmp_path_factory.mktemp("classified")
    for name, save in PHOTOS.items():
        save(photos / name)
    printed = command(demo, "photo", *(photos / name for name in PHOTOS), "--out", out, *SAME)
    return photos, out / "photos", printed


def test_five_best_classes_are_printed_in_falling_order(classified):
    photos, _, printed = classified
    found = blocks(printed)
    assert list(found) == [str(photos / name) for name in PHOTOS]
    for rows in found.values():
        names, shares = zip(*rows, strict=True)
        assert len(set(names)) == 5 and set(names) <= set(KINDS)
        assert list(shares) == sorted(shares, reverse=True)
        assert shares[-1] >= 0 and sum(shares) <= 100.03


def test_photos_leave_a_sheet_each_and_nothing_else(classified):
    _, folder, printed = classified
    assert {sheet_of(folder, name) for name in PHOTOS} == {*folder.iterdir()}
    for path in folder.iterdir():
        assert f"  wrote {path}\n" in printed


@pytest.mark.parametrize("name", PHOTOS)
def test_sheet_is_the_one_that_python_draws(classified, opened, name):
    photos, folder, printed = classified
    explanation = opened.classifier.explain(photos / name, ("rollout", "lrp_pixels"))
    assert blocks(printed)[str(photos / name)][0][0] == explanation.predicted
    drawn = picture(sheet_of(folder, name))
    np.testing.assert_array_equal(drawn, np.asarray(explanation.sheet()))


def test_photos_of_one_name_keep_apart_in_every_call(call, demo, opened, tmp_path):
    paths = [tmp_path / name / "same.png" for name in ("a", "b", "c")]
    for size, path in zip((20, 30, 40), paths, strict=True):
        path.parent.mkdir()
        save_size(size, size)(path)
    sheets = {}
    for given in (paths[:2], paths[2:], paths[:1]):  # the last one once more
        ended = call(demo, "photo", *given, "--out", tmp_path / "out", *SAME)
        written = re.findall(r"^  wrote (.+)$", ended.out, re.MULTILINE)
        sheets |= {path: Path(sheet) for path, sheet in zip(given, written, strict=True)}
    assert {*sheets.values()} == {*(tmp_path / "out/photos").iterdir()} and len(sheets) == 3
    for path, sheet in sheets.items():
        expected = opened.classifier.explain(path, ("rollout", "lrp_pixels")).sheet()
        np.testing.assert_array_equal(picture(sheet), np.asarray(expected))


@pytest.mark.parametrize("name", ["photo.png", "photo.jpg", "photo.gif", "photo.bmp"])
def test_a_photo_cut_short_is_refused_wherever_it_was_cut(name, tmp_path):
    whole, cut = tmp_path / name, tmp_path / f"cut_{name}"
    save_size(20, 30)(whole)
    content = whole.read_bytes()
    for length in range(0, len(content) * 9 // 10, max(1, len(content) // 50)):
        cut.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cannot be read as an image"):
            to_photo(cut)


# Two models.


@pytest.fixture(scope="module")
def others(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders beside the demo's: worse, of another grid, and of another data set."""
    folder = tmp_path_factory.mktemp("others")
    for name in ("worse", "coarse", "foreign"):
        (folder / name).mkdir()
    saved = load_model(demo, "cpu")
    classifier, config = saved.classifier, saved.config
    foreign = replace(config, data=replace(config.data, name="cifar10"))
    save_model(folder / "foreign/model.safetensors", classifier, foreign, saved.step)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in classifier.model.blocks.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.mul_(1 + 0.2 * noise)
    save_model(folder / "worse/model.safetensors", classifier, config, saved.step)
    coarse = replace(config, model=replace(config.model, patch_size=8))
    torch.manual_seed(0)
    untrained = build_model(coarse.model, classifier.preprocess, 10).eval()
    save_model(folder / "coarse/model.safetensors", replace(classifier, model=untrained), coarse, 0)
    return folder


@pytest.fixture(scope="module")
def compared(
    demo: Path, others: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """What compare wrote, and what it printed."""
    out = tmp_path_factory.mktemp("compared")
    printed = command(demo, "compare", others / "worse", "--out", out, *SAME)
    return out / "compare_worse", printed


def read_comparison(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "comparison.json").read_text())


def test_comparison_counts_what_each_gets_right(compared, others, opened, shapes):
    folder, printed = compared
    content = read_comparison(folder)
    right = [
        saved.classifier.logits(shapes.images).argmax(dim=1) == shapes.labels
        for saved in (opened, load_model(others / "worse", "cpu", "float32"))
    ]
    only = [int((right[0] & ~right[1]).sum()), int((right[1] & ~right[0]).sum())]
    assert only[0] > 0 and only[1] > 0  # or the test says little
    assert content["data"] == "shapes" and content["images"] == len(shapes)
    models, (pair,) = content["models"], content["pairs"]
    assert [model["name"] for model in models] == ["shapes", "worse"]
    accuracies = [model["accuracy"] for model in models]
    assert accuracies == pytest.approx([r.float().mean().item() for r in right], abs=1e-6)
    intervals = [wilson_interval(int(r.sum()), len(shapes)) for r in right]
    assert [tuple(model["accuracy_95"]) for model in models] == intervals
    assert (pair["first"], pair["other"], pair["only_right"]) == ("shapes", "worse", only)
    assert pair["mcnemar_p"] == pytest.approx(binomtest(only[0], sum(only)).pvalue, rel=1e-9)
    for accuracy, (low, high) in zip(accuracies, intervals, strict=True):
        assert f"| {accuracy:.2%} ({low:.2%} to {high:.2%}) " in printed
    verdict = "significant" if pair["mcnemar_p"] < 0.05 else "not significant"
    words = f"p = {pair['mcnemar_p']:.2g}; the difference is {verdict} at the 5% level"
    assert words in printed


def test_comparison_says_how_much_attention_moved_and_where_most(compared, others, opened, shapes):
    (pair,) = read_comparison(compared[0])["pairs"]
    worse = load_model(others / "worse", "cpu", "float32")
    one, other = (
        run.classifier.maps(shapes.images, ["rollout"])[1]["rollout"] for run in (opened, worse)
    )
    moved = ((one - other).abs().sum(dim=(1, 2)) / 64 / 2).double()  # there are no other tokens
    assert pair["moved_attention"] == pytest.approx(moved.mean().item(), abs=1e-5)
    most = moved.sort(descending=True).values[:8]
    listed = pair["most_moved"]
    assert [entry["moved"] for entry in listed] == pytest.approx(most.tolist(), abs=1e-5)
    for entry in listed:
        assert moved[entry["index"]].item() == pytest.approx(entry["moved"], abs=1e-5)


def test_comparison_draws_the_mean_and_the_most_moved(compared):
    folder, printed = compared
    names = {f"comparison.{suffix}" for suffix in ("png", "md", "json")}
    assert {path.name for path in folder.iterdir()} == names
    drawn = picture(folder / "comparison.png")
    assert drawn.shape[2] == 3 and (len(drawn) - 6) % (8 + 1) == 0  # a row for each, and the mean
    assert all(str(folder / name) in printed for name in names)


@pytest.mark.parametrize("turned", [False, True])
def test_models_with_different_grids_are_compared(call, demo, others, tmp_path, turned):
    runs = (others / "coarse", demo) if turned else (demo, others / "coarse")
    ended = call(runs[0], "compare", runs[1], "--out", tmp_path, "--probes", 1)
    assert ended.code == 0
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"compare_{runs[1].name}"
    content = read_comparison(folder)
    accuracies, (pair,) = [model["accuracy"] for model in content["models"]], content["pairs"]
    better, lower = accuracies[::-1] if turned else accuracies
    assert better > 0.5 and lower < 0.3 and pair["mcnemar_p"] < 1e-9
    assert 0 < pair["moved_attention"] < 1


def test_models_of_different_data_are_not_compared(call, demo, others, tmp_path):
    ended = call(demo, "compare", others / "foreign", "--out", tmp_path / "out")
    refuses(ended, "compare: ", "cifar10", "shapes", "foreign")
    assert not (tmp_path / "out").exists()


# Bad input.


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of things that are not what they are given for, and one good picture."""
    folder = tmp_path_factory.mktemp("bad")
    save_size(40, 40)(folder / "good.png")
    content = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(content[: len(content) // 2])
    Image.new("1", (9500, 9500)).save(folder / "huge.png")  # more than Pillow trusts
    (folder / "no_run").mkdir()
    weights = timm.create_model("resnet10t", pretrained=False, num_classes=10).state_dict()
    save_file(weights, folder / "cnn.safetensors")
    torch.save(weights, folder / "cnn.pt")
    return folder


# What is typed after eval.py, and what the one line must say; DEMO and BAD are folders.
BAD_WORDS = [
    ("DEMO photo BAD/none.png", "photo: BAD/none.png: file not found"),
    ("DEMO photo BAD/cut.png", "photo: BAD/cut.png cannot be read as an image"),
    ("DEMO photo BAD/huge.png", "photo: BAD/huge.png cannot be read as an image: Image size"),
    ("DEMO photo BAD/good.png --target ship", "target: 'ship' is not a class of this model"),
    ("DEMO maps --indices 2000", "indices: 2000 is not a test image; it must be 0 to 1999"),
    ("DEMO compare BAD/none", "BAD/none does not exist"),
    ("BAD/cnn.safetensors", "without the config of a run of this project"),
    ("BAD/cnn.pt", "BAD/cnn.pt is not a checkpoint of this project"),
    ("DEMO maps --start_layer 4", "start_layer: 4 is not a layer of this model; it must be"),
    ("/dev/zero", "/dev/zero is not a regular file"),
    ("DEMO photo /dev/zero", "photo: /dev/zero: not a regular file"),
    ("BAD/no_run", "contains neither model.safetensors nor"),
]


@pytest.mark.parametrize(("words", "part"), BAD_WORDS, ids=[words for words, _ in BAD_WORDS])
def test_bad_input_is_one_line_and_leaves_nothing(call, demo, bad, tmp_path, words, part):
    places = {"DEMO": str(demo), "BAD": str(bad)}
    for word, place in places.items():
        words, part = words.replace(word, place), part.replace(word, place)
    refuses(call(*words.split(), "--out", tmp_path / "out"), part)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words", ["", "maps --probes 1 --faithfulness 0", "photo PHOTO", "compare DEMO"]
)
def test_results_are_not_written_over_a_file(call, demo, bad, tmp_path, words):
    (tmp_path / "file").write_text("mine")
    words = words.replace("PHOTO", str(bad / "good.png")).replace("DEMO", str(demo))
    ended = call(demo, *words.split(), "--out", tmp_path / "file")
    assert ended.code == 2 and ended.error.count("\n") == 1
    assert str(tmp_path / "file") in ended.error
    assert (tmp_path / "file").read_text() == "mine"


# Options of the maps.


def test_faithfulness_is_measured_unless_images_are_chosen(call, demo, tmp_path, monkeypatch):
    counts = []

    def measure(classifier, images, *_, **__):
        counts.append(len(images))
        return {}

    monkeypatch.setattr("vit.reporting.attention.measure_maps", measure)
    for number, (words, expected) in enumerate(
        [
            (("--indices", 3), []),
            (("--indices", 3, "--faithfulness", 20), [20]),
            (("--probes", 1), [500]),
            (("--probes", 1, "--faithfulness", 0), []),
        ]
    ):
        counts.clear()
        assert call(demo, "maps", *words, "--out", tmp_path / str(number)).code == 0
        assert counts == expected, words


def test_rollout_takes_its_options_and_they_are_recorded(call, demo, opened, shapes, tmp_path):
    words = ("--head_fusion", "max", "--discard_ratio", 0.5, "--start_layer", 1)
    ended = call(
        demo, "maps", "--indices", *CHOSEN, *words, "--faithfulness", 20, "--out", tmp_path,
        *SAME,
    )  # fmt: skip
    assert ended.code == 0
    folder, options = tmp_path / "attention", {
        "head_fusion": "max", "discard_ratio": 0.5, "start_layer": 1
    }  # fmt: skip
    assert read_index(folder)["rollout"] == options
    table = json.loads((folder / "faithfulness.json").read_text())
    assert table["rollout"] == options
    classifier = opened.classifier
    with torch.no_grad():
        inputs = classifier.normalize(shapes.images[list(CHOSEN)])
        _, weights, _ = classifier.model.forward_intermediates(inputs)
    shares = attention_rollout(weights, readout="mean", num_prefix_tokens=0, **options)
    expected = (shares * 64).unflatten(1, (8, 8)).numpy()
    np.testing.assert_allclose(np.load(folder / "rollout.npy"), expected, rtol=1e-4, atol=1e-5)
    _, plain = map_images(opened, shapes.images[list(CHOSEN)])
    assert np.abs(plain["rollout"].numpy() - expected).max() > 0.05
    for kind in set(MAP_KINDS) - {"rollout"}:
        saved = np.load(folder / f"{kind}.npy")
        np.testing.assert_allclose(saved, plain[kind].numpy(), rtol=1e-4, atol=1e-5)
