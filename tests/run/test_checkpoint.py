"""Checkpoints and model files: atomic, never executed, and foreign ones refused by name."""

import io
import pickle
import shutil
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

from benchmarks.scale.soak import checkpoint_steps
from small_runs import Payload, changed
from vit.classifier import Classifier, build_model
from vit.config import Config, to_dict
from vit.data.preprocess import Preprocess
from vit.files import seal
from vit.model_file import save_model
from vit.pretrained.load import load as load_model
from vit.run.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from vit.run.sharded import finish_writing, read_state

CLASSES = ("cat", "dog", "frog")
PREPROCESS = Preprocess((32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear")


@pytest.fixture
def config() -> Config:
    return changed(Config(), model={"embed_dim": 24, "depth": 1})


def new_classifier(config: Config) -> Classifier:
    model = build_model(config.model, PREPROCESS, len(CLASSES)).eval()
    return Classifier(model, PREPROCESS, CLASSES, torch.device("cpu"), torch.float32)


def state(config: Config, step: int = 1) -> Checkpoint:
    model = build_model(config.model, PREPROCESS, len(CLASSES)).state_dict()
    about = {"config": to_dict(config), "classes": list(CLASSES)}
    return Checkpoint(step=step, model=model, preprocess=to_dict(PREPROCESS), **about)


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_model_comes_back_whole_from_its_file_alone(config, tmp_path):
    classifier = new_classifier(config)
    save_model(tmp_path / "model.safetensors", classifier, config, step=7)
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        saved = load_model(path, "cpu", "float32")
        assert (saved.config, saved.step, saved.run) == (config, 7, tmp_path)
        assert saved.finished and saved.name == tmp_path.name
        assert (saved.classes, saved.preprocess) == (CLASSES, PREPROCESS)
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(saved.model(images), classifier.model(images))


def test_average_of_a_checkpoint_is_preferred(config, tmp_path):
    values = state(config)
    zeros = {k: torch.zeros_like(v) for k, v in values.model.items()}
    save_checkpoint(tmp_path, replace(values, ema=zeros))
    saved = load_model(tmp_path)
    assert all((p == 0).all() for p in saved.model.parameters())
    assert saved.preprocess == PREPROCESS


def test_a_checkpoint_is_in_memory_once_besides_its_tensors(config, tmp_path):
    large = replace(state(config), model={"weight": torch.zeros(10**6)})
    path = tmp_path / "checkpoints" / "step_00000001.pt"
    for work in (partial(save_checkpoint, tmp_path, large), partial(read_checkpoint, path)):
        tracemalloc.start()
        work()
        _, most = tracemalloc.get_traced_memory()  # without torch's tensors
        tracemalloc.stop()
        assert 4 * 10**6 < most < 6 * 10**6


def test_last_two_checkpoints_are_kept_and_the_newest_that_can_be_read_is_taken(
    config, tmp_path, capsys
):
    assert latest_checkpoint(tmp_path) is None
    for step in (5, 10, 1000):
        save_checkpoint(tmp_path, state(config, step))
    assert checkpoint_steps(tmp_path) == [10, 1000]
    own = tmp_path / "checkpoints" / "step_00000010_best.pt"
    shutil.copy(own.with_name("step_00000010.pt"), own)
    newest = tmp_path / "checkpoints" / "step_00001000.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.step == 10
    assert (
        "step_00001000.pt is not a checkpoint of this project, or is damaged"
        in capsys.readouterr().err
    )
    save_checkpoint(tmp_path, state(config, 70))  # the damaged one after it goes
    assert checkpoint_steps(tmp_path) == [10, 70] and own.exists()  # what others put there stays


def test_pickle_that_would_run_code_is_refused(config, tmp_path):
    proof = tmp_path / "proof"
    evil = torch_bytes({**vars(state(config)), "extra": Payload(proof)})
    for data in (evil, seal(io.BytesIO(evil))):
        (tmp_path / "evil.pt").write_bytes(data)
        with pytest.raises(ValueError, match=r"evil\.pt is not a checkpoint"):
            read_checkpoint(tmp_path / "evil.pt")
        assert not proof.exists()
    torch.load(tmp_path / "evil.pt", weights_only=False)
    assert proof.exists()  # it would have run


def test_other_peoples_files_are_refused_by_name(config, tmp_path):
    timms = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=24).state_dict()
    files = {
        "w.safetensors": (safetensors.torch.save({"w": torch.zeros(2)}), "contains only weights"),
        "noise.safetensors": (b"\x00" * 100, "is not a safetensors file"),
        "state_dict.pt": (torch_bytes({"weight": torch.zeros(2)}), "of this project"),
        "timm.pth": (torch_bytes({"epoch": 3, "state_dict": timms}), "--model.pretrained FILE"),
        "tensor.pt": (torch_bytes(torch.zeros(3)), "is not a checkpoint"),
        "noise.pt": (b"\x00" * 100, "is not a checkpoint"),
        "pickle.pt": (pickle.dumps({"a": 1}), "is not a checkpoint"),
        "empty.pt": (b"", "is not a checkpoint"),
        "unsealed.pt": (torch_bytes(vars(state(config))), "is damaged"),
    }
    for name, (content, reason) in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} .*{reason}"):
            load_model(tmp_path / name)


def test_no_flipped_bit_and_no_cut_is_overlooked(config, tmp_path):
    save_model(tmp_path / "model.safetensors", new_classifier(config), config, step=1)
    save_checkpoint(tmp_path, state(config, 1))
    random = np.random.default_rng(0)
    for whole in (tmp_path / "model.safetensors", tmp_path / "checkpoints" / "step_00000001.pt"):
        load_model(whole)
        data, damaged = whole.read_bytes(), tmp_path / f"damaged{whole.suffix}"
        # Half of the flips fall on the names and numbers around the weights, where a reader that
        # trusts them goes wrong: the first bytes and the last.
        bits = random.integers(0, 8 * len(data), 200)
        bits[:50], bits[50:100] = bits[:50] % 4096, -1 - bits[50:100] % 4096
        for bit in bits.tolist():
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            damaged.write_bytes(flipped)
            with pytest.raises(ValueError, match=damaged.name):
                load_model(damaged)
        for length in random.integers(0, len(data), 50).tolist():
            damaged.write_bytes(data[:length])
            with pytest.raises(ValueError, match=damaged.name):
                load_model(damaged)


def test_a_folder_whose_sums_do_not_match_is_damaged(tmp_path):
    draft, folder = tmp_path / "draft", tmp_path / "step_00000003"
    draft.mkdir()
    (draft / "shard.safetensors").write_bytes(b"weights")
    finish_writing(draft, {"step": 3}, folder)
    assert read_state(folder) == {"step": 3}
    (folder / "shard.safetensors").write_bytes(b"weighty")
    with pytest.raises(ValueError, match=r"is damaged: shard\.safetensors does not match"):
        read_state(folder)
