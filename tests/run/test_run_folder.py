"""The run folder belongs to one process at a time; see test_train.py for refusals."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vit.config import Config, to_dict
from vit.run.checkpoint import Checkpoint, save_checkpoint
from vit.run.folder import LOCK_FILE, check_run, lock_run, prepare_run

HOW = {"processes": 2, "device": "cpu", "precision": "torch.float32"}
ALONE = {**HOW, "processes": 1}


def test_lock_keeps_others_out_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "a" / "b" / "run"
    with lock_run(run):
        refusal = re.escape(f"{run} is being written by another process; ")
        with pytest.raises(ValueError, match=refusal), lock_run(run):
            pass
        assert (run / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []  # the folders were made for it


def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
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


@pytest.fixture
def unfinished(tmp_path: Path) -> Config:
    """A run that two processes have begun."""
    config = Config(out=str(tmp_path / "run"))
    prepare_run(config, resume=False)
    weights = {"w": torch.zeros(1)}
    checkpoint = Checkpoint(7, to_dict(config), ["a"], weights, environment=HOW)
    save_checkpoint(tmp_path / "run", checkpoint)
    return config


def test_changes_are_refused_unless_allowed_and_become_the_run_s_config(unfinished: Config) -> None:
    found = check_run(unfinished, overwrite=False, environment=HOW)
    assert found is not None and found.step == 7
    changed = replace(unfinished, optim=replace(unfinished.optim, lr=1e-4))
    for config, how, words in (
        (unfinished, ALONE, r"processes: 2 -> 1.*--resume\.allow_changes"),
        (changed, HOW, r"optim\.lr: 0\.002 -> 0\.0001"),
    ):
        with pytest.raises(ValueError, match=words):
            check_run(config, overwrite=False, environment=how)
        found = check_run(config, overwrite=False, environment=how, allow_changes=True)
        assert found is not None and found.step == 7
    run = prepare_run(changed, resume=True, step=7)
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == 1e-4
    assert list((run / "checkpoints").iterdir())


def test_a_file_of_attention_may_be_named_by_another_path(tmp_path: Path) -> None:
    first, again, other = (
        Config(**{"out": str(tmp_path / "run"), "model": {"attention": name}})
        for name in ("mine.py:A", "./code/mine.py:A", "mine.py:B")
    )
    prepare_run(first, resume=False)
    save_checkpoint(tmp_path / "run", Checkpoint(7, to_dict(first), ["a"], {}, environment=HOW))
    assert check_run(again, overwrite=False, environment=HOW) is not None
    with pytest.raises(ValueError, match=r"model\.attention: mine\.py:A -> mine\.py:B"):
        check_run(other, overwrite=False, environment=HOW)


def test_a_precision_that_auto_chose_may_be_named(unfinished: Config) -> None:
    """As on a machine where auto chooses another one."""
    named = replace(unfinished, train=replace(unfinished.train, precision="float32"))
    assert check_run(named, overwrite=False, environment=HOW) is not None
    with pytest.raises(ValueError, match=r"precision: torch\.float32 -> torch\.bfloat16"):
        check_run(unfinished, overwrite=False, environment={**HOW, "precision": "torch.bfloat16"})


def test_a_run_that_was_being_replaced_can_be_started_again(
    unfinished: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vit.run.folder.write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare_run(unfinished, resume=False)
    assert (Path(unfinished.out) / "checkpoints").is_dir()
    assert check_run(unfinished, overwrite=False, environment=HOW) is None


def test_config_says_what_earlier_steps_were_trained_with(unfinished: Config) -> None:
    changed = replace(unfinished, optim=replace(unfinished.optim, lr=1e-4))
    prepare_run(changed, resume=True, step=7)
    run = prepare_run(changed, resume=True, step=8)  # nothing has changed
    prepare_run(replace(changed, optim=replace(changed.optim, clip_grad=1.0)), resume=True, step=9)
    assert (run / "config.yaml").read_text().splitlines()[:3] == [
        "# changed after step 7: optim.lr: 0.002 -> 0.0001",
        "# changed after step 9: optim.clip_grad: None -> 1.0",
        f"out: {run}",
    ]
    prepare_run(unfinished, resume=False)
    assert not (run / "config.yaml").read_text().startswith("#")


def test_auto_resumes_a_run_that_is_compiled_or_not(unfinished: Config) -> None:
    eager, compiled = (
        replace(unfinished, train=replace(unfinished.train, compile=how)) for how in (False, True)
    )
    prepare_run(eager, resume=False)
    save_checkpoint(Path(eager.out), Checkpoint(1, to_dict(eager), ["a"], {}, environment=HOW))
    assert check_run(unfinished, overwrite=False, environment=HOW) is not None
    with pytest.raises(ValueError, match=r"train\.compile: False -> True"):
        check_run(compiled, overwrite=False, environment=HOW)


def test_finished_run_is_refused(unfinished: Config) -> None:
    (Path(unfinished.out) / "model.safetensors").touch()
    words = r"finished run; .*vit-eval.* --model\.pretrained .*--out.*--overwrite"
    with pytest.raises(ValueError, match=words):
        check_run(unfinished, overwrite=False, environment=HOW, allow_changes=True)
    assert check_run(unfinished, overwrite=True, environment=HOW) is None


def test_the_report_of_a_run_whose_weights_were_deleted_is_kept(tmp_path: Path) -> None:
    run = prepare_run(Config(out=str(tmp_path / "run")), resume=False)
    (run / "eval").mkdir()
    (run / "eval" / "report.json").touch()
    with pytest.raises(ValueError, match=r"the report of a finished run without its model\.safe"):
        check_run(Config(out=str(run)), overwrite=False, environment=HOW)


def test_a_folder_in_which_nothing_can_be_locked_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with pytest.raises(ValueError, match=r"cannot write to .*not permitted.*another --out"):
        lock_run(tmp_path / "run").__enter__()


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("model", {"depth": 3}), ("data", {"val_size": 5}), ("train", {"batch_size": 64}),
        ("train", {"seed": 1}), ("train", {"freeze": "backbone"}), ("optim", {"name": "adamw"}),
        ("optim", {"layer_decay": 0.5}),
    ],
)  # fmt: skip
def test_other_data_or_another_model_is_refused_even_if_changes_are_allowed(
    unfinished: Config, group: str, changes: dict[str, Any]
) -> None:
    other = replace(unfinished, **{group: replace(getattr(unfinished, group), **changes)})
    (key,) = changes
    words = rf"an unfinished run with other data .*\({group}\.{key}: "
    with pytest.raises(ValueError, match=words):
        check_run(other, overwrite=False, environment=HOW, allow_changes=True)


def test_a_copy_of_a_checkpoint_and_a_config_of_another_program_are_kept(
    unfinished: Config, tmp_path: Path
) -> None:
    run, copy = Path(unfinished.out), Path(unfinished.out) / "checkpoints/step_00000007_best.pt"
    shutil.copy(next(run.glob("checkpoints/*.pt")), copy)
    prepare_run(unfinished, resume=False)
    assert [*run.glob("checkpoints/*")] == [copy]
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.yaml").write_text("out: x\ndata: {}\nmodel: {}\noptim: {}\ntrain: {}\n")
    with pytest.raises(ValueError, match="files other than a run"):
        check_run(replace(unfinished, out=str(other)), overwrite=True, environment=HOW)
