"""Faults of long runs, applied to whole commands: the run survives, or says what to do."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from small_runs import ROOT, STEPS, WILD, command, metrics, small, start, wait
from vit.run.checkpoint import checkpoint_steps, latest_checkpoint
from vit.training.train import train

pytestmark = pytest.mark.slow


def soak(*words: str) -> str:
    """Kill a run a few times, and return what the benchmark that does so prints."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.soak", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("bit for bit\n")
    return done.stdout


def test_a_run_killed_three_times_ends_bit_for_bit_as_one_left_alone() -> None:
    assert soak("--kills", "3").startswith("3 kills: ")


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_a_sharded_run_killed_under_torchrun_ends_as_one_left_alone() -> None:
    """One process is killed, and then both."""
    assert soak("--processes", "2", "--kills", "2").startswith("2 kills, 1 of all 2 processes")


def test_an_error_of_one_torchrun_process_ends_all_and_its_line_names_the_file(
    tmp_path: Path,
) -> None:
    for number in range(64):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (4 * number, 0, 0)).save(path)
    data = {"name": "folder", "root": str(tmp_path / "photos"), "val_size": 8, "memory_gb": 0}
    shared = {"batch_size": 8, "accumulate": 1, "epochs": 1000}
    run = tmp_path / "run"
    config = small(run, data={**data, "train_size": None}, train=shared, track={"probes": 0})
    words = command(config, tmp_path / "config")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = start([words[0], *launch, *words[1:]])
    wait(lambda: bool(checkpoint_steps(run)), process)
    (gone, *_) = sorted((tmp_path / "photos/a").iterdir())
    gone.unlink()
    begin = time.monotonic()
    _, errors = process.communicate(timeout=100)
    assert time.monotonic() - begin < 30 and process.returncode == 1
    (line,) = [line for line in errors.splitlines() if str(gone) in line]
    assert line.startswith("error")
    assert "torch.distributed.elastic" in errors  # names the process as well


def test_diverging_run_ends_with_3_and_leaves_finite_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        train(small(tmp_path / "run", optim=WILD))
    assert end.value.code == 3
    errors = capsys.readouterr().err.splitlines()
    (line,) = [line for line in errors if line.startswith("error")]
    for part in ("error: training diverged", "not finite at step", "10 skipped steps in a row",
                 "learning rate", "skipped step: nan", "--optim.lr", "--overwrite"):  # fmt: skip
        assert part in line
    assert not (tmp_path / "run" / "model.safetensors").exists()
    newest = latest_checkpoint(tmp_path / "run")
    if newest is not None:
        assert all(tensor.isfinite().all() for tensor in newest.model.values())


def test_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    """No file may grow beyond a size, as if the disk were full, for a while."""
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("only Linux can limit the files of another process")
    alone, run = tmp_path / "alone", tmp_path / "run"
    train(small(alone))
    process = start(command(small(run), tmp_path / "config"))
    wait(lambda: bool(checkpoint_steps(run)), process)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("warning: could not write the c"):  # curves, or a checkpoint
            break
    assert "keeping the previous checkpoint and continuing" in line
    assert checkpoint_steps(run)  # the good ones are kept
    assert not list((run / "checkpoints").glob(".*"))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert checkpoint_steps(run)[-1] == STEPS
    assert metrics(run) == metrics(alone)
    for name, tensor in load_file(alone / "model.safetensors").items():
        assert torch.equal(tensor, load_file(run / "model.safetensors")[name]), name
