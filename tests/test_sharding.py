"""Models shared by processes: copies and parts train as a single process does."""

import dataclasses
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from small_runs import StopAt, small
from vit.distributed.shard import choose_parallel, replicate, to_full, to_local
from vit.distributed.stop import Stopped
from vit.distributed.world import World
from vit.model_file import load_model
from vit.run.checkpoint import (
    checkpoint_paths,
    checkpoint_steps,
    latest_checkpoint,
    read_checkpoint,
)
from vit.run.sharded import STATE_FILE, SUMS_FILE
from vit.training.compile import missing_tool
from vit.training.config import Config
from worlds import in_world, keep_losses, loop_of, with_parallel

CPU = torch.device("cpu")
LOSS = 1e-4  # difference of losses that rounding explains
SHORT: dict[str, dict[str, Any]] = {  # without batch norm
    "data": {"name": "shapes", "val_size": 20, "train_size": 192},
    "model": {"stem": "linear", "embed_dim": 26},
    "augment": {"rand_ops": 1},
    "train": {"epochs": 2, "batch_size": 32, "accumulate": 2, "whiten": False},
    "track": {"probes": 0},
}  # fmt: skip


def short(out: Path, **changes: dict[str, Any]) -> Config:
    parts = {key: {**values, **changes.get(key, {})} for key, values in SHORT.items()}
    return small(out, **parts)


class Shared(NamedTuple):
    """A run of several processes.

    Attributes:
        config: Its config.
        weights: The file to write.
        local: Number of processes on each machine.
        overlap: Whether to average gradients during the backward pass, as on a GPU.
    """

    config: Config
    weights: Path
    local: int
    overlap: bool = False


def train_each(world: World, runs: list[Shared]) -> None:
    """Train, and write the losses, weights and moving averages."""
    for run in runs:
        os.environ["LOCAL_WORLD_SIZE"] = str(run.local)
        train_and_write(world, run.config, run.weights, run.overlap)


def train_and_write(world: World, config: Config, weights: Path, overlap: bool = False) -> None:
    """Train, and write the losses, weights and moving averages."""
    with loop_of(config, world) as loop:
        if overlap:
            loop.step = dataclasses.replace(loop.step, forward=replicate(loop.step.forward))
        losses = keep_losses(loop)
        loop.run()
        state = loop.step.state
        tensors = {name: to_full(tensor).clone() for name, tensor in state.tensors().items()}
    if world.main:
        torch.save({"losses": torch.stack(losses), **tensors}, weights)


def alone(config: Config, weights: Path) -> dict[str, Tensor]:
    """Train in this process."""
    train_and_write(World(), config, weights)
    return dict(torch.load(weights, weights_only=True))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=LOSS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=5e-3, msg=name)


SHARED = {  # number of processes, of those on each machine, and whether exchanges overlap
    "copies": ("replicate", 2, 2, False),
    "copies that overlap": ("replicate", 2, 2, True),
    "two parts": ("shard", 2, 2, False),
    "four parts": ("shard", 4, 4, False),
    "two machines": ("hybrid", 4, 2, False),
}
OPTIMIZERS = ("muon", "adamw")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process and of several, with both optimizers."""
    folder = tmp_path_factory.mktemp("trained")
    for name in OPTIMIZERS:
        alone(short(folder / name, optim={"name": name}), folder / f"{name}.pt")
    for count in (2, 4):
        runs = [
            Shared(
                with_parallel(short(folder / f"{name} {kind}", optim={"name": name}), parallel),
                folder / f"{name} {kind}.pt", local, overlap,
            )
            for name in OPTIMIZERS
            for kind, (parallel, size, local, overlap) in SHARED.items() if size == count
        ]  # fmt: skip
        in_world(count, folder, train_each, runs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", SHARED)
def test_processes_train_as_one_does(trained: Path, kind: str, name: str) -> None:
    expected = dict(torch.load(trained / f"{name}.pt", weights_only=True))
    run = trained / f"{name} {kind}"
    assert_near(dict(torch.load(f"{run}.pt", weights_only=True)), expected)
    assert len(expected["losses"]) == 12
    assert checkpoint_steps(run) == [6, 12]
    model = load_model(run)  # which knows nothing of processes
    for key, tensor in model.classifier.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[f"ema.{key}"], rtol=0, atol=5e-3)


@pytest.mark.slow
@pytest.mark.skipif(missing_tool(CPU) is not None, reason="there is no compiler")
def test_parts_whose_blocks_are_compiled_train_as_one_process_does(tmp_path: Path) -> None:
    one_size: dict[str, Any] = {"small_share": 0, "epochs": 1}
    runs = {
        compiled: short(tmp_path / str(compiled), train={**one_size, "compile": compiled})
        for compiled in (False, True)
    }
    expected = alone(runs[False], tmp_path / "alone.pt")
    shared = Shared(with_parallel(runs[True], "shard"), tmp_path / "parts.pt", local=2)
    in_world(2, tmp_path, train_each, [shared])
    assert_near(dict(torch.load(tmp_path / "parts.pt", weights_only=True)), expected)
    checkpoint = latest_checkpoint(tmp_path / "True")
    assert checkpoint is not None and checkpoint.environment["compiled"]


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    expected = alone(short(tmp_path / "alone"), tmp_path / "alone.pt")
    config = with_parallel(short(tmp_path / "run"), "shard")
    in_world(4, tmp_path, train_to, config, 8)  # in the middle of an epoch
    assert checkpoint_steps(tmp_path / "run") == [6, 8]
    shutil.copytree(tmp_path / "run", tmp_path / "two")
    pair = dataclasses.replace(config, out=str(tmp_path / "two"))
    in_world(2, tmp_path, train_and_write, pair, tmp_path / "two.pt")
    one = alone(config, tmp_path / "one.pt")
    for found in (dict(torch.load(tmp_path / "two.pt", weights_only=True)), one):
        assert_near({**found, "losses": expected["losses"]}, expected)
        torch.testing.assert_close(found["losses"], expected["losses"][8:], rtol=0, atol=LOSS)
    # What a single process writes is one file again.
    assert [path.suffix for path in checkpoint_paths(tmp_path / "run")] == ["", ".pt"]


def train_to(world: World, config: Config, steps: int) -> None:
    """Train some steps and save, as a signal makes a run do."""
    with loop_of(config, world, StopAt(steps)) as loop, pytest.raises(Stopped):
        loop.stop.state = loop.step.state  # type: ignore[attr-defined]
        loop.run()


@pytest.mark.slow
def test_the_same_number_of_processes_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = with_parallel(short(tmp_path / "whole"), "shard")
    in_world(2, tmp_path, train_and_write, config, tmp_path / "whole.pt")
    config = dataclasses.replace(config, out=str(tmp_path / "parts"))
    in_world(2, tmp_path, train_to, config, 8)
    in_world(2, tmp_path, train_and_write, config, tmp_path / "parts.pt")
    whole_run, parts = (
        dict(torch.load(tmp_path / f"{name}.pt", weights_only=True)) for name in ("whole", "parts")
    )
    assert torch.equal(whole_run.pop("losses")[8:], parts.pop("losses"))
    assert whole_run.keys() == parts.keys()
    for name, tensor in whole_run.items():
        assert torch.equal(tensor, parts[name]), name


def save_and_train_on(world: World, config: Config) -> None:
    """Save, change everything before it is written, and compare what was written."""
    with loop_of(config, world) as loop:
        saver, state = loop.saver, loop.step.state
        tensors = state.tensors()
        before = {name: to_local(tensor).clone() for name, tensor in tensors.items()}
        saver.save()
        for tensor in tensors.values():
            to_local(tensor).detach().zero_()
        saver.wait()
    with loop_of(config, world) as resumed:
        found = resumed.step.state.tensors()
        for name, tensor in before.items():
            assert torch.equal(to_local(found[name]), tensor), name


@pytest.mark.slow
def test_a_checkpoint_is_of_the_moment_it_was_started(tmp_path: Path) -> None:
    in_world(2, tmp_path, save_and_train_on, with_parallel(short(tmp_path / "run"), "shard"))
    (path,) = checkpoint_paths(tmp_path / "run")
    state = json.loads((path / STATE_FILE).read_text())
    assert state["step"] == 0 and state["environment"]["processes"] == 2


def fill_up_a_disk(world: World, config: Config) -> None:
    """Train while one process can write no more than a few bytes, and then with more room."""
    with loop_of(config, world) as loop:
        first = loop.saver.save

        def save() -> None:
            small_disk = world.rank == 1 and loop.step.state.step < 12
            limit = 100 if small_disk else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            first()
            loop.saver.wait()

        loop.saver.save = save  # type: ignore[method-assign]
        loop.run()
        assert loop.save_error is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_process_that_cannot_write_does_not_end_the_run(tmp_path: Path) -> None:
    in_world(2, tmp_path, fill_up_a_disk, with_parallel(short(tmp_path / "run"), "shard"))
    assert checkpoint_steps(tmp_path / "run") == [12]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two processes have stopped, with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("sharded")
    in_world(2, folder, train_to, with_parallel(short(folder / "run"), "shard"), 8)
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "damage"), [(0, cut), (1, flip), (2, Path.unlink), (3, flip)])
def test_a_damaged_checkpoint_is_passed_over(
    saved: Path,
    tmp_path: Path,
    damage: Callable[[Path], None],
    number: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(saved, tmp_path / "run")
    older, newer = checkpoint_paths(tmp_path / "run")
    files = sorted(newer.iterdir())
    assert [path.name for path in files[::3]] == [SUMS_FILE, STATE_FILE] and len(files) == 4
    damage(files[number])
    found = latest_checkpoint(tmp_path / "run")
    assert found is not None and (found.step, found.folder) == (6, older)
    assert f"warning: {newer} is damaged" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is damaged"):
        read_checkpoint(newer)
    with pytest.raises(ValueError, match="is damaged"):
        load_model(newer)
    damage(older / SUMS_FILE)
    with pytest.raises(ValueError, match="none of its checkpoints can be read"):
        latest_checkpoint(tmp_path / "run")


@pytest.mark.parametrize(
    ("choice", "size", "local", "expected"),
    [
        ("auto", 1, 1, "replicate"), ("auto", 4, 4, "replicate"), ("shard", 1, 1, "replicate"),
        ("shard", 4, 4, "shard"), ("replicate", 4, 2, "replicate"), ("hybrid", 4, 2, "hybrid"),
    ],
)  # fmt: skip
def test_how_a_model_is_shared(
    choice: Any, size: int, local: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert choose_parallel(choice, World(0, size), CPU, 10**9) == expected


@pytest.mark.parametrize(("size", "local"), [(4, 4), (1, 1), (5, 2)])
def test_hybrid_needs_equal_machines(
    size: int, local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    with pytest.raises(ValueError, match=r"train\.parallel: hybrid needs several machines"):
        choose_parallel("hybrid", World(0, size), CPU, 10)


@pytest.mark.parametrize(("num_weights", "expected"), [(10**9, "replicate"), (3 * 10**9, "shard")])
def test_a_model_too_large_for_a_gpu_is_sharded(
    num_weights: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 10**9, 80 * 10**9

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    monkeypatch.setattr(World, "agree", lambda _, choice: choice)  # the other process is not there
    found = choose_parallel("auto", World(0, 2), torch.device("cuda"), num_weights)
    assert found == expected


def train_in_bfloat16(world: World, config: Config, losses: Path) -> None:
    """Train a model with batch norm and learned positions in bfloat16, and write the losses."""
    with loop_of(config, world, precision=torch.bfloat16) as loop:
        loop.run()
    if world.main:
        torch.save(torch.stack(loop.step.state.points)[:, 0], losses)


@pytest.mark.slow
def test_bfloat16_shards_learn_what_copies_do(tmp_path: Path) -> None:
    losses = {}
    for parallel in ("replicate", "shard"):
        convolutional = short(tmp_path / parallel, model={"stem": "conv"}, train={"epochs": 1})
        config = with_parallel(convolutional, parallel)
        in_world(2, tmp_path, train_in_bfloat16, config, tmp_path / f"{parallel}.pt")
        losses[parallel] = torch.load(tmp_path / f"{parallel}.pt", weights_only=True)
    assert len(losses["shard"]) == 6
    torch.testing.assert_close(losses["shard"], losses["replicate"], rtol=0, atol=0.03)
