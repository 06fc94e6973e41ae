"""Images in files: the same bits as in memory, whatever happens to the files or the workers."""

import io
import multiprocessing
import operator
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.scale.soak import checkpoint_steps
from small_runs import assert_same_state, begin, deadline, is_alive, make_loop, run_loop, small
from vit.cli import user_errors
from vit.commands.train import load_data
from vit.config import Config
from vit.data import datasets, stream
from vit.data.config import DataConfig
from vit.data.datasets import fit_into_memory, load_training, open_images
from vit.data.images import ImageSet
from vit.data.photos import TarMember
from vit.data.preprocess import Preprocess
from vit.data.stream import ImageFiles
from vit.distributed.world import Stopped, World, stop_on_signals
from vit.hardware import PROCESSES
from vit.run.folder import check_run, prepare_run
from worlds import in_world

CLASSES = ("cat", "dog", "owl")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 training and 4 test photos of each class, of different sizes."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(60):
        folder = root / ("train" if number < 48 else "test") / CLASSES[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(256, size=(36 + number % 5, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.{'jpg' if number % 2 else 'png'}")
    return root


@pytest.fixture
def root(pictures: Path, tmp_path: Path) -> Path:
    """A copy of the photos that may be damaged."""
    return shutil.copytree(pictures, tmp_path / "pictures")


def folder(root: Path, **values: Any) -> DataConfig:
    return DataConfig(name="folder", root=str(root), **{"val_size": 9, "memory_gb": 0, **values})


def break_file(path: Path) -> bytes:
    """Cut a file in the middle of its pixels; return its content."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return content


def test_images_are_the_same_in_memory_and_in_files(pictures):
    kept = load_training(folder(pictures, memory_gb=1), 0)
    for workers in (0, 2):
        streamed = load_training(folder(pictures, workers=workers), 0)
        for one, other in zip(streamed, kept, strict=True):
            assert one.classes == other.classes == CLASSES
            assert torch.equal(one.labels, other.labels)
            assert one.images.shape == other.images.shape
            assert torch.equal(one.pixels(), other.images)
            some = torch.tensor([4, 0, 4])
            assert torch.equal(one.select(some).pixels(), other.select(some).images)
            assert torch.equal(torch.cat(list(one.images.split(7))), other.images)


def streaming(out: Path, root: Path, **data: Any) -> Config:
    values = {"name": "folder", "root": str(root), "val_size": 9, "train_size": None}
    return small(
        out,
        data={**values, "memory_gb": 0, **data},
        track={"probes": 0, "every": 1},
        train={"epochs": 2, "batch_size": 12},
    )


State = dict[str, Any]


def run(config: Config, stop_at: int = 0) -> State:
    """Run a config, resumed if it has a checkpoint; return its state at the end."""
    loop = run_loop(config, stop_at)
    assert isinstance(loop.training.images, torch.Tensor if config.data.memory_gb else ImageFiles)
    return loop.step.state.state_dict()


@pytest.fixture(scope="module")
def kept(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> State:
    """The state of a run with its images in memory."""
    return run(streaming(tmp_path_factory.mktemp("kept") / "run", pictures, memory_gb=1))


@pytest.mark.parametrize("step", [0, 1, 3])  # 3 ends an epoch
def test_a_signal_while_a_batch_is_awaited_stops_the_run_at_once_and_loses_nothing(
    kept, pictures, tmp_path, monkeypatch, step
):
    config = streaming(tmp_path / "run", pictures, workers=2)
    prepare_run(config, resume=False)
    with monkeypatch.context() as patch, stop_on_signals() as stop:
        batches = ImageSet.batches
        loop = make_loop(config, stop=stop)

        def stall(images: ImageSet, indices: torch.Tensor) -> Any:
            for batch in batches(images, indices):
                if loop.step.state.step == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                    pytest.fail("the run waits on")
                yield batch

        patch.setattr(ImageSet, "batches", stall)
        with pytest.raises(Stopped):
            loop.run()
    assert checkpoint_steps(tmp_path / "run")[-1:] == [step] * (step > 0)
    again = streaming(tmp_path / "run", pictures, memory_gb=None, workers=0)  # these may change
    found = check_run(again, False, begin(Config()).environment())
    assert (found is None) == (step == 0)
    assert_same_state(run(config), kept)


def test_a_file_that_breaks_during_training_is_named_and_the_run_can_be_resumed(
    kept, root, tmp_path
):
    config = streaming(tmp_path / "run", root, workers=0)
    training, _ = load_training(config.data, config.train.seed)
    path = Path(training.images.paths[0])
    with pytest.raises(Stopped):
        run(config, stop_at=4)  # after the first epoch
    content = break_file(path)
    with pytest.raises(ValueError, match=r"on_bad_image skip$"):
        load_data(begin(config))
    with pytest.raises(ValueError, match=r"cannot be read .*; restore, replace or delete") as info:
        run(config)  # in which all were read when it began
    assert str(path) in str(info.value) and "\n" not in str(info.value)
    path.write_bytes(content)
    assert_same_state(run(config), kept)


def test_images_are_kept_if_they_fit_into_a_quarter_of_the_free_memory(pictures, monkeypatch):
    images = open_images(folder(pictures), train=True)
    need = images.images.nbytes
    assert need == 48 * 3 * 32 * 32 == images.in_memory().images.nbytes
    assert fit_into_memory([images.in_memory(), images], need / 1e9)
    assert not fit_into_memory([images, images], 1.99 * need / 1e9)
    for free, processes, fits in ((4 * need, 1, True), (4 * need - 4, 1, False),
                                  (8 * need, 2, True), (8 * need - 8, 2, False)):  # fmt: skip
        monkeypatch.setattr("vit.data.datasets.free_memory", lambda free=free: free)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        assert fit_into_memory([images], None) == fits
    for free, fits in ((4 * need, True), (4 * need - 4, False)):  # of an accelerator
        module = SimpleNamespace(mem_get_info=lambda _, free=free: (free, 99 * need))
        monkeypatch.setattr(torch, "get_device_module", lambda _, module=module: module)
        monkeypatch.setattr("vit.data.datasets.free_memory", lambda: 99 * need)
        assert fit_into_memory([images], None, torch.device("cuda")) == fits


def test_workers_ignore_signals_end_with_the_batches_and_leave_random_numbers_alone(
    pictures, monkeypatch
):
    before = torch.get_rng_state()
    files = open_images(folder(pictures), train=True).images
    assert files.num_workers == 0  # so few are decoded in this process
    with monkeypatch.context() as patch:
        patch.setattr(stream, "FEW", 48)
        for cores, workers in ((1, 1), (4, 3), (40, 16)):
            patch.setattr(stream, "usable_cores", lambda cores=cores: cores)
            assert files.num_workers == workers
        # In a pool's worker, which may not start processes.
        patch.setitem(multiprocessing.current_process()._config, "daemon", True)
        assert files.num_workers == 0
    with monkeypatch.context() as patch:  # one of two processes, for which the other one waits
        started, worker = [], stream._worker
        patch.setattr(stream, "_worker", lambda preprocess: started.append(1) or worker(preprocess))
        patch.setattr(stream, "usable_cores", lambda: 4)
        patch.setattr(stream, "FEW", 48)
        patch.setattr(stream, "AT_ONCE", 8)
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        files.read()
        assert (len(started), files.num_workers) == (4, 1)
        patch.setattr(torch, "get_num_threads", lambda: 4)
        assert len([*files.split(8)]) == 6 and len(started) == 4 + 3  # this process computes, too
    images = open_images(folder(pictures, workers=2), train=True)
    batches = images.batches(torch.arange(48).view(12, 4))
    next(batches), next(batches)  # one of each worker, which ignores signals once it has begun
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    assert all(isinstance(worker, PROCESSES.Process) for worker in workers)
    for worker in workers:
        os.kill(worker.pid or 0, signal.SIGINT)
        os.kill(worker.pid or 0, signal.SIGTERM)
    for _ in range(9):
        next(batches)
    batches.close()  # as an interrupted epoch does
    assert not multiprocessing.active_children()
    images.pixels()
    assert not multiprocessing.active_children()
    assert torch.equal(before, torch.get_rng_state())


def test_files_are_read_only_as_far_as_they_are_alike(tmp_path, monkeypatch):
    start, names = bytes(2 * stream.FIRST_BYTES), "abcdef"
    contents = [b"short", b"x" + start, b"y" + start, start + b"1", start + b"2", start + b"1"]
    for name, content in zip(names, contents, strict=True):
        (tmp_path / name).write_bytes(content)
    whole: list[str] = []
    digest = stream._digest

    def watched(file: Any, at: Any, count: int | None) -> object:
        whole.extend([Path(file).name] if count is None else [])
        return digest(file, at, count)

    monkeypatch.setattr(stream, "_digest", watched)
    first = stream.first_copies([str(tmp_path / name) for name in names])
    assert first.tolist() == [0, 1, 2, 3, 4, 3] and whole == ["d", "e", "f"]
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        tar.add(tmp_path / "d")
    with tarfile.open(tmp_path / "shard.tar") as tar:
        (member,) = tar.getmembers()
    packed = TarMember(str(tmp_path / "shard.tar"), "d", member.offset_data, member.size)
    assert packed.open(5).read() == start[:5] and packed.open().read() == start + b"1"
    asked: list[int | None] = []
    monkeypatch.setattr(TarMember, "open", lambda _, n: asked.append(n) or io.BytesIO())
    digest(packed, (0, 0), 5)
    assert asked == [5]


def test_a_worker_that_is_killed_ends_the_run_in_one_line(pictures, capsys):
    images = open_images(folder(pictures, workers=1), train=True)
    with pytest.raises(SystemExit) as info, user_errors():
        for _ in images.batches(torch.arange(48).view(24, 2)):
            (worker,) = multiprocessing.active_children()
            os.kill(worker.pid or 0, signal.SIGKILL)
            worker.join()
    assert info.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: data.workers: a process ended with exit code -9")
    assert "fewer data.workers" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(28, "full"), MemoryError()])
def test_a_worker_that_cannot_hand_over_its_images_ends_the_run(pictures, error, monkeypatch):
    dumps, parent = ForkingPickler.dumps, os.getpid()

    def fail(*arguments: Any) -> Any:
        if os.getpid() != parent:
            raise error
        return dumps(*arguments)

    monkeypatch.setattr(ForkingPickler, "dumps", fail)
    images = open_images(folder(pictures, workers=2), train=True)
    with deadline(100), pytest.raises(ValueError, match=r"data.workers: a process ended with exit"):
        images.pixels()
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sets limits of Linux")
@pytest.mark.parametrize("limited", ["sockets and files", "shared memory"])
def test_workers_need_no_shared_memory_sockets_or_files(pictures, tmp_path, limited):
    far = tmp_path / ("long" * 20)  # the path of a Unix socket has at most 107 bytes
    far.mkdir()
    code = (
        "import resource, sys, torch; from vit.data.stream import ImageFiles\n"
        "from vit.data.config import DataConfig; from vit.data.preprocess import Preprocess\n"
        "size = Preprocess.from_config(DataConfig(name='folder', image_size=(224, 224)))\n"
        "files = ImageFiles(tuple(sys.argv[1:]) * 20, size, 2)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))\n"
        "kept = [*files.split(48), *files.split(len(files))]\n"
        "print(sum(map(len, kept)))"
    )
    mount = "mount -t tmpfs -o size=1m none /dev/shm"
    small = ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    if limited != "shared memory":
        small = []
    elif shutil.which("unshare") is None or subprocess.call([*small, "true"]):
        pytest.skip("this user may not mount a smaller /dev/shm")
    done = subprocess.run(
        [*small, sys.executable, "-c", code, *map(str, pictures.rglob("*.*"))],
        env={**os.environ, "TMPDIR": str(far)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout == "2400\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_workers_end_with_their_process_however_it_ends(pictures, end):
    paths = tuple(map(str, pictures.rglob("*.*")))
    images = ImageFiles(paths, Preprocess.from_config(folder(pictures)), workers=3)
    fork = multiprocessing.get_context("fork")
    inside, outside = fork.Pipe()

    def stream() -> None:
        batches = images.split(1)
        next(batches)
        outside.send([worker.pid for worker in multiprocessing.active_children()])
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit(7, batches)  # which keeps them open, as a traceback does

    process = fork.Process(target=stream)
    process.start()
    with deadline(100):
        workers = inside.recv()
        assert len(workers) == 3
        process.join()
        assert process.exitcode in (1, -signal.SIGKILL)
        while any(map(is_alive, workers)):
            time.sleep(0.01)


def test_unreadable_files_are_skipped_in_memory_and_when_streamed(root, capsys):
    for path in (*(root / "train").glob("dog/*4.png"), *(root / "train").glob("owl/*5.jpg")):
        break_file(path)
    kept = load_training(folder(root, on_bad_image="skip", memory_gb=1), 0)
    streamed = load_training(folder(root, on_bad_image="skip"), 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skipped ")
    assert sum(map(len, kept)) < 48
    assert isinstance(streamed[0].images, ImageFiles)
    for left, right in zip(kept, streamed, strict=True):
        assert torch.equal(left.labels, right.labels)
        assert torch.equal(left.images, right.pixels())


def load_alike(world: World, *configs: Config) -> None:
    """Load images, whose files only the first process may list and decode."""
    if not world.main:
        vars(datasets)["open_images"] = vars(stream)["_decode_files"] = None
    for config in configs:
        for images in load_data(begin(config, world=world)):
            expected = world.agree(images)
            assert torch.equal(images.labels, expected.labels)
            assert images.origins == expected.origins
            equal = torch.equal if config.data.memory_gb else operator.eq
            assert equal(images.images, expected.images)


@pytest.mark.slow
def test_the_first_of_several_processes_reads_the_files_for_all(root, tmp_path):
    break_file(root / "train/dog/04.png")
    kinds = ({}, {"memory_gb": 1}, {"memory_gb": 1, "val_size": 0})
    configs = (streaming(tmp_path, root, on_bad_image="skip", **kind) for kind in kinds)
    in_world(2, tmp_path, load_alike, *configs)
