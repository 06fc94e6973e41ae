"""Faults of long runs, applied to whole commands: the run survives, or says what to do."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from small_runs import (
    ROOT,
    SPARING,
    STEPS,
    WILD,
    Payload,
    assert_same,
    command,
    metrics,
    small,
    start,
    steps_logged,
    wait,
)
from vit.files import seal
from vit.run.checkpoint import checkpoint_steps, latest_checkpoint
from vit.training.config import Config

pytestmark = pytest.mark.slow


def with_torchrun(words: list[str], processes: int = 2) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [words[0], *start, *words[1:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("alone")
    words = command(small(folder / "run"), folder / "config")
    subprocess.run(words, capture_output=True, check=True, timeout=200)
    return folder / "run"


# Of three numbers the sum depends on the order, of two it does not.
SHARED: dict[str, Any] = {
    "data": {"train_size": 240}, "train": {"batch_size": 48}, "track": SPARING
}  # fmt: skip


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three processes that nobody disturbed."""
    folder = tmp_path_factory.mktemp("trio")
    words = with_torchrun(command(small(folder / "run", **SHARED), folder / "config"), 3)
    subprocess.run(words, capture_output=True, check=True, timeout=200)
    return folder / "run"


def test_a_run_killed_five_times_ends_bit_for_bit_as_one_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.soak", "--kills", "5"],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("5 kills: ") and done.stdout.endswith("bit for bit\n")


def test_a_sharded_run_killed_under_torchrun_ends_as_one_left_alone() -> None:
    """One process is killed, and then both."""
    if sys.platform != "linux":
        pytest.skip("the benchmark reads /proc")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale.soak", "--processes", "2", "--kills", "2"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("2 kills, 1 of all 2 processes")
    assert done.stdout.endswith("bit for bit\n")


def is_listening(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("localhost", port)) == 0


def test_a_process_that_waits_for_others_to_start_can_be_ended(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = command(small(tmp_path / "run"), tmp_path / "config")
    torchruns = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    env = {**os.environ, **torchruns, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    process = subprocess.Popen(words, env=env)
    wait(lambda: is_listening(port))
    time.sleep(1)
    process.terminate()
    assert process.wait(timeout=20) == -signal.SIGTERM


def test_processes_stop_at_the_same_step_and_go_on_bit_for_bit(trio: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = with_torchrun(command(small(run, **SHARED), tmp_path / "config"), 3)
    process = start(words)
    wait(lambda: steps_logged(run) >= 6, process)
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches torchrun and its processes
    process.communicate(timeout=100)
    assert process.returncode != 0
    (*_, last) = checkpoint_steps(run)
    assert last >= 6
    alone = command(small(run, **SHARED), tmp_path / "config")
    refused = subprocess.run(alone, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 2
    assert "processes: 3 -> 1" in refused.stderr and "--resume.allow_changes" in refused.stderr
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=200)
    assert f"resuming after step {last}" in done.stdout and done.stdout.count("resuming") == 1
    assert_same(run, trio)


def test_processes_all_end_when_the_first_finds_no_data(tmp_path: Path) -> None:
    data = {"name": "cifar10", "root": str(tmp_path / "data"), "download": False}
    config = small(tmp_path / "run", data=data, train={"processes": 2})
    done = subprocess.run(
        command(config, tmp_path / "config"), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "cifar-10-python.tar.gz" in line
    assert not (tmp_path / "run").exists()


def test_an_error_of_one_torchrun_process_ends_all_with_its_one_line(tmp_path: Path) -> None:
    for number in range(64):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (4 * number, 0, 0)).save(path)
    data = {"name": "folder", "root": str(tmp_path / "photos"), "val_size": 8, "memory_gb": 0}
    shared = {"batch_size": 8, "accumulate": 1, "epochs": 1000}
    run = tmp_path / "run"
    config = small(run, data={**data, "train_size": None}, train=shared, track={"probes": 0})
    process = start(with_torchrun(command(config, tmp_path / "config")))
    wait(lambda: bool(checkpoint_steps(run)), process)
    (gone, *_) = sorted((tmp_path / "photos/a").iterdir())
    gone.unlink()
    begin = time.monotonic()
    _, errors = process.communicate(timeout=100)
    assert time.monotonic() - begin < 30 and process.returncode == 1
    (line,) = [line for line in errors.splitlines() if line.startswith("error")]
    assert str(gone) in line
    assert "torch.distributed.elastic" in errors  # names the process as well


def test_diverging_run_ends_with_3_and_leaves_finite_checkpoints(tmp_path: Path) -> None:
    config = small(tmp_path / "run", optim=WILD)
    words = command(config, tmp_path / "config")
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 3, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    for part in ("diverged", "not finite at step", "10 skipped steps in a row", "learning rate",
                 "nan nan nan", "--optim.lr", "--overwrite"):  # fmt: skip
        assert part in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model.safetensors").exists()
    newest = latest_checkpoint(tmp_path / "run")
    if newest is not None:
        assert all(tensor.isfinite().all() for tensor in newest.model.values())


def test_full_disk_costs_a_checkpoint_and_not_the_run(alone: Path, tmp_path: Path) -> None:
    """No file may grow beyond a size, as if the disk were full, for a while."""
    resource = pytest.importorskip("resource")
    if not hasattr(resource, "prlimit"):
        pytest.skip("only Linux can limit the files of another process")
    run = tmp_path / "run"
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


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, killed."""
    folder = tmp_path_factory.mktemp("begun")
    process = start(command(small(folder / "run", train={"epochs": 100}), folder / "config"))
    wait(lambda: len(checkpoint_steps(folder / "run")) == 2, process)
    process.kill()
    process.communicate()
    return folder / "run"


def test_no_command_runs_what_is_in_a_checkpoint(begun: Path, tmp_path: Path) -> None:
    run, proof = tmp_path / "run", tmp_path / "proof"
    shutil.copytree(begun, run)
    evil = run / "checkpoints" / "step_99999999.pt"
    torch.save({**torch.load(max(run.glob("checkpoints/*.pt"))), "extra": Payload(proof)}, evil)
    evil.write_bytes(seal(evil.read_bytes()))
    kept = shutil.copy(evil, tmp_path)  # the resumed run deletes it with its next checkpoint
    python, eval_py = sys.executable, str(ROOT / "eval.py")
    for words in ([evil], [run], [begun, "compare", evil], [evil, "maps"],
                  [evil, "photo", "x.png"]):  # fmt: skip
        done = subprocess.run([python, eval_py, *words], capture_output=True, text=True)
        assert done.returncode == 2 and not proof.exists()
        if "x.png" not in words:
            assert f"{evil} is not a checkpoint" in done.stderr
    process = start([*command(small(run, train={"epochs": 100}), tmp_path / "config")])
    wait(lambda: steps_logged(run) > max(checkpoint_steps(begun)), process)
    process.kill()
    _, errors = process.communicate()
    assert (
        f"warning: {evil} is not a checkpoint, or is damaged; trying an older checkpoint" in errors
    )
    assert not proof.exists()
    torch.load(kept, weights_only=False)
    assert proof.exists()  # it would have run


def test_changes_are_allowed_when_they_are_asked_for(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(command(small(run, train={"epochs": 100}), tmp_path / "config"))
    wait(lambda: bool(checkpoint_steps(run)), process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    last = checkpoint_steps(run)[-1]
    shorter: Config = small(run, train={"epochs": -(-last // 5) + 1}, optim={"lr": 1e-4})
    words = command(shorter, tmp_path / "config")
    refused = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 2
    assert "optim.lr: 0.002 -> 0.0001" in refused.stderr
    assert "train.epochs: 100 -> " in refused.stderr
    allowed: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 200}
    done = subprocess.run([*words, "--resume.allow_changes"], **allowed)
    assert done.returncode == 0, done.stderr
    assert f"resuming after step {last}" in done.stdout
    assert checkpoint_steps(run)[-1] == shorter.train.epochs * 5
    assert "lr: 0.0001" in (run / "config.yaml").read_text()
    rates = [row["train/lr"] for row in metrics(run) if row["step"] > last and "train/lr" in row]
    assert rates and max(rates) <= 1e-4  # it is not only said
    (run / "model.safetensors").unlink()
    shorter = small(run, train={"epochs": 1}, optim={"lr": 1e-4})
    words = command(shorter, tmp_path / "config")
    done = subprocess.run([*words, "--resume.allow_changes"], **allowed)
    assert done.returncode == 2 and "train.epochs: 1 are 5 steps" in done.stderr
