"""Models shared by processes: copies and parts train as a single process does."""

import dataclasses
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_runs import StopAt, small
from vit.distributed.shard import replicate, shards, to_full
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
from vit.training.config import Config, from_dict
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


def train_and_write(world: World, config: Config, weights: Path, overlap: bool = False) -> None:
    """Train, and write the losses, weights and moving averages.

    With `overlap`, gradients are averaged during the backward pass, as on a GPU.
    """
    loop = loop_of(config, world)
    if overlap:
        loop.step = dataclasses.replace(loop.step, forward=replicate(loop.step.forward))
    losses = keep_losses(loop)
    loop.run()
    tensors = loop.step.state.tensors()
    whole = {name: to_full(tensor).clone() for name, tensor in tensors.items()}
    if world.main:
        torch.save({"losses": torch.stack([*losses.values()]), **whole}, weights)


def train_all(world: World, folder: Path) -> None:
    for kind, (parallel, overlap) in SHARED.items():
        config = with_parallel(short(folder / kind), parallel)
        train_and_write(world, config, folder / f"{kind}.pt", overlap)


def alone(config: Config, weights: Path) -> dict[str, Tensor]:
    """Train in this process."""
    train_and_write(World(), config, weights)
    return read(weights)


def read(weights: Path) -> dict[str, Tensor]:
    return dict(torch.load(weights, weights_only=True))


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=LOSS)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=5e-3, msg=name)


# How the model is shared, and whether exchanges overlap with the backward pass.
SHARED = {
    "copies": ("replicate", False),
    "overlapping": ("replicate", True),
    "parts": ("shard", False),
}


@pytest.mark.slow
def test_processes_train_as_one_does(tmp_path: Path) -> None:
    expected = alone(short(tmp_path / "alone"), tmp_path / "alone.pt")
    assert len(expected["losses"]) == 12
    in_world(2, tmp_path, train_all, tmp_path)
    for kind in SHARED:
        assert_near(read(tmp_path / f"{kind}.pt"), expected)
        assert checkpoint_steps(tmp_path / kind) == [6, 12]
        model = load_model(tmp_path / kind)  # which knows nothing of processes
        for key, tensor in model.classifier.model.state_dict().items():
            torch.testing.assert_close(tensor, expected[f"ema.{key}"], rtol=0, atol=5e-3)


def train_compiled(world: World, config: Config, weights: Path) -> None:
    """Train with blocks that torch traces, but does not hand to a compiler, which takes minutes."""
    trace = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block, **_: trace(block, dynamic=False, backend="eager")  # type: ignore[method-assign, assignment]
    train_and_write(world, config, weights)


@pytest.mark.slow
@pytest.mark.skipif(missing_tool(CPU) is not None, reason="there is no compiler")
def test_parts_whose_blocks_are_compiled_train_as_one_process_does(tmp_path: Path) -> None:
    expected = alone(short(tmp_path / "alone", train={"epochs": 1}), tmp_path / "alone.pt")
    config = short(tmp_path / "run", train={"epochs": 1, "compile": True})
    in_world(2, tmp_path, train_compiled, with_parallel(config, "shard"), tmp_path / "parts.pt")
    assert_near(read(tmp_path / "parts.pt"), expected)
    checkpoint = latest_checkpoint(tmp_path / "run")
    assert checkpoint is not None and checkpoint.environment["compiled"]


def train_to(world: World, config: Config, steps: int) -> None:
    """Train some steps and save, as a signal makes a run do."""
    loop = loop_of(config, world, StopAt(steps))
    loop.stop.state = loop.step.state  # type: ignore[attr-defined]
    with pytest.raises(Stopped):
        loop.run()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two processes have stopped in mid-epoch, with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("sharded")
    in_world(2, folder, train_to, with_parallel(short(folder / "run"), "shard"), 8)
    return folder / "run"


@pytest.mark.slow
def test_another_number_of_processes_goes_on(saved: Path, tmp_path: Path) -> None:
    expected = alone(short(tmp_path / "alone"), tmp_path / "alone.pt")
    config = with_parallel(short(tmp_path / "run"), "shard")
    shutil.copytree(saved, config.out)
    assert checkpoint_steps(tmp_path / "run") == [6, 8]
    found = alone(config, tmp_path / "one.pt")
    torch.testing.assert_close(found["losses"], expected["losses"][6:], rtol=0, atol=LOSS)
    assert_near({**found, "losses": expected["losses"]}, expected)
    # What a single process writes is one file again.
    assert [path.suffix for path in checkpoint_paths(tmp_path / "run")] == ["", ".pt"]


def fill_up_a_disk(world: World, config: Config) -> None:
    """Train while one process can write no more than a few bytes, and then with more room."""
    loop = loop_of(config, world)
    save = loop.write_checkpoint

    def limited() -> None:
        small_disk = world.rank == 1 and loop.step.state.step < 12
        limit = 100 if small_disk else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save()

    loop.write_checkpoint = limited
    loop.run()


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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "damage"), [(0, cut), (1, flip), (2, Path.unlink), (-1, flip)])
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
    assert [files[0].name, files[-1].name] == [SUMS_FILE, STATE_FILE] and len(files) == 2 + 2
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


def test_a_model_too_large_for_a_gpu_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 10**9, 80 * 10**9

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    monkeypatch.setattr(World, "agree", lambda _, choice: choice)  # the other process is not there
    gpu = torch.device("cuda")
    assert not shards("auto", World(0, 2), gpu, 10**9) and shards(
        "auto", World(0, 2), gpu, 3 * 10**9
    )
    assert not shards("auto", World(0, 2), CPU, 3 * 10**9)
    assert shards("shard", World(0, 2), CPU, 10) and not shards("shard", World(0, 1), CPU, 10)
    assert not shards("replicate", World(0, 2), gpu, 3 * 10**9)


def test_a_hybrid_run_of_an_earlier_version_loads() -> None:
    assert from_dict({"train": {"parallel": "hybrid"}}).train.parallel == "shard"


def train_in_bfloat16(world: World, config: Config, losses: Path) -> None:
    """Train a model with batch norm and learned positions in bfloat16, and write the losses."""
    loop = loop_of(config, world, precision=torch.bfloat16)
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
