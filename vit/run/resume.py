"""The decision to start, resume, extend or refuse a run, from what its folder contains."""

import dataclasses
from pathlib import Path
from typing import Any

from vit.console import program
from vit.run.checkpoint import Checkpoint, latest_checkpoint
from vit.run.folder import (
    CONFIG_FILE,
    LOCK_FILE,
    MODEL_FILE,
    OWNER_FILE,
    lasting,
    stored_config,
    with_defaults,
)
from vit.settings import changed_keys
from vit.training.config import Config, from_dict, to_dict

# Settings that must not change when a run is resumed.
FIXED = (
    *("data.", "model.", "optim.name:", "optim.layer_decay:"),
    *("train.batch_size:", "train.budget_minutes:", "train.freeze:", "train.restarts:"),
    "train.seed:",
)


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
            f"out: {run} contains a finished run; evaluate it with "
            f"`{program('eval')} {run}`, extend it with --resume.extend and more --train.epochs, "
            f"train in another folder with --out, or delete it and start over with --overwrite"
        )
    newest = latest_checkpoint(run)
    if newest is None:  # stopped before the first checkpoint
        if extend:
            raise ValueError(f"resume.extend: {run} has no checkpoint to go on from")
        return None
    _compare(config, newest, stored, environment, allow_changes, extend)
    return newest


def _compare(
    config: Config,
    newest: Checkpoint,
    stored: dict[str, Any],
    environment: dict[str, Any],
    allow_changes: bool,
    extend: bool,
) -> None:
    """Check that a run can be resumed with another config; arguments and errors as above.

    Args:
        newest: The checkpoint to resume from.
        stored: The config of the run in the folder.
    """
    kind = "a run" if extend else "an unfinished run"
    if extend:  # it must agree with the config of its newest checkpoint
        epochs = _extension_epochs(stored, newest)
        stored = with_defaults(newest.config)
        if epochs is None:  # that of the finished run, whose length is another
            length = {"epochs": config.train.epochs, "restarts": config.train.restarts}
            stored["train"] = {**stored["train"], **length}
        else:
            kind = f"an interrupted extension to {epochs} epochs"
    # Checkpoints of earlier versions do not identify the code of the attention.
    began = {"attention_code": environment.get("attention_code"), **newest.environment}
    before = {**lasting(stored), **{key: began.get(key) for key in environment}}
    given = to_dict(config)
    if config.train.compile == "auto":  # the run goes on as it began
        given["train"]["compile"] = stored["train"].get("compile")
    changes = changed_keys(before, {**lasting(given), **environment})
    fixed = any(change.startswith(FIXED) for change in changes)
    if changes and (fixed or not allow_changes):
        what, allowed = "another config", " or with the new ones by --resume.allow_changes,"
        if fixed:
            what, allowed = "other data or another model, seed, optimizer, batch size or budget", ""
        raise ValueError(
            f"out: {config.out} contains {kind} with {what} ({'; '.join(changes)}); resume it with "
            f"its own values,{allowed} train in another folder with --out, or start over with "
            "--overwrite"
        )


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
        )
    restarts = (*finished.restarts, finished.epochs)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, restarts=restarts))


def _extension_epochs(stored: dict[str, Any], newest: Checkpoint) -> int | None:
    """Return the epochs of an extension that has begun but is not finished; None if none has."""
    epochs = with_defaults(newest.config)["train"]["epochs"]
    return epochs if epochs != stored["train"].get("epochs") else None
