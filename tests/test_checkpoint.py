"""Files: whole or not at all, never executed, and refused by name when they are not ours."""

import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from vit.config import Config, to_dict
from vit.training import checkpoint
from vit.training.checkpoint import (
    build_model,
    latest_checkpoint,
    load_model,
    read_checkpoint,
    save_checkpoint,
    save_model,
    write_atomically,
)

CLASSES = ("cat", "dog", "frog")


@pytest.fixture
def config() -> Config:
    config = Config()
    return replace(config, model=replace(config.model, embed_dim=24, depth=1))


def state(config: Config) -> dict[str, Any]:
    model = build_model(config, len(CLASSES)).state_dict()
    return {"model": model, "ema": None, "config": to_dict(config), "classes": list(CLASSES)}


def test_model_comes_back_whole_from_its_file_alone(config: Config, tmp_path: Path) -> None:
    model = build_model(config, len(CLASSES)).eval()
    save_model(tmp_path / "model.safetensors", model, config, CLASSES, step=7)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        saved = load_model(path)
        assert (saved.config, saved.classes, saved.step) == (config, CLASSES, 7)
        assert not saved.model.training
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(saved.model(images), model(images))


def test_average_of_a_checkpoint_is_preferred(config: Config, tmp_path: Path) -> None:
    values = state(config)
    values["ema"] = {k: torch.zeros_like(v) for k, v in values["model"].items()}
    save_checkpoint(tmp_path, 1, values)
    assert all((p == 0).all() for p in load_model(tmp_path).model.parameters())


def test_last_two_checkpoints_are_kept_and_the_newest_is_taken(
    config: Config, tmp_path: Path
) -> None:
    for step in (5, 10, 1000):
        save_checkpoint(tmp_path, step, state(config))
    names = [path.name for path in sorted((tmp_path / "checkpoints").iterdir())]
    assert names == ["step_00000010.pt", "step_00001000.pt"]
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest[1]["step"] == 1000


def test_broken_checkpoint_falls_back_to_the_one_before(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, 5, state(config))
    save_checkpoint(tmp_path, 10, state(config))
    newest = tmp_path / "checkpoints" / "step_00000010.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    found = latest_checkpoint(tmp_path)
    assert found is not None and found[1]["step"] == 5
    assert "step_00000010.pt is not a checkpoint, or is damaged" in capsys.readouterr().err
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickle_that_would_run_code_is_refused(config: Config, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    buffer = io.BytesIO()
    torch.save({"step": 1, **state(config), "extra": Payload(proof)}, buffer)
    (tmp_path / "evil.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"evil\.pt is not a checkpoint"):
        read_checkpoint(tmp_path / "evil.pt")
    assert not proof.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert proof.exists()  # it would have run


def test_other_peoples_files_are_refused_by_name(config: Config, tmp_path: Path) -> None:
    files = {
        "weights.safetensors": safetensors.torch.save({"w": torch.zeros(2)}),
        "noise.safetensors": b"\x00" * 100,
        "noise.pt": b"\x00" * 100,
        "pickle.pt": pickle.dumps({"a": 1}),
        "empty.pt": b"",
    }
    buffer = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, buffer)
    files["state_dict.pt"] = buffer.getvalue()
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=name):
            load_model(tmp_path / name)


def test_weights_that_do_not_fit_their_config_are_refused(config: Config, tmp_path: Path) -> None:
    model = build_model(config, len(CLASSES))
    wider = replace(config, model=replace(config.model, embed_dim=48))
    save_model(tmp_path / "model.safetensors", model, wider, CLASSES, step=0)
    with pytest.raises(ValueError, match="do not fit"):
        load_model(tmp_path)
