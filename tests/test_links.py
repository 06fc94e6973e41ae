"""Links in an untrusted folder: no command writes, or deletes, anything through them."""

import contextlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import Call
from small_runs import deadline, draw_pictures, tiny
from vit.commands import export
from vit.commands.train import train
from vit.config import Config
from vit.data.severities import CORRUPTIONS
from vit.model_file import SavedModel
from vit.run.sharded import read_state, write_folder

COMMANDS: dict[str, tuple[str, ...]] = {
    "report": ("report", "--unfamiliar", "noise", "--corruptions"),
    "maps": ("maps", "--faithfulness", "3"),
    "photo": ("photo", "PHOTO"),
    "predict": ("predict", "PHOTO"),
    "compare": ("compare", "OTHER", "--corruptions"),
    "heads": ("heads", "--images", "4"),
    "export": ("export", "timm", "torch", "html", "hub"),
}


def config_of(out: Path, root: Path) -> Config:
    return tiny(out, root, data={"val_size": 6})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes seconds and writes into no run: a corruption of each group will do.

    So will a few images of noise, and a few samples of each bootstrap. Exports are written into a
    temporary folder first; the graph of the live model is never run.
    """
    few = {kind: CORRUPTIONS[kind] for kind in ("shot_noise", "zoom_blur", "fog", "jpeg")}
    monkeypatch.setattr("vit.reporting.corruptions.CORRUPTIONS", few)
    monkeypatch.setattr("vit.reporting.unfamiliar.NOISE", 30)
    monkeypatch.setattr("vit.intervals.RESAMPLES", 20)
    monkeypatch.setattr("vit.reporting.live.graph_of", lambda classifier: b"graph")
    write = export._export

    def write_quickly(saved: SavedModel, name: str, draft: Path) -> str:
        return f"{draft.write_bytes(b'')}" if name == "torch" else write(saved, name, draft)

    monkeypatch.setattr(export, "_export", write_quickly)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty pictures of each of two classes."""
    return draw_pictures(tmp_path_factory.mktemp("pictures"), 40)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Path:
    """A finished run."""
    run = tmp_path_factory.mktemp("stored") / "run"
    train(config_of(run, pictures))
    return run


def content(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """What is in a folder, and when it was written."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def written(run: Path, work: Callable[[], object]) -> tuple[list[Path], list[Path]]:
    """List the files and folders that work writes into a run."""
    before = {path: path.lstat().st_mtime_ns for path in run.rglob("*")}
    work()
    changed = [p for p in run.rglob("*") if before.get(p) != p.lstat().st_mtime_ns]
    folders = {path.parent for path in changed if path.is_file()} - {run}
    return [path for path in changed if path.is_file()], sorted(folders)


def plant(path: Path, target: Path) -> None:
    """Put a link in place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def check(run: Path, home: Path, fresh: Callable[[], Any], work: Callable[[], str]) -> None:
    """Let work run into links at every place where it writes, and look at what they lead to."""

    def renew() -> None:
        shutil.rmtree(run, ignore_errors=True)
        fresh()

    renew()
    files, folders = written(run, work)
    assert files
    # As if the command had written them before; names of event files are random.
    mine = {path: path.read_bytes() for path in files if "tfevents" not in path.name}
    for dangling in (False, True):
        renew()
        home.mkdir()
        for number, (path, data) in enumerate(mine.items()):
            # Earlier versions wrote to .NAME.tmp first.
            for place in (path, path.with_name(f".{path.name}.tmp")):
                victim = home / f"{number}{place.suffix}"
                if not dangling:
                    victim.write_bytes(data)
                plant(place, victim)
        before = content(home)
        work()
        assert content(home) == before
        shutil.rmtree(home)
    for folder in folders:
        renew()
        home.mkdir()
        for path, data in mine.items():
            if path.parent == folder:
                (home / path.name).write_bytes(data)
        plant(folder, home)
        before = content(home)
        assert f"{folder} is a link; delete it" in work()
        assert content(home) == before, folder
        shutil.rmtree(home)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_writes_through_no_link(
    name: str, stored: Path, pictures: Path, tmp_path: Path, call: Call
) -> None:
    run, words = tmp_path / "run", {"PHOTO": pictures / "a" / "0.png", "OTHER": stored}

    def work() -> str:
        ended = call(run, *(words.get(word, word) for word in COMMANDS[name]))
        assert ended.code == 0 or (ended.code == 2 and ended.error.startswith("error: out: "))
        return ended.error

    check(run, tmp_path / "home", partial(shutil.copytree, stored, run, symlinks=True), work)


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_training_writes_through_no_link(how, stored, pictures, tmp_path):
    run = tmp_path / "run"

    def fresh() -> None:
        shutil.copytree(stored, run, symlinks=True)
        if how == "resume":
            (run / "model.safetensors").unlink()

    def work() -> str:
        try:
            train(config_of(run, pictures), overwrite=how == "overwrite")
        except ValueError as error:
            assert str(error).startswith("out: ")
            return str(error)
        return ""

    check(run, tmp_path / "home", fresh, work)


def test_a_run_folder_that_its_user_has_linked_works(stored, tmp_path, call):
    shutil.copytree(stored, tmp_path / "scratch" / "runs" / "run")
    (tmp_path / "runs").symlink_to(tmp_path / "scratch" / "runs")
    assert call(tmp_path / "runs" / "run", "heads", "--images", "4").code == 0
    assert (tmp_path / "scratch" / "runs" / "run" / "eval" / "heads.json").is_file()


def test_results_stay_beside_a_model_file_that_is_a_link(stored, tmp_path, call):
    shutil.copytree(stored, tmp_path / "mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").symlink_to(tmp_path / "mine" / "model.safetensors")
    before = content(tmp_path / "mine")
    assert call(tmp_path / "run", "report").code == 0
    assert content(tmp_path / "mine") == before and (tmp_path / "run/eval/report.json").is_file()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_is_not_written_through_a_link(tmp_path):
    target = tmp_path / "checkpoints" / "step_00000001"
    (home := tmp_path / "home").mkdir()
    (home / "mine").touch()
    for link in (target, target.with_name(f".{target.name}.tmp")):
        plant(link, home)
    write_folder(target, {"a": torch.zeros(2)}, {"step": 1}, main=True)
    assert [path.name for path in home.iterdir()] == ["mine"]
    assert read_state(target) == {"step": 1} and not target.is_symlink()


PIPES = {
    "model.safetensors": ("report",),
    "config.json": ("report",),
    "eval/report.json": ("report",),
    "eval/corruptions.npz": ("report", "--corruptions"),
    "eval/attention/index.json": ("maps",),
    "eval/photos.csv": ("predict", "PHOTO"),
    "export/live.html": ("export", "html"),
    "export/preprocess.py": ("export", "torch"),
    "events.out.tfevents.1": ("export", "html"),
    "config.yaml": (),
    "metrics.jsonl": (),
    "checkpoints/step_00000009.pt": (),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("place", PIPES)
def test_no_command_waits_for_a_pipe(
    place: str, stored: Path, pictures: Path, tmp_path: Path, call: Call
) -> None:
    """Archives keep pipes, too, and reading one ends when somebody writes into it."""
    run, words = tmp_path / "run", PIPES[place]
    shutil.copytree(stored, run)
    if not words:
        (run / "model.safetensors").unlink()
    (run / place).unlink(missing_ok=True)
    (run / place).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(run / place)

    with deadline(60):
        if words:
            photo = pictures / "a" / "0.png"
            ended = call(run, *(photo if word == "PHOTO" else word for word in words))
            assert ended.code == 2 or place in ("config.json", "eval/corruptions.npz"), ended
            assert ended.error.count("\n") == (ended.code == 2)
        else:
            with contextlib.suppress(ValueError, OSError):
                train(config_of(run, pictures))


def test_a_photo_may_have_the_longest_name(stored, pictures, tmp_path, call):
    photo = tmp_path / f"{'ä' * 125}.png"  # 254 bytes
    shutil.copy(pictures / "a" / "0.png", photo)
    assert call(stored, "photo", photo, "--out", tmp_path / "out").code == 0
    (sheet,) = (tmp_path / "out" / "photos").iterdir()
    assert sheet.name.startswith("ä" * 100)
