"""Small complete runs, and helpers to read their outputs."""

import contextlib
import csv
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.scale.soak import SMALL, differences, left_behind
from vit.commands.train import build_loop, load_data
from vit.config import Config, to_dict
from vit.data.config import DataConfig
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.data.preprocess import Preprocess
from vit.distributed.world import StopRequest, World
from vit.pretrained.adapt import Pretrained
from vit.run.checkpoint import Checkpoint, latest_checkpoint
from vit.run.tracker import Tracker
from vit.training.build import build_step
from vit.training.loop import Loop
from vit.training.start import Run
from vit.training.state import TrainState, build_state
from vit.training.step import TrainingStep

CPU = torch.device("cpu")

ROOT = Path(__file__).resolve().parent.parent

STEPS = 6 * (320 // 64)

# Settings of augmentation with which an image is the same at each step.
STILL = {"crop_padding": 0, "flip": False, "erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
NO_DROPOUT = dict.fromkeys(("drop_rate", "attn_drop_rate", "proj_drop_rate", "drop_path_rate"), 0.0)

# A file of attention of which neither queries and keys nor the table have gradients.
UNIFORM = """
import torch
class Uniform(torch.nn.Module):
    def __init__(self, num_heads, head_dim):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(head_dim, head_dim))
    def forward(self, query, key, value, mask, dropout):
        weights = torch.full((*query.shape[:-1], key.shape[-2]), 1 / key.shape[-2]).to(query)
        return dropout(weights) @ value, weights
"""


def small(out: Path, *layers: dict[str, Any], **changes: dict[str, Any]) -> Config:
    """Return the config of a small run, in which later layers replace keys of earlier ones."""
    parts: dict[str, Any] = {part: {} for part in SMALL}
    for layer in (SMALL, *layers, changes):
        parts |= {part: {**parts[part], **values} for part, values in layer.items()}
    return Config(**{"out": str(out), **parts})


def tiny(out: Path, root: Path, **changes: dict[str, Any]) -> Config:
    """Return the config of an epoch of a tiny model on pictures as `draw_pictures` writes them."""
    parts: dict[str, Any] = {
        "data": {"name": "folder", "root": str(root), "image_size": 16},
        "model": {"embed_dim": 8, "depth": 1, "num_heads": 2, "patch_size": 8, "mlp_ratio": 1.0},
        "train": {"epochs": 1, "batch_size": 8, "device": "cpu", "small_share": 0, "whiten": False},
        "track": {"probes": 1, "milestones": 1, "live_mb": 0},
    }
    parts = {part: {**values, **changes.get(part, {})} for part, values in parts.items()}
    return Config(**{"out": str(out), **parts})


def changed(config: Config, **groups: dict[str, Any]) -> Config:
    """Replace fields in groups of a config."""
    parts = {name: replace(getattr(config, name), **fields) for name, fields in groups.items()}
    return replace(config, **parts)


def draw_pictures(
    root: Path, count: int, classes: Sequence[str] = "ab", name: str = "{}.png", seed: int = 0
) -> Path:
    """Write pictures of noise, 16 x 16, into the folder of each class in turn."""
    random = np.random.default_rng(seed)
    for number in range(count):
        path = root / classes[number % len(classes)] / name.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(256, size=(16, 16, 3), dtype=np.uint8)).save(path)
    return root


def begin(
    config: Config,
    device: torch.device = CPU,
    checkpoint: Checkpoint | None = None,
    source: Pretrained | None = None,
    **how: Any,
) -> Run:
    """Begin a run in this process, without touching its folder."""
    preprocess = Preprocess.from_config(config.data)
    return Run(config, preprocess, device, **how).starting_from(checkpoint, source)


def make_state(config: Config) -> TrainState:
    """Build the untrained state of a config with ten classes."""
    return build_state(begin(config), 10, None)


def make_step(config: Config, device: torch.device = CPU) -> TrainingStep:
    """Build the step of a run, resumed if it has a checkpoint."""
    return make_loop(config, device=device).step


def make_loop(config: Config, tracker: Tracker | None = None, **how: Any) -> Loop:
    """Build the loop of a run, resumed if it has a checkpoint.

    Args:
        config: The run.
        tracker: Where to log.
        how: Device, precision, world and stop, if they are not those of `begin`.
    """
    world = how.get("world") or World()
    checkpoint = world.agree(latest_checkpoint(Path(config.out)) if world.main else None)
    run = begin(config, checkpoint=checkpoint, **how)
    training, held_out = load_data(run)
    return build_loop(run, build_step(run, training)[1], training, held_out, tracker)


def load(
    name: str, root: Path | str, train: bool, count: int | None = None, **data: Any
) -> ImageSet:
    """Load images of a data set into memory, `count` if they are shapes; `data` are settings."""
    config = DataConfig(name=name, root=str(root) or ".", **data)
    with pytest.MonkeyPatch.context() as patch:
        for part in ("TRAINING", "TEST") if count else ():
            patch.setattr(f"vit.data.shapes.{part}", count)
        images = open_images(config, train)
    return images.resized(Preprocess.from_config(config)).in_memory()


def watch_updates(monkeypatch: Any, look: Callable[..., object]) -> None:
    """Show each step, its images and its targets to a function first, which may change them."""
    update = TrainingStep.update

    def watched(step: TrainingStep, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        look(step, images, targets)
        return update(step, images, targets)

    monkeypatch.setattr(TrainingStep, "update", watched)


def run_loop(config: Config, stop_at: int = 0) -> Loop:
    """Run a config in its folder, resumed if it has a checkpoint; return the loop at its end."""
    Path(config.out).mkdir(exist_ok=True)
    stop = StopAt(stop_at)
    loop = make_loop(config, stop=stop)
    stop.state = loop.step.state
    with contextlib.closing(Tracker(Path(config.out), loop.step.state.step)) as loop.tracker:
        loop.run()
    return loop


def assert_same_state(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Assert that two runs are in the same state, bit for bit."""
    for part in ("model", "optimizers", "ema", "points", "step"):
        torch.testing.assert_close(one[part], other[part], rtol=0, atol=0)


class StopAt(StopRequest):
    """A request that comes after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step
        self.state: TrainState | None = None

    def agreed(self, world: World) -> bool:
        assert self.state is not None
        return 0 < self.step == self.state.step


def command(config: Config, folder: Path) -> list[str]:
    file = folder / "config.yaml"
    folder.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(to_dict(config)))
    return [sys.executable, str(ROOT / "train.py"), "--config", str(file)]


def metrics(run: Path) -> list[dict[str, Any]]:
    """What was logged."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def start(words: list[str]) -> subprocess.Popen[str]:
    """Start a command that signals can be sent to, as a terminal does."""
    return subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that signals can go to all its processes, as Ctrl-C does
        # A shell starts what it puts in the background with the interrupt ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait(done: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Wait until something is done, by a process that must not end before."""
    deadline = time.monotonic() + 120
    while not done():
        assert process is None or process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Fail after a number of seconds."""

    def expire(*_: object) -> None:
        pytest.fail(f"it does not end within {seconds} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_alive(number: int) -> bool:
    """Return whether a process runs, even if it is not our child."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rows_of(table: Path) -> list[dict[str, str]]:
    """Read a CSV file, in which names of files may not be UTF-8."""
    with table.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return list(csv.DictReader(file))


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def pixels(encoded: bytes) -> np.ndarray:
    """Decode a picture from an event."""
    return np.asarray(Image.open(io.BytesIO(encoded)))


def stamps(folder: Path) -> dict[Path, int]:
    """What is in a folder, and when each was last written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@dataclass
class Clock:
    """Stands for the module `time`; its time passes only when told to."""

    now: float = 100.0

    def perf_counter(self) -> float:
        return self.now


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def assert_same(one: Path, other: Path) -> None:
    """Two finished runs are the same, bit for bit."""
    expected = left_behind(other)
    assert differences(expected, left_behind(one)) == []
