"""The run folder: its layout, its lock, and the decision to start, resume or refuse a run."""

import contextlib
import dataclasses
import json
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from vit.checkpoint import (
    CHECKPOINT_FOLDER,
    FOLDER_PATTERN,
    Checkpoint,
    delete,
    latest_checkpoint,
)
from vit.config import Config, changed_keys, from_dict, to_dict
from vit.files import write_atomically

CONFIG_FILE = "config.yaml"
EXTENSION_FILE = "extension.yaml"  # config of an extension, until it is finished
MODEL_FILE = "model.safetensors"
LOCK_FILE = ".lock"
OWNER_FILE = ".lock_owner"  # a separate file, because Windows does not let others read a locked one
# Settings that must not change when a run is resumed.
FIXED = (
    *("data.", "model.", "optim.name:", "optim.layer_decay:"),
    *("train.batch_size:", "train.budget_minutes:", "train.freeze:", "train.restarts:"),
    "train.seed:",
)
METRICS_FILE = "metrics.jsonl"
MAPS_FOLDER = "attention"
EVAL_FOLDER = "eval"
REPORT_FILE = "report.json"
REPORT_FILES = (  # written next to the report
    "confusion_matrix.png",
    "reliability.png",
    "mistakes.png",
    "probes/probe_*.png",
    "events.out.tfevents.*",
    "projector_config.pbtxt",
    *(f"[0-9]*/features/{name}" for name in ("tensors.tsv", "metadata.tsv", "sprite.png")),
)
ATTENTION_FOLDER = "attention"  # in the folder of the report
INDEX_FILE = "index.json"
TABLE_FILE = "faithfulness.json"
ATTENTION_FILES = (  # the index comes last: it says that the folder may be emptied
    TABLE_FILE,
    f"image_{'[0-9]' * 5}.png",
    *(f"{kind}.npy" for kind in ("rollout", "gradient_rollout", "relevance", "raw")),
    *(f"{kind}.npy" for kind in ("lrp", "lrp_rollout", "lrp_pixels")),
    *(f"{kind}.npy" for kind in ("occlusion", "integrated_gradients", "rise")),
    "events.out.tfevents.*",
    INDEX_FILE,
)
PHOTOS_FOLDER = "photos"
SHEET_SUFFIX = "_sheet.png"
PREDICTIONS_FILE = "predictions.csv"
EXPORT_FOLDER = "export"
EXPORTS = {"timm": "timm", "onnx": "model.onnx", "torch": "model.pt2"}
# The files that a run and its evaluations write, and so those that --overwrite deletes. The config
# comes last, so that a folder is still recognized as a run if the deletion is interrupted.
_WRITTEN = (
    METRICS_FILE,
    MODEL_FILE,
    "events.out.tfevents.*",
    f"{CHECKPOINT_FOLDER}/step_*.pt",
    f"{CHECKPOINT_FOLDER}/{FOLDER_PATTERN}",
    f"{CHECKPOINT_FOLDER}/.step_*.tmp",
    f"{MAPS_FOLDER}/step_*.npy",
    f"{MAPS_FOLDER}/.step_*.tmp",
    *(f"{EVAL_FOLDER}/{pattern}" for pattern in (REPORT_FILE, *REPORT_FILES)),
    *(f"{EVAL_FOLDER}/{ATTENTION_FOLDER}/{pattern}" for pattern in ATTENTION_FILES),
    f"{EVAL_FOLDER}/{PHOTOS_FOLDER}/*{SHEET_SUFFIX}",
    f"{EVAL_FOLDER}/{PREDICTIONS_FILE}",
    *(f"{EVAL_FOLDER}/compare_*/comparison.{suffix}" for suffix in ("json", "md", "png")),
    f"{EXPORT_FOLDER}/timm/config.json",
    f"{EXPORT_FOLDER}/timm/model.safetensors",
    f"{EXPORT_FOLDER}/model.onnx",
    f"{EXPORT_FOLDER}/model.pt2",
    ".*.tmp",
    EXTENSION_FILE,
    CONFIG_FILE,
)


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock a run folder against other processes, creating it if it does not exist.

    The operating system holds the lock, so a process that dies leaves no lock behind. A folder that
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
            "wait for it, stop it, or train in another folder with --out"
        ) from None
    try:
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        owner.unlink(missing_ok=True)
        # Removed while the lock is held, so that no other process locks a file that is about to go.
        # Windows cannot delete an open file; there, filelock removes it on release.
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
    extend: bool = False,
) -> Checkpoint | None:
    """Decide whether to start or to resume a run, without changing the folder.

    Args:
        config: The config of the new run; that of `extend_config` to extend a run.
        overwrite: Whether an existing run may be deleted.
        environment: What else the results depend on: processes, device and precision.
        allow_changes: Whether an unfinished run may be resumed with another config (except for the
            settings in `FIXED`) or in another environment.
        extend: Whether to extend the finished run in the folder, or to resume its extension.

    Returns:
        The checkpoint to resume from, or None to start a new run.

    Raises:
        ValueError: The folder contains a finished run, an unfinished run that cannot be resumed
            with this config, or other files.
    """
    run = Path(config.out)
    ours = (".*.tmp", LOCK_FILE, OWNER_FILE)  # may be left by an interrupted start
    if not run.exists() or all(any(map(path.match, ours)) for path in run.iterdir()):
        return None
    stored = stored_config(run)
    if stored is None:
        raise ValueError(
            f"out: {run} contains files other than a run, or a run without its {CONFIG_FILE}; "
            "use another --out"
        )
    if overwrite:
        return None
    if (run / MODEL_FILE).exists() and not extend:
        raise ValueError(
            f"out: {run} contains a finished run{_extension_text(run, stored)}; evaluate it with "
            f"`python eval.py {run}`, extend it with --resume.extend and more --train.epochs, "
            f"train in another folder with --out, or delete it and start over with --overwrite"
        )
    newest = latest_checkpoint(run)
    if newest is None:  # stopped before the first checkpoint
        if extend:
            raise ValueError(f"resume.extend: {run} has no checkpoint to go on from")
        return None
    kind = "a run" if extend else "an unfinished run"
    if extend:
        if epochs := _extension_epochs(stored, newest):
            kind = f"an interrupted extension to {epochs} epochs"
        stored = _before_extension(stored, newest, config)
    before = {**_lasting(stored), **{key: newest.environment.get(key) for key in environment}}
    given = to_dict(config)
    if config.train.compile == "auto":  # the run goes on as it began
        given["train"]["compile"] = stored["train"].get("compile")
    changes = changed_keys(before, {**_lasting(given), **environment})
    own = _own_values(_lasting(stored), _lasting(given))
    if any(change.startswith(FIXED) for change in changes):
        raise ValueError(
            f"out: {run} contains {kind} with other data or another model, seed, optimizer, batch "
            f"size or time budget ({'; '.join(changes)}); resume it with its own values{own}, "
            "train in another folder with --out, or start over with --overwrite"
        )
    if changes and not allow_changes:
        raise ValueError(
            f"out: {run} contains {kind} with another config ({'; '.join(changes)}); "
            f"resume it with its own values{own}, or with the new ones by --resume.allow_changes, "
            f"train in another folder with --out, or start over with --overwrite"
        )
    return newest


def extend_config(config: Config) -> Config:
    """Return the config with which a finished run is extended to `train.epochs`.

    Until an extension is finished, the run's config.yaml describes the finished model, so that the
    same command starts the extension and resumes it.

    Args:
        config: The config of the command; the length of the finished run becomes the last of its
            `train.restarts`.

    Raises:
        ValueError: The folder contains no finished run, or one that has as many epochs or a time
            budget.
    """
    run = Path(config.out)
    stored = stored_config(run)
    if stored is None or not (run / MODEL_FILE).exists():
        raise ValueError(
            f"resume.extend: {run} contains no finished run; to start or resume a run, leave out "
            "--resume.extend"
        )
    finished = from_dict(stored).train
    if finished.budget_minutes is not None:
        raise ValueError(
            f"resume.extend: the run in {run} has a length in minutes (train.budget_minutes), not "
            "in epochs, and cannot be extended; train in another folder with --out"
        )
    if config.train.epochs <= finished.epochs:
        raise ValueError(
            f"train.epochs: {config.train.epochs} is not allowed; with --resume.extend it must be "
            f"more than the {finished.epochs} epochs of the finished run in {run}"
            f"{_extension_text(run, stored)}"
        )
    restarts = (*finished.restarts, finished.epochs)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, restarts=restarts))


def _extension_text(run: Path, stored: dict[str, Any]) -> str:
    """Tell of an interrupted extension of a finished run; empty if there is none."""
    try:
        newest = latest_checkpoint(run)
    except ValueError:  # none can be read
        return ""
    epochs = None if newest is None else _extension_epochs(stored, newest)
    if epochs is None:
        return ""
    return (
        f" (its interrupted extension to {epochs} epochs is resumed with "
        f"--train.epochs {epochs} --resume.extend)"
    )


def _extension_epochs(stored: dict[str, Any], newest: Checkpoint) -> int | None:
    """Return the epochs of an extension that has begun but is not finished; None if none has."""
    epochs = _with_defaults(newest.config)["train"]["epochs"]
    return epochs if epochs != stored["train"].get("epochs") else None


def _before_extension(stored: dict[str, Any], newest: Checkpoint, config: Config) -> dict[str, Any]:
    """Return what the config of an extension must agree with: that of its newest checkpoint.

    The first checkpoint is that of the finished run, from which it differs in its length.
    """
    latest = _with_defaults(newest.config)
    if _extension_epochs(stored, newest) is None:
        length = {"epochs": config.train.epochs, "restarts": config.train.restarts}
        latest["train"] = {**latest["train"], **length}
    return latest


def stored_config(path: Path) -> dict[str, Any] | None:
    """Read the config of a run; return None if there is none of this project.

    Args:
        path: The run folder, or a config file in it.
    """
    try:
        stored = yaml.safe_load((path / CONFIG_FILE if path.is_dir() else path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    groups = {"data", "model", "optim", "train"}
    if not isinstance(stored, dict) or not all(isinstance(stored.get(g), dict) for g in groups):
        return None
    return _with_defaults(stored)


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of keys that a config of an earlier version lacks."""
    try:
        return to_dict(from_dict(values))
    except ValueError:  # it has keys or values that are no longer allowed
        return values


def _lasting(values: dict[str, Any]) -> dict[str, Any]:
    """Drop what may always differ when a run is resumed: folders, and how files are read.

    The number of processes is part of the environment, with which torchrun's are compared too.
    """
    free = ("root", "download", "memory_gb", "workers")
    data = {key: value for key, value in values["data"].items() if key not in free}
    train = {key: value for key, value in values["train"].items() if key != "processes"}
    return {**values, "data": data, "train": train, "out": None}


def _own_values(stored: dict[str, Any], given: dict[str, Any]) -> str:
    """List the flags that give a run its own values where the command gives others."""
    flags = []
    for group in (name for name, values in given.items() if isinstance(values, dict)):
        for key, value in stored.get(group, {}).items():
            words = value if isinstance(value, list | tuple) else [value]
            if words and key in given[group] and value != given[group][key]:
                texts = [word if isinstance(word, str) else json.dumps(word) for word in words]
                flags.append(f"--{group}.{key} {shlex.join(texts)}")
    return f" ({' '.join(flags)})" if flags else ""


def prepare_run(config: Config, resume: bool, step: int = 0) -> Path:
    """Create the run folder and write the config; unless resuming, delete an earlier run first.

    Only files that this project writes are deleted. The config of a finished run that is being
    extended stays until `finish_extension`.

    Args:
        config: The run.
        resume: Whether the folder contains an earlier part of the run.
        step: With resume, the steps of that part.
    """
    run = Path(config.out)
    run.mkdir(parents=True, exist_ok=True)
    if not resume:
        for pattern in _WRITTEN:
            for path in run.glob(pattern):
                delete(path)
    extends = (run / MODEL_FILE).exists()
    write_config(config, step, run / (EXTENSION_FILE if extends else CONFIG_FILE))
    return run


def write_config(config: Config, step: int, path: Path) -> None:
    """Write a config, with comments about what earlier steps were trained with.

    Args:
        config: The run.
        step: Optimizer steps done with the config that is there now.
        path: config.yaml, or the file that will replace it when an extension is finished.
    """
    values = to_dict(config)
    before = path if path.exists() else path.with_name(CONFIG_FILE)
    stored = stored_config(before)
    comments = []
    if stored is not None:
        comments = [line for line in before.read_text().splitlines() if line.startswith("#")]
        changes = changed_keys(_lasting(stored), _lasting(values))
        if changes:
            comments.append(f"# changed after step {step}: {'; '.join(changes)}")
    text = "\n".join([*comments, yaml.safe_dump(values, sort_keys=False)])
    write_atomically(path, text.encode())


def finish_extension(run: Path) -> None:
    """Let the config of an extension take the place of that of the run, if there is one."""
    if (run / EXTENSION_FILE).exists():
        (run / EXTENSION_FILE).replace(run / CONFIG_FILE)
