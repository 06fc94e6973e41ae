"""Batches and models shared by processes: copies and parts train as a single process does."""

import dataclasses
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from benchmarks.scale.soak import checkpoint_steps
from small_runs import CPU, UNIFORM, StopAt, changed, load, make_step, small
from vit.config import Config, StoredConfig, to_dict
from vit.distributed.shard import needs_shards, replicate, to_full
from vit.distributed.world import Stopped, World
from vit.model.variants import ATTENTION, load_attention
from vit.pretrained.load import load as load_model
from vit.run.checkpoint import (
    Checkpoint,
    checkpoint_paths,
    latest_checkpoint,
    read_checkpoint,
)
from vit.run.sharded import STATE_FILE, SUMS_FILE, write_folder
from vit.settings import parse
from vit.training.build import missing_tool
from vit.training.loop import Loop
from vit.training.step import TrainingStep
from worlds import in_world, keep_losses, loop_of

LOSS = 1e-4  # difference of losses that rounding explains
SHORT: dict[str, dict[str, Any]] = {  # without batch norm
    "data": {"name": "shapes", "val_size": 20, "train_size": 192},
    "model": {"stem": "linear", "embed_dim": 26},
    "augment": {"rand_ops": 1},
    "train": {"epochs": 2, "batch_size": 32, "accumulate": 2, "whiten": False},
    "track": {"probes": 0},
}  # fmt: skip


def train_and_write(world: World, loop: Loop, weights: Path) -> None:
    """Train, and write the losses, weights and moving averages."""
    losses = keep_losses(loop)
    loop.run()
    tensors = loop.step.state.tensors()
    whole = {name: to_full(tensor).clone() for name, tensor in tensors.items()}
    if world.main:
        torch.save({"losses": torch.stack([*losses.values()]), **whole}, weights)


def trace_blocks() -> None:
    """Let torch trace blocks without handing them to a compiler, which takes minutes."""
    compile = torch.nn.Module.compile
    torch.nn.Module.compile = lambda block, **_: compile(block, dynamic=False, backend="eager")


def train_all(world: World, folder: Path) -> None:
    """Train in all ways in which processes can share a model."""
    for kind in KINDS:
        config = small(folder / kind, SHORT, train={"parallel": KINDS[kind]})
        if kind == "compiled":
            trace_blocks()
            config = changed(config, train={"compile": True})
        loop = loop_of(config, world)
        if kind == "overlapping":  # gradients are averaged during the backward pass, as on a GPU
            loop.step = dataclasses.replace(loop.step, forward=replicate(loop.step.forward))
        if kind == "parts":
            fill_up_a_disk(loop)
        train_and_write(world, loop, folder / f"{kind}.pt")
    for parallel in ("replicate", "shard"):  # with batch norm and learned positions
        out = folder / f"bfloat16_{parallel}"
        train = {"epochs": 1, "parallel": parallel}
        config = small(out, SHORT, model={"stem": "conv"}, train=train)
        loop = loop_of(config, world, precision=torch.bfloat16)
        train_and_write(world, loop, out.with_suffix(".pt"))


def fill_up_a_disk(loop: Loop) -> None:
    """Let one process write no more than a few bytes before the end of a run."""
    save = loop.write_checkpoint

    def limited() -> None:
        small_disk = loop.step.world.rank == 1 and loop.step.state.step < 12
        limit = 100 if small_disk else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        save()

    loop.write_checkpoint = limited


def alone(config: Config, weights: Path) -> dict[str, Tensor]:
    """Train in this process."""
    train_and_write(World(), loop_of(config, World()), weights)
    return read(weights)


def read(weights: Path) -> dict[str, Tensor]:
    return dict(torch.load(weights, weights_only=True))


def train_uniform(world: World, folder: Path) -> None:
    """Train attention whose queries, keys and table get no gradient, in all ways."""
    load_attention(f"{folder}/unused.py:Uniform")
    for kind in ("copies", "overlapping", "parts") if world.size > 1 else ("alone",):
        config = small(
            folder / kind,
            SHORT,
            model={"attention": "unused.py:Uniform", "qk_norm": True},
            train={"epochs": 1, "parallel": KINDS.get(kind, "auto")},
        )
        loop = loop_of(config, world)
        if kind == "overlapping":
            forward = replicate(loop.step.forward, unused=True)
            loop.step = dataclasses.replace(loop.step, forward=forward)
        train_and_write(world, loop, folder / f"{kind}.pt")


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert_close(found["losses"], expected["losses"], rtol=0, atol=LOSS)
    for name, tensor in expected.items():
        assert_close(found[name], tensor, rtol=0, atol=5e-3, msg=name)


KINDS = {"copies": "replicate", "overlapping": "replicate", "parts": "shard"}
if missing_tool(CPU) is None:
    KINDS["compiled"] = "shard"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What a single process learns."""
    folder = tmp_path_factory.mktemp("alone")
    return alone(small(folder / "run", SHORT), folder / "alone.pt")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not limit the size of files")
def test_processes_train_as_one_does(expected, tmp_path):
    """Even if a process cannot write for a while."""
    assert len(expected["losses"]) == 12
    in_world(2, tmp_path, train_all, tmp_path)
    for kind in KINDS:
        assert_near(read(tmp_path / f"{kind}.pt"), expected)
        assert checkpoint_steps(tmp_path / kind) == ([12] if kind == "parts" else [6, 12])
        checkpoint = latest_checkpoint(tmp_path / kind)
        assert checkpoint.environment["compiled"] == (kind == "compiled")
        model = load_model(tmp_path / kind)  # which knows nothing of processes
        for key, tensor in model.model.state_dict().items():
            assert_close(tensor, expected[f"ema.{key}"], rtol=0, atol=5e-3)
    copies, parts = (read(tmp_path / f"bfloat16_{how}.pt") for how in ("replicate", "shard"))
    assert len(parts["losses"]) == 6
    assert_close(parts["losses"], copies["losses"], rtol=0, atol=0.03)


@pytest.mark.slow
def test_processes_train_a_model_with_parameters_that_get_no_gradient(tmp_path):
    (tmp_path / "unused.py").write_text(UNIFORM)
    for size in (1, 2):
        in_world(size, tmp_path, train_uniform, tmp_path)
    expected = read(tmp_path / "alone.pt")
    for kind in ("copies", "overlapping", "parts"):
        assert_near(read(tmp_path / f"{kind}.pt"), expected)


def gradient(step: TrainingStep, images: Tensor, labels: Tensor) -> Tensor:
    """Return loss, accuracy and the gradient of all weights at step 3."""
    step.state.step = 3
    result = step.backward(*step.prepare(images, labels))
    gradients = [p.grad.flatten() for p in step.state.model.parameters() if p.grad is not None]
    step.state.model.zero_grad()
    return torch.cat([result, *gradients])


def test_gradients_of_processes_add_up_to_that_of_one(tmp_path):
    step = make_step(small(tmp_path, SHORT))
    ((images, labels),) = load("shapes", "", train=True, count=64).batches(torch.arange(64)[None])
    whole = gradient(step, images, labels)
    assert_close(gradient(dataclasses.replace(step, accumulate=1), images, labels), whole)
    for size in (2, 4, 8):
        worlds = [World(rank, size) for rank in range(size)]
        parts = [
            gradient(dataclasses.replace(step, world=w), w.part(images), w.part(labels))
            for w in worlds
        ]
        assert_close(torch.stack(parts).mean(dim=0), whole, rtol=1e-4, atol=1e-6)
        misplaced = gradient(step, worlds[1].part(images), worlds[1].part(labels))
        assert (misplaced - parts[1]).abs().max() > 1e-3


def train_to(world: World, config: Config, steps: int) -> None:
    """Train some steps and save, as a signal makes a run do."""
    loop = loop_of(config, world, stop=StopAt(steps))
    loop.stop.state = loop.step.state
    with pytest.raises(Stopped):
        loop.run()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two processes have stopped in mid-epoch, with checkpoints of steps 6 and 8."""
    folder = tmp_path_factory.mktemp("sharded")
    config = small(folder / "run", SHORT, train={"parallel": "shard"})
    in_world(2, folder, train_to, config, 8)
    return folder / "run"


@pytest.mark.slow
def test_another_number_of_processes_goes_on(expected, saved, tmp_path):
    config = small(tmp_path / "run", SHORT, train={"parallel": "shard"})
    shutil.copytree(saved, config.out)
    assert checkpoint_steps(tmp_path / "run") == [6, 8]
    found = alone(config, tmp_path / "one.pt")
    assert_close(found["losses"], expected["losses"][6:], rtol=0, atol=LOSS)
    assert_near({**found, "losses": expected["losses"]}, expected)
    # What a single process writes is one file again.
    assert [path.suffix for path in checkpoint_paths(tmp_path / "run")] == ["", ".pt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_are_read_without_what_the_run_did_not_have(tmp_path, monkeypatch):
    """Parameters without gradients have no state; a moving average may begin later."""
    monkeypatch.setitem(ATTENTION, "unused.py:Uniform", None)  # removed at the end
    (tmp_path / "unused.py").write_text(UNIFORM)
    load_attention(f"{tmp_path}/unused.py:Uniform")
    states = []
    for decay in (None, 0.9):
        config = small(tmp_path / str(decay), SHORT, model={"attention": "unused.py:Uniform"})
        loop = loop_of(changed(config, optim={"ema_decay": decay}), World())
        states.append(loop.step.state)
        batches = loop.step.batches(loop.training, torch.arange(64).view(2, 32))
        for batch in batches if decay is None else ():
            loop.step(*batch)
    saved, resumed = states
    tensors = {name: value.contiguous() for name, value in saved.tensors().items()}
    write_folder(tmp_path / "step", tensors, {}, main=True)
    about: dict[str, Any] = {"config": to_dict(Config()), "classes": ["a"], "model": {}}
    checkpoint = Checkpoint(**about, **saved.counts(), folder=tmp_path / "step")
    resumed.load_checkpoint(checkpoint)
    expected, found = saved.tensors(), resumed.tensors()
    average = {name: value for name, value in found.items() if name.startswith("ema.")}
    assert found.keys() - average.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, value in average.items():
        assert torch.equal(value, found[name.replace("ema.", "model.", 1)]), name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "damage"), [(0, flip), (1, flip), (2, Path.unlink), (-1, flip)])
def test_a_damaged_checkpoint_is_passed_over(saved, tmp_path, damage, number, capsys):
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


def test_a_model_too_large_for_a_gpu_is_sharded(monkeypatch):
    class Module:
        @staticmethod
        def mem_get_info() -> tuple[int, int]:
            return 10**9, 80 * 10**9

    monkeypatch.setattr(torch, "get_device_module", lambda _: Module)
    monkeypatch.setattr(World, "agree", lambda _, choice: choice)  # the other process is not there
    gpu = torch.device("cuda")
    for choice, size, device, weights, expected in (
        ("auto", 2, gpu, 10**9, False), ("auto", 2, gpu, 3 * 10**9, True),
        ("auto", 2, CPU, 3 * 10**9, False), ("shard", 2, CPU, 10, True),
        ("shard", 1, CPU, 10, False), ("replicate", 2, gpu, 3 * 10**9, False),
    ):  # fmt: skip
        assert needs_shards(choice, World(0, size), device, weights) == expected


def test_a_hybrid_run_of_an_earlier_version_loads():
    assert parse(StoredConfig, {"train": {"parallel": "hybrid"}}, "old").train.parallel == "shard"
