"""The folder of a run: whose it is, and whether a run in it starts, goes on or is refused."""

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from small_runs import changed, small
from vit.commands.train import train
from vit.config import Config, to_dict
from vit.run.checkpoint import Checkpoint, save_checkpoint
from vit.run.folder import LOCK_FILE, check_run, lock_run, prepare_run

HOW = {"processes": 2, "device": "cpu", "precision": "torch.float32"}


def test_lock_keeps_others_out_and_leaves_nothing(tmp_path):
    run = tmp_path / "a" / "b" / "run"
    with lock_run(run):
        refusal = re.escape(f"{run} is being written by another process; ")
        with pytest.raises(ValueError, match=refusal), lock_run(run):
            pass
        assert (run / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []  # the folders were made for it


def test_lock_of_a_dead_process_is_taken_over(tmp_path):
    run = tmp_path / "run"
    child = os.fork()
    if not child:
        with lock_run(run):
            os.kill(os.getpid(), 9)
    assert os.waitpid(child, 0)[1] == 9
    assert (run / LOCK_FILE).exists()
    assert check_run(Config(out=str(run)), overwrite=False, environment=HOW) is None
    with lock_run(run):
        pass


def begin(config: Config) -> Config:
    """Write the files of a run that two processes have begun."""
    run, weights = prepare_run(config, resume=False), {"w": torch.zeros(1)}
    save_checkpoint(run, Checkpoint(7, to_dict(config), ["a"], weights, environment=HOW))
    return config


@pytest.fixture
def unfinished(tmp_path: Path) -> Config:
    return begin(Config(out=str(tmp_path / "run")))


OTHER_RUN = [
    ("model", "depth", 3), ("data", "val_size", 5), ("train", "batch_size", 64),
    ("train", "seed", 1), ("train", "freeze", "backbone"), ("optim", "name", "adamw"),
    ("optim", "layer_decay", 0.5),
]  # fmt: skip
MINE, EAGER = {"model": {"attention": "mine.py:A"}}, {"train": {"compile": False}}
# Settings at the start; settings and environment on resuming; the error, or None.
CHANGES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str | None]] = [
    ({}, {}, {}, None),
    ({}, {}, {"processes": 1}, r"processes: 2 -> 1.*--resume\.allow_changes"),
    ({}, {"optim": {"lr": 1e-4}}, {}, r"optim\.lr: 0\.002 -> 0\.0001"),
    # A file of attention may be named by another path, and what auto chooses by its name.
    (MINE, {"model": {"attention": "./code/mine.py:A"}}, {}, None),
    (MINE, {"model": {"attention": "mine.py:B"}}, {}, r"other data .*: mine\.py:A -> mine\.py:B"),
    ({}, {"train": {"precision": "float32"}}, {}, None),
    ({}, {}, {"precision": "torch.bfloat16"}, r"precision: torch\.float32 -> torch\.bfloat16"),
    ({}, {"train": {"timeout_minutes": 60}}, {}, None),  # of waiting, not of results
    (EAGER, {}, {}, None),
    (EAGER, {"train": {"compile": True}}, {}, r"train\.compile: False -> True"),
    *(
        ({}, {group: {key: value}}, {}, rf"unfinished run with other data .*\({group}\.{key}: ")
        for group, key, value in OTHER_RUN
    ),
]


@pytest.mark.parametrize(("began", "goes_on", "where", "words"), CHANGES)
def test_changes_need_permission_and_another_run_is_refused(began, goes_on, where, words, tmp_path):
    base = Config(out=str(tmp_path / "run"))
    begin(changed(base, **began))
    resume = partial(check_run, changed(base, **goes_on), False, HOW | where)
    for allow_changes in (False, True):
        if words is None or (allow_changes and "other data" not in words):
            found = resume(allow_changes)
            assert found is not None and found.step == 7
        else:
            with pytest.raises(ValueError, match=words):
                resume(allow_changes)


def test_a_run_that_was_being_replaced_can_be_started_again(unfinished, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vit.run.folder.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_run(unfinished, resume=False)
    assert (Path(unfinished.out) / "checkpoints").is_dir()
    assert check_run(unfinished, overwrite=False, environment=HOW) is None


def test_config_says_what_earlier_steps_were_trained_with(unfinished):
    slower = changed(unfinished, optim={"lr": 1e-4})
    prepare_run(slower, resume=True, step=7)
    run = prepare_run(slower, resume=True, step=8)  # nothing has changed
    prepare_run(changed(slower, optim={"clip_grad": 1.0}), resume=True, step=9)
    assert (run / "config.yaml").read_text().splitlines()[:3] == [
        "# changed after step 7: optim.lr: 0.002 -> 0.0001",
        "# changed after step 9: optim.clip_grad: None -> 1.0",
        f"out: {run}",
    ]
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == 1e-4
    assert list((run / "checkpoints").iterdir())
    prepare_run(unfinished, resume=False)
    assert not (run / "config.yaml").read_text().startswith("#")


def test_finished_run_is_refused(unfinished):
    (Path(unfinished.out) / "model.safetensors").touch()
    words = r"finished run; .*vit-eval.* --model\.pretrained .*--out.*--overwrite"
    with pytest.raises(ValueError, match=words):
        check_run(unfinished, overwrite=False, environment=HOW, allow_changes=True)
    assert check_run(unfinished, overwrite=True, environment=HOW) is None


def test_the_report_of_a_run_whose_weights_were_deleted_is_kept(tmp_path):
    run = prepare_run(Config(out=str(tmp_path / "run")), resume=False)
    (run / "eval").mkdir()
    (run / "eval" / "report.json").touch()
    with pytest.raises(ValueError, match=r"the report of a finished run without its model\.safe"):
        check_run(Config(out=str(run)), overwrite=False, environment=HOW)


def test_a_folder_in_which_nothing_can_be_locked_is_one_line(tmp_path, monkeypatch):
    def refuse(_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(ValueError, match=r"cannot write to .*not permitted.*another --out"):
        lock_run(tmp_path / "run").__enter__()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_another_program_is_refused_and_left_alone(tmp_path, overwrite):
    (tmp_path / "thesis.tex").write_text("precious")
    text = "out: x\ndata: {}\nmodel: {}\noptim: {}\ntrain: {}"
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match="contains files other than a run"):
        train(small(tmp_path), overwrite=overwrite)
    with pytest.raises(ValueError, match="is a file"):
        train(small(tmp_path / "thesis.tex"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "thesis.tex"]
