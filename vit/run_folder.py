"""The run folder: what is in it, and whether to start, resume or refuse."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from vit.checkpoint import CHECKPOINT_FOLDER, Checkpoint, latest_checkpoint
from vit.config import Config, changed_keys, to_dict
from vit.files import write_atomically

CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.safetensors"
LOCK_FILE = ".lock"
OWNER_FILE = ".lock_owner"  # apart from the lock, because Windows refuses to read a locked file
# What a checkpoint was made with, and cannot go on without.
FIXED = ("data.", "model.", "optim.name:", "train.budget_minutes:", "train.seed:")
METRICS_FILE = "metrics.jsonl"
MAPS_FOLDER = "attention"
EVAL_FOLDER = "eval"
REPORT_FILE = "report.json"
REPORT_FILES = (  # what stands beside the report
    "confusion_matrix.png",
    "reliability.png",
    "mistakes.png",
    "probes/probe_*.png",
    "events.out.tfevents.*",
    "projector_config.pbtxt",
    "*/features/*",  # the projector's
)
# What a run writes, and so what --overwrite deletes; the config last, so that a folder in which the
# deletion was cut short is still known for a run.
_WRITTEN = (
    METRICS_FILE,
    MODEL_FILE,
    "events.out.tfevents.*",
    f"{CHECKPOINT_FOLDER}/step_*.pt",
    f"{CHECKPOINT_FOLDER}/.step_*.tmp",
    f"{MAPS_FOLDER}/step_*.npy",
    f"{MAPS_FOLDER}/.step_*.tmp",
    *(f"{EVAL_FOLDER}/{pattern}" for pattern in (REPORT_FILE, *REPORT_FILES)),
    ".*.tmp",
    CONFIG_FILE,
)


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Keep other processes from writing to a run folder, which is created if it does not exist.

    The operating system holds the lock, so a process that dies leaves none behind. A folder that
    was created for the lock and is still empty at the end is removed.

    Args:
        run: The folder.

    Raises:
        ValueError: Another process holds the lock, or `run` is a file.
    """
    if run.is_file():
        raise ValueError(f"out: {run} is a file; it must be a folder or not exist")
    created = [folder for folder in (run, *run.parents) if not folder.exists()]
    run.mkdir(parents=True, exist_ok=True)
    path, owner = run / LOCK_FILE, run / OWNER_FILE
    lock = FileLock(path, blocking=False)
    try:
        lock.acquire()
    except Timeout:
        holder = owner.read_text() if owner.exists() else "another process"
        raise ValueError(
            f"out: {run} is being written by {holder}; "
            "wait for it, stop it, or train elsewhere with --out"
        ) from None
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        owner.unlink(missing_ok=True)
        # Removed while the lock is held, so that nobody locks a file that is about to disappear.
        # Windows keeps open files; there filelock removes it on release.
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # not empty: a run
            for folder in created:
                folder.rmdir()


def check_run(
    config: Config,
    overwrite: bool,
    environment: dict[str, Any],
    allow_changes: bool = False,
) -> Checkpoint | None:
    """Decide what happens to the run folder, without touching it.

    Args:
        config: Of the run that is asked for.
        overwrite: Whether what is there may go.
        environment: What else the numbers depend on: processes, device and precision.
        allow_changes: Whether the run may be resumed with another config, or otherwise.

    Returns:
        The checkpoint to resume from, or None to start anew.

    Raises:
        ValueError: The folder holds a finished run, a run with another config, or other things.
    """
    run = Path(config.out)
    ours = (".*.tmp", LOCK_FILE, OWNER_FILE)  # what an interrupted start may have left
    if not run.exists() or all(any(map(path.match, ours)) for path in run.iterdir()):
        return None
    stored = _stored_config(run)
    if stored is None:
        raise ValueError(
            f"out: {run} holds other things than a run, or a run without its {CONFIG_FILE}; "
            "choose another --out"
        )
    if overwrite:
        return None
    if (run / MODEL_FILE).exists():
        raise ValueError(
            f"out: {run} holds a finished run; evaluate it with `python eval.py {run}`, "
            f"train elsewhere with --out, or delete it and start anew with --overwrite"
        )
    newest = latest_checkpoint(run)
    if newest is None:  # stopped before there was anything to go on from
        return None
    before = {**_lasting(stored), **newest.environment}
    changes = changed_keys(before, {**_lasting(to_dict(config)), **environment})
    if any(change.startswith(FIXED) for change in changes):
        raise ValueError(
            f"out: {run} holds an unfinished run of other data, another model or another course "
            f"({'; '.join(changes)}); resume it with its own values, train elsewhere with --out, "
            f"or start anew with --overwrite"
        )
    if changes and not allow_changes:
        raise ValueError(
            f"out: {run} holds an unfinished run with another config ({'; '.join(changes)}); "
            f"resume it with its own values, or with these by --resume.allow_changes, "
            f"train elsewhere with --out, or start anew with --overwrite"
        )
    return newest


def _stored_config(run: Path) -> dict[str, Any] | None:
    """Read the config of a run; None where the folder holds none of ours."""
    try:
        stored = yaml.safe_load((run / CONFIG_FILE).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    groups = {"data", "model", "optim", "train"}
    if not isinstance(stored, dict) or not all(isinstance(stored.get(g), dict) for g in groups):
        return None
    return stored


def _lasting(values: dict[str, Any]) -> dict[str, Any]:
    """Drop what may differ on resuming: where the run and the data lie."""
    data = {key: value for key, value in values["data"].items() if key not in ("root", "download")}
    return {**values, "data": data, "out": None}


def prepare_run(config: Config, resume: bool) -> Path:
    """Make the run folder, emptied of an earlier run's files unless it is resumed.

    Only what this project wrote is deleted.
    """
    run = Path(config.out)
    run.mkdir(parents=True, exist_ok=True)
    if not resume:
        for pattern in _WRITTEN:
            for path in run.glob(pattern):
                path.unlink()
    text = yaml.safe_dump(to_dict(config), sort_keys=False)
    write_atomically(run / CONFIG_FILE, text.encode())
    return run
