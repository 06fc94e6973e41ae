"""The run folder belongs to one process at a time; see test_train.py for refusals."""

import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vit.run.checkpoint import Checkpoint, save_checkpoint
from vit.run.folder import LOCK_FILE, OWNER_FILE, lock_run, prepare_run
from vit.run.resume import check_run
from vit.training.config import Config, to_dict

HOW = {"processes": 2, "device": "cpu", "precision": "torch.float32"}
ALONE = {**HOW, "processes": 1}


def test_lock_names_its_owner_and_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "a" / "b" / "run"
    with lock_run(run):
        owner = (run / OWNER_FILE).read_text()
        assert owner == f"process {os.getpid()} on {socket.gethostname()}"
        refusal = re.escape(f"{run} is being written by {owner}; ")
        with pytest.raises(ValueError, match=refusal), lock_run(run):
            pass
        assert (run / OWNER_FILE).read_text() == owner
        assert (run / LOCK_FILE).exists()
    assert list(tmp_path.iterdir()) == []  # the folders were made for it


@pytest.mark.slow
def test_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from vit.run.folder import lock_run\n"
        "with lock_run(Path(sys.argv[1])):\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    run = tmp_path / "run"
    dead = subprocess.run([sys.executable, "-c", program, str(run)])
    assert dead.returncode == -9
    assert (run / LOCK_FILE).exists()
    assert (run / OWNER_FILE).read_text().startswith("process ")
    assert check_run(Config(out=str(run)), overwrite=False, environment=HOW) is None
    with lock_run(run):
        assert str(os.getpid()) in (run / OWNER_FILE).read_text()


@pytest.fixture
def unfinished(tmp_path: Path) -> Config:
    """A run that two processes have begun."""
    config = Config(out=str(tmp_path / "run"))
    prepare_run(config, resume=False)
    checkpoint = Checkpoint(
        step=7, config=to_dict(config), classes=["a"], model={"w": torch.zeros(1)}, environment=HOW
    )
    save_checkpoint(tmp_path / "run", checkpoint)
    return config


def test_other_number_of_processes_is_refused_unless_allowed(unfinished: Config) -> None:
    found = check_run(unfinished, overwrite=False, environment=HOW)
    assert found is not None and found.step == 7
    with pytest.raises(ValueError, match=r"processes: 2 -> 1.*--resume\.allow_changes"):
        check_run(unfinished, overwrite=False, environment=ALONE)
    found = check_run(unfinished, overwrite=False, environment=ALONE, allow_changes=True)
    assert found is not None and found.step == 7


def test_allowed_changes_become_the_run_s_config(unfinished: Config) -> None:
    changed = replace(unfinished, optim=replace(unfinished.optim, lr=1e-4))
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.002 -> 0\.0001"):
        check_run(changed, overwrite=False, environment=HOW)
    assert check_run(changed, overwrite=False, environment=HOW, allow_changes=True) is not None
    run = prepare_run(changed, resume=True, step=7)
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["lr"] == 1e-4
    assert list((run / "checkpoints").iterdir())


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


def test_run_of_a_version_without_a_key_is_resumed(unfinished: Config) -> None:
    file = Path(unfinished.out) / "config.yaml"
    values = yaml.safe_load(file.read_text())
    del values["train"]["freeze"], values["optim"]["layer_decay"]
    file.write_text(yaml.safe_dump(values))
    assert check_run(unfinished, overwrite=False, environment=HOW) is not None


def test_finished_run_is_refused(unfinished: Config) -> None:
    (Path(unfinished.out) / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"finished run; .* --model\.pretrained "):
        check_run(unfinished, overwrite=False, environment=HOW, allow_changes=True)
    assert check_run(unfinished, overwrite=True, environment=HOW) is None


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
    with pytest.raises(
        ValueError, match=rf"an unfinished run with other data .*\({group}\.{key}: "
    ):
        check_run(other, overwrite=False, environment=HOW, allow_changes=True)


def test_run_of_an_earlier_version_whose_schedule_starts_over_is_refused(
    unfinished: Config,
) -> None:
    """It would go on with another schedule; without restarts, the key changes nothing."""
    for restarts, refused in (([], False), ([5], True)):
        values = to_dict(unfinished)
        values["train"]["restarts"] = restarts
        run = Path(unfinished.out)
        (run / "config.yaml").write_text(yaml.safe_dump(values))
        checkpoint = Checkpoint(8, values, ["a"], {"w": torch.zeros(1)}, environment=HOW)
        save_checkpoint(run, checkpoint)
        if refused:
            with pytest.raises(ValueError, match=r"train\.restarts"):
                check_run(unfinished, overwrite=False, environment=HOW, allow_changes=True)
        else:
            assert check_run(unfinished, overwrite=False, environment=HOW) is not None
