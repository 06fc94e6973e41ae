"""The run folder: what is in it, and whether to start, resume or refuse."""

import shutil
from pathlib import Path
from typing import Any

import yaml

from vit.config import Config, changed_keys, to_dict
from vit.training.checkpoint import (
    CHECKPOINT_FOLDER,
    MODEL_FILE,
    latest_checkpoint,
    write_atomically,
)

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
EVAL_FOLDER = "eval"
_WRITTEN = (
    CONFIG_FILE,
    METRICS_FILE,
    MODEL_FILE,
    CHECKPOINT_FOLDER,
    EVAL_FOLDER,
    "events.out.tfevents.*",
)


def check_run(config: Config, overwrite: bool) -> dict[str, Any] | None:
    """Decide what happens to the run folder, without touching it.

    Args:
        config: Of the run that is asked for.
        overwrite: Whether what is there may go.

    Returns:
        The checkpoint to resume from, or None to start anew.

    Raises:
        ValueError: The folder holds a finished run, a run with another config, or other things.
    """
    run = Path(config.out)
    if run.is_file():
        raise ValueError(f"out: {run} is a file; it must be a folder or not exist")
    if not run.exists() or not any(run.iterdir()):
        return None
    if not (run / CONFIG_FILE).exists():
        raise ValueError(f"out: {run} holds other things than a run; choose another --out")
    if overwrite:
        return None
    if (run / MODEL_FILE).exists():
        raise ValueError(
            f"out: {run} holds a finished run; evaluate it with `python eval.py {run}`, "
            f"train elsewhere with --out, or delete it and start anew with --overwrite"
        )
    stored = yaml.safe_load((run / CONFIG_FILE).read_text())
    changes = changed_keys(_lasting(stored), _lasting(to_dict(config)))
    if changes:
        raise ValueError(
            f"out: {run} holds an unfinished run with another config ({'; '.join(changes)}); "
            f"resume it with its own values, train elsewhere with --out, "
            f"or start anew with --overwrite"
        )
    return latest_checkpoint(run)


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
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        text = yaml.safe_dump(to_dict(config), sort_keys=False)
        write_atomically(run / CONFIG_FILE, text.encode())
    return run
