"""Several processes on a CPU are one run, and runs go on bit for bit, whatever ends them."""

import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.scale import soak
from benchmarks.scale.soak import checkpoint_steps
from small_runs import assert_same, command, is_alive, small, start, wait
from vit.commands.train import train
from vit.config import Config
from vit.data.config import AugmentConfig
from vit.hardware import cores_to_use
from vit.run.checkpoint import latest_checkpoint
from vit.run.folder import prepare_run
from vit.training.start import check_processes, choose_processes, on_all_cores
from worlds import in_world, train_whole

# Of three numbers the sum depends on the order, of two it does not.
SHARED: dict[str, Any] = {"data": {"train_size": 240}, "track": {"milestones": 2}}


def settings(**train: Any) -> Config:
    return Config(train={"device": "cpu", **train})


@pytest.mark.parametrize(
    ("train", "cores", "stored", "count"),
    [
        ({}, 1, None, 1),
        ({}, 3, None, 2),  # 128 images are no multiple of 3
        ({}, 64, None, 4),  # of 32 images each
        ({"batch_size": 63}, 2, None, 1),
        ({"accumulate": 2}, 8, None, 2),
        ({"freeze": "backbone"}, 2, None, 1),
        ({"batch_size": 66}, 2, None, 2),
        ({"processes": 8}, 2, None, 8),
        ({}, 64, {"processes": 3}, 3),  # a run keeps its number
        ({}, 64, {}, 1),  # of an older version
        ({"processes": 2}, 64, {"processes": 3}, 2),
    ],
)
def test_a_process_for_each_core_that_has_enough_to_do(train, cores, stored, count):
    began = None if stored is None else settings(**stored)
    assert choose_processes(settings(**train), began, cores) == count


def test_the_memory_limits_the_processes(monkeypatch, capsys):
    for free, count in ((2e9, 2), (1e8, 1)):  # three would not divide the batch
        monkeypatch.setattr("vit.training.start.free_memory", lambda free=free: int(free))
        assert choose_processes(settings(), None, 64) == count
        assert f"memory suffices for {count} of 4 processes" in capsys.readouterr().err


def test_images_that_are_mixed_in_pairs_stay_in_one_process():
    odd = settings(batch_size=66)
    mixed = dataclasses.replace(odd, augment=AugmentConfig(mixup=0.1))
    never = dataclasses.replace(odd, augment=AugmentConfig(mixup=0.1, mix_share=0.0))
    assert [choose_processes(c, None, 2) for c in (odd, mixed, never)] == [2, 1, 2]
    text = r"batch_size: 66 is an odd number .* 2 processes, .* a multiple of 4$"
    with pytest.raises(ValueError, match=text):
        check_processes(mixed, 2)
    with pytest.raises(ValueError, match=r"batch_size: 12 .* 2 processes .* multiple of 8"):
        check_processes(settings(batch_size=12, accumulate=4), 2)  # micro-batches, too
    for config, processes in ((odd, 2), (never, 2), (mixed, 1), (mixed, 3)):
        check_processes(config, processes)


def test_an_accelerator_has_one_process(monkeypatch):
    monkeypatch.setattr("vit.training.start.choose_device", lambda _: torch.device("cuda"))
    assert choose_processes(settings(), None, 2) == 1
    assert choose_processes(settings(), settings(processes=2), 2) == 1  # begun on a CPU
    with pytest.raises(ValueError, match=r"processes: 2 is only for a CPU; .* null, or .*torchrun"):
        choose_processes(settings(processes=2), None, 2)


def test_a_restart_by_torchrun_overwrites_nothing(tmp_path, monkeypatch):
    config = small(tmp_path / "run")
    (prepare_run(config, resume=False) / "model.safetensors").touch()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(ValueError, match="a finished run"):
        train(config, overwrite=True)


def test_the_limit_of_openmp_counts(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cores_to_use() == 1
    for no_limit in ("1000000", "", "0", "many"):
        monkeypatch.setenv("OMP_NUM_THREADS", no_limit)
        usable = cores_to_use()
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert usable == cores_to_use()


def test_processes_that_cannot_train_are_not_started(tmp_path):
    with pytest.raises(ValueError, match=r"train\.processes: 2 is not allowed.*null or 1"):
        train(small(tmp_path / "run", train={"processes": 2}))  # Python starts none
    config = small(tmp_path / "run", train={"processes": 1000})
    with pytest.raises(ValueError, match=r"train\.batch_size: 64 cannot be divided among 1000"):
        on_all_cores(config, overwrite=False)
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_does_not_keep_its_number_of_processes(tmp_path):
    prepare_run(small(tmp_path / "run", train={"processes": 7}), resume=False)
    counts = [
        on_all_cores(small(tmp_path / name, train={"processes": None}), False).train.processes
        for name in ("run", "new")
    ]
    assert counts[0] == counts[1]


def children(process: subprocess.Popen[str]) -> list[int]:
    """The other processes of a run."""
    text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [int(number) for number in text.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_however_a_run_of_three_processes_is_ended_it_goes_on_bit_for_bit(tmp_path):
    run, alone = tmp_path / "run", tmp_path / "alone"
    counted, uncounted = (
        command(small(run, **{**SHARED, "train": {"batch_size": 48, **count}}), tmp_path / name)
        for name, count in (("counted", {"processes": 3}), ("uncounted", {}))
    )
    in_world(3, tmp_path, train_whole, small(alone, **SHARED, train={"batch_size": 48}))

    def started(words: list[str]) -> subprocess.Popen[str]:
        """Start the run, and wait until it has written a checkpoint."""
        before, process = checkpoint_steps(run), start(words)
        wait(lambda: checkpoint_steps(run)[-1:] > before[-1:], process)
        return process

    process = started(counted)
    os.kill(children(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 2
    (line,) = errors.strip().splitlines()
    assert line.startswith("error: train.processes: process 1 was ended by SIGKILL; rerun"), line
    # The first process dies without a word; the others must not stay. From here on, nothing asks
    # for the number of processes: it is that of the run.
    process = started(uncounted)
    others = children(process)
    process.kill()
    assert "Traceback" not in process.communicate(timeout=100)[1]
    wait(lambda: not any(map(is_alive, others)))
    process = started(uncounted)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 143, errors
    assert errors.count("rerun the command to resume after step") == 1
    assert "Traceback" not in errors
    (*_, last) = checkpoint_steps(run)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    done = subprocess.run(
        [uncounted[0], *launch, *uncounted[1:]], capture_output=True, text=True, timeout=200
    )
    assert f"resuming after step {last}" in done.stdout, done.stderr
    for once in ("resuming", "device   3 processes, each on CPU with 1 thread", "test     "):
        assert done.stdout.count(once) == 1
    assert_same(run, alone)
    checkpoint = latest_checkpoint(run)
    assert checkpoint.environment["processes"] == 3 and checkpoint.environment["threads"] == 1


@pytest.mark.slow
def test_a_run_killed_twice_ends_bit_for_bit_as_one_left_alone(tmp_path):
    """While it writes a checkpoint, and while it writes its report."""
    summary, killed, alone = soak.soak(tmp_path, 2, 1, random.Random(0))
    assert summary.startswith("2 kills: ")
    assert_same(killed, alone)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_a_sharded_run_killed_under_torchrun_ends_as_one_left_alone(tmp_path):
    """One process is killed while both write a checkpoint, and torchrun starts them anew."""
    alone, killed = (
        soak.sharded(soak.small_config(tmp_path / name, 5)) for name in ("alone", "killed")
    )
    in_world(2, tmp_path, train_whole, alone)
    soak.kill_again_and_again(killed, 2, 1, random.Random(0))
    assert_same(Path(killed.out), Path(alone.out))
