"""The decision to start, resume or refuse a run, from what its folder contains."""

from pathlib import Path
from typing import Any

from vit.config import Config, to_dict
from vit.console import argument, program
from vit.run.checkpoint import Checkpoint, checkpoint_paths, latest_checkpoint
from vit.run.folder import (
    CONFIG_FILE,
    LOCK_FILE,
    MODEL_FILE,
    lasting,
    read_config,
    stored_config,
    written_files,
)
from vit.settings import changed_keys

# Settings that must not change when a run is resumed.
FIXED = (
    *("data.", "model.", "optim.name:", "optim.layer_decay:", "train.batch_size:"),
    *("train.budget_minutes:", "train.freeze:", "train.seed:"),
)


def as_stored(*configs: Config) -> Config:
    """Return the config that is nearest to that of an unfinished run, or else the first."""
    run = Path(configs[0].out)
    stored = to_dict((checkpoint_paths(run) and stored_config(run)) or configs[0])
    return min(configs, key=lambda config: len(changed_keys(stored, to_dict(config))))


def check_run(
    config: Config, overwrite: bool, environment: dict[str, Any], allow_changes: bool = False
) -> Checkpoint | None:
    """Decide whether to start or to resume a run, without changing the folder.

    The environment is what results depend on besides the config: processes, device and precision.
    Allowed changes are those of either, except for the settings in `FIXED`.

    Returns:
        The checkpoint to resume from, or None to start a new run.

    Raises:
        ValueError: The folder contains a finished run, an unfinished run that cannot be resumed
            with this config, or other files.
    """
    run = Path(config.out)
    ours = (".*.tmp", LOCK_FILE)  # may be left by an interrupted start
    if not run.exists() or all(any(map(path.match, ours)) for path in run.iterdir()):
        return None
    if read_config(run) is None:
        raise ValueError(
            f"out: {run} contains files other than a run, or a run without its {CONFIG_FILE}; "
            "use another --out"
        )
    written_files(run)  # raises if a link leads out of the run
    if overwrite:
        return None
    if (run / MODEL_FILE).exists():
        raise ValueError(
            f"out: {run} contains a finished run; evaluate it with "
            f"`{program('eval')} {argument(run)}`, train its weights further with "
            f"--model.pretrained {argument(run)} and another --out, or delete it and start over "
            "with --overwrite"
        )
    newest, stored = latest_checkpoint(run), stored_config(run)
    if newest is None or stored is None:  # it was stopped before the first checkpoint
        return None
    # Checkpoints of earlier versions do not identify the code of the attention, or the threads.
    unknown = {key: environment.get(key) for key in ("attention_code", "threads")}
    began = {**unknown, **newest.environment}
    before = {**lasting(to_dict(stored)), **{key: began.get(key) for key in environment}}
    given = to_dict(config)
    if config.train.compile == "auto":  # the run goes on as it began
        given["train"]["compile"] = stored.train.compile
    changes = changed_keys(before, {**lasting(given), **environment})
    fixed = any(change.startswith(FIXED) for change in changes)
    if changes and (fixed or not allow_changes):
        what, allowed = "another config", " or with the new ones by --resume.allow_changes,"
        if fixed:
            what, allowed = "other data or another model, seed, optimizer, batch size or budget", ""
        raise ValueError(
            f"out: {run} contains an unfinished run with {what} ({'; '.join(changes)}); "
            f"resume it with its own values,{allowed} train in another folder with --out, or start "
            "over with --overwrite"
        )
    return newest
