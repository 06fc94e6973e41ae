"""Checkpoints: the state of a run, from which it resumes.

A checkpoint is written completely or not at all and contains the SHA-256 of its contents, so a
single changed bit is noticed. Only tensors and plain values are read back: nothing in a file is
ever executed. The checkpoint of a sharded run is a folder, see `vit.run.sharded`.
"""

import contextlib
import io
import re
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, with_config
from torch import Tensor
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from vit import settings
from vit.config import StoredConfig, to_dict
from vit.console import is_out_of_memory, warn
from vit.data.preprocess import Preprocess
from vit.distributed.shard import is_sharded
from vit.distributed.world import World
from vit.files import is_sealed, require_file, seal, write_atomically
from vit.run.sharded import delete, read_state, read_whole, write_folder

CHECKPOINT_FOLDER = "checkpoints"
STEP_PATTERN = "step_[0-9]*"  # of the names of checkpoints; those that are files end with .pt
FOREIGN = "; to fine-tune the weights of a ViT, use vit-train --model.pretrained FILE"
KEEP = 2  # checkpoints; the older one is used if the newer cannot be read
RETIRED = ("processes", "device", "precision")  # fields of version 0.1


@with_config(settings.CHECKED)
class Environment(TypedDict, total=False):
    """What a run depends on besides its config; earlier versions stored less."""

    attention_code: settings.Text
    processes: int
    device: settings.Text
    precision: settings.Text
    threads: int
    compiled: bool
    steps_per_epoch: int
    teacher: settings.Text  # digest of its weights


def _as_pairs(value: Any) -> Tensor:
    """Turn lists of pairs, as JSON has them, into a tensor (N, 2)."""
    with contextlib.suppress(RuntimeError, TypeError, ValueError):
        pairs = torch.as_tensor(value, dtype=torch.float32).view(-1, 2)
        if len(pairs) <= settings.LARGE:  # of an epoch
            return pairs
    raise ValueError("these are not pairs of numbers")


AtLeast0 = Annotated[float, Field(ge=0)]
StepSeconds = Annotated[float, Field(ge=1e-9, le=settings.LARGE)]
Pairs = Annotated[Tensor, BeforeValidator(_as_pairs)]  # losses and accuracies, (N, 2)


@settings.group("", kw_only=False)
class Checkpoint:
    """The contents of a checkpoint: the state of a run, and what resuming it needs.

    A checkpoint of an earlier version may lack the fields that have defaults.
    """

    step: settings.Steps  # optimizer steps done
    config: StoredConfig
    classes: settings.ClassNames
    model: dict[str, Tensor]  # the weights
    ema: dict[str, Tensor] | None = None  # their moving average
    optimizers: list[dict[str, Any]] = field(default_factory=list)  # the state of each
    points: Pairs = field(default_factory=lambda: torch.empty(0, 2))  # of each step of this epoch
    seconds: AtLeast0 = 0.0  # of training so far
    flop: AtLeast0 | None = None  # of training so far; None if part of it is unknown
    total_steps: settings.Steps | None = None  # for this and the next four, see `vit.run.length`
    planned_steps: settings.Steps = 0
    changed_at: settings.Steps = 0
    changed_done: settings.FractionBelow1 = 0.0
    costs: tuple[tuple[settings.FractionAbove0, StepSeconds], ...] = ()
    skipped: settings.Steps = 0  # steps whose loss or gradient was not finite
    skipped_in_a_row: settings.Steps = 0  # of the latest steps
    unevaluated: bool = False  # a signal broke off the evaluation at this step
    num_images: settings.Steps = 0  # for training
    fingerprint: settings.Text = ""  # of the user's files, see `vit.data.images.user_files`
    environment: Environment = field(default_factory=Environment)
    preprocess: Preprocess | None = None
    folder: Path | None = None  # with the tensors of a sharded run; the fields may lack them

    def __post_init__(self) -> None:
        edges, total, at = [edge for edge, _ in self.costs], self.total_steps, self.changed_at
        rise = edges == sorted(edges) and edges[-1:] in ([], [1])
        settings.require(rise, "costs", edges, "rising to 1")
        is_past = not total or at <= min(self.step, total - 1)
        settings.require(is_past, "changed_at", at, f"at most {self.step}, and below {total}")


def save_state(run: Path, state: Any, about: dict[str, Any], world: World) -> None:
    """Save the state of a run, a `vit.training.state.TrainState`; called by all processes.

    The first process writes a file, or all processes their parts of a sharded state into a folder.
    `about` has the other fields of `Checkpoint`.

    Raises:
        OSError: The checkpoint could not be written; the older ones are kept.
    """
    if is_sharded(state.model):
        target, counts = checkpoint_path(run, state.step), state.counts()
        plain = {**about, **counts, "points": counts["points"].tolist()}
        write_folder(target, state.tensors(), plain, world.main)
        if world.main:
            _delete_others(run, target)
    elif world.main:
        save_checkpoint(run, Checkpoint(**state.state_dict(), **about))


def save_checkpoint(run: Path, checkpoint: Checkpoint) -> None:
    """Write RUN/checkpoints/step_N.pt, and delete all older checkpoints but one."""
    path = checkpoint_path(run, checkpoint.step).with_suffix(".pt")
    path.parent.mkdir(exist_ok=True)
    buffer = io.BytesIO()
    preprocess = checkpoint.preprocess and to_dict(checkpoint.preprocess)
    plain = {"config": to_dict(checkpoint.config), "preprocess": preprocess}
    torch.save({**vars(checkpoint), **plain}, buffer)
    write_atomically(path, seal(buffer))
    _delete_others(run, path)


def _delete_others(run: Path, path: Path) -> None:
    """Delete a run's checkpoints but `path` and the one before it; later ones were damaged."""
    paths = checkpoint_paths(run)
    end = paths.index(path) + 1
    for old in (*paths[: max(0, end - KEEP)], *paths[end:], *path.parent.glob(".*.tmp")):
        delete(old)


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the folder of a sharded checkpoint; a file's name ends with .pt in addition."""
    return run / CHECKPOINT_FOLDER / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, by its name."""
    return int(path.stem.removeprefix("step_"))


def checkpoint_paths(run: Path) -> list[Path]:
    """List a run's checkpoints, files and folders, oldest first."""
    paths = (run / CHECKPOINT_FOLDER).glob(STEP_PATTERN)
    named = [path for path in paths if re.fullmatch(r"step_\d+(\.pt)?", path.name)]
    return sorted(named, key=step_of)


def read_checkpoint(path: Path, tensors: bool = True) -> Checkpoint:
    """Read a checkpoint without executing anything in it.

    With tensors=False, the tensors of a checkpoint that is a folder are left out.

    Raises:
        ValueError: The file is not a checkpoint of this project, or is damaged.
    """
    if path.is_dir():
        state = {**read_state(path), "model": {}, "folder": path}
        for name in ("model", "ema") if tensors else ():
            state[name] = read_whole(path, f"{name}.")
    else:
        state = {**_read_file(path), "folder": None}
    state = {name: value for name, value in state.items() if name not in RETIRED}
    return settings.parse(Checkpoint, state, path)


def read_step(run: Path, step: int) -> Checkpoint:
    """Read the checkpoint of a run at a step, without the tensors of a folder."""
    path = checkpoint_path(run, step)
    return read_checkpoint(path if path.is_dir() else path.with_suffix(".pt"), tensors=False)


def _read_file(path: Path) -> dict[Any, Any]:
    """Read a checkpoint that is a file: a dictionary of tensors and plain values."""
    try:
        data, state = require_file(path).read_bytes(), None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        if is_sealed(data):  # the digest that follows is not read
            state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # a sealed file of something else raises many types of errors
        if is_out_of_memory(error):
            raise
    if not isinstance(state, dict):
        raise ValueError(f"{path} is not a checkpoint of this project, or is damaged{FOREIGN}")
    return state


def latest_checkpoint(run: Path) -> Checkpoint | None:
    """Read the newest readable checkpoint of a run, without the tensors of a folder, if any.

    Raises:
        ValueError: There are checkpoints, but none can be read.
    """
    paths = checkpoint_paths(run)
    for number, path in enumerate(reversed(paths), start=1):
        try:
            return read_checkpoint(path, tensors=False)
        except ValueError as error:
            warn(f"{error}{'; trying an older checkpoint' if number < len(paths) else ''}")
    if paths:
        advice = "see the reasons above, and start over with --overwrite if they are damaged"
        raise ValueError(f"{run}: none of its checkpoints can be read; {advice}")
    return None
