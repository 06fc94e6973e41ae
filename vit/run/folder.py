"""The run folder: its layout, its lock, its config, and the decision to resume it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import Any

import yaml
from filelock import FileLock, Timeout

from vit.config import Config, StoredConfig, to_dict
from vit.console import argument, program
from vit.data.datasets import open_images
from vit.data.images import ImageSet
from vit.explain.kinds import ALL_KINDS
from vit.files import inside, require_file, write_atomically, write_table
from vit.run.checkpoint import CHECKPOINT_FOLDER, Checkpoint, checkpoint_paths, latest_checkpoint
from vit.run.sharded import delete
from vit.settings import changed_keys, parse, read_yaml

CONFIG_FILE = "config.yaml"
MODEL_FILE = "model.safetensors"
LOCK_FILE = ".lock"
METRICS_FILE = "metrics.jsonl"
SPLIT_FILE = "split.csv"
EVAL_FOLDER = "eval"
REPORT_FILE = "report.json"
PREDICTIONS_FILE = "predictions.csv"  # for the test images
REPORT_FILES = (  # written next to the report
    PREDICTIONS_FILE,
    *("confusion_matrix.png", "reliability.png", "mistakes.png", "unfamiliar.png"),
    *("corruptions.png", "corrupted_images.png", "events.out.tfevents.*"),
)
CORRUPTIONS_FILE = "corruptions.npz"  # results that the next report can use again
HEADS_FILE = "heads.json"  # what muting heads costs
HEADS_PICTURE = "heads.png"
ATTENTION_FOLDER = "attention"  # in the folder of the report
INDEX_FILE = "index.json"
TABLE_FILE = "faithfulness.json"
FEATURES_FILE = "features.png"
HEADS = "heads"  # name of the array with the attention of each head
DISTANCE = "distance"  # name of the array and the picture of each head's attention by offset
ATTENTION_FILES = (
    *(TABLE_FILE, FEATURES_FILE, f"image_{'[0-9]' * 5}.png", "events.out.tfevents.*"),
    *(f"{name}.npy" for name in (*ALL_KINDS, HEADS, DISTANCE)),
    *(f"{DISTANCE}.png", INDEX_FILE),
)
PHOTOS_FOLDER = "photos"
SHEET_SUFFIX = "_sheet.png"
PHOTOS_FILE = "photos.csv"
EXPORT_FOLDER = "export"
PREPROCESS_FILE = "preprocess.py"  # with each export
EXPORTS = {
    "timm": "timm", "onnx": "model.onnx", "torch": "model.pt2", "html": "live.html", "hub": "hub"
}  # fmt: skip
_RESULTS = (
    *(REPORT_FILE, *REPORT_FILES, CORRUPTIONS_FILE, HEADS_FILE, HEADS_PICTURE, PHOTOS_FILE),
    *(f"{ATTENTION_FOLDER}/{pattern}" for pattern in ATTENTION_FILES),
    f"{PHOTOS_FOLDER}/*{SHEET_SUFFIX}",
)
_EXPORTED = (
    *(f"timm/{name}" for name in ("config.json", MODEL_FILE, PREPROCESS_FILE)),
    *(name for name in (PREPROCESS_FILE, *EXPORTS.values()) if "." in name),
)
# The files that a run and its evaluations write, and so those that --overwrite deletes, besides
# checkpoints. The config is replaced: without one, a folder is no run.
_WRITTEN = (
    *(METRICS_FILE, SPLIT_FILE, MODEL_FILE, "events.out.tfevents.*"),
    *(f"{EVAL_FOLDER}/{part}{name}" for part in ("", "with_*/") for name in _RESULTS),
    *(f"{EVAL_FOLDER}/compare_*/comparison.{suffix}" for suffix in ("json", "md", "png")),
    f"{EVAL_FOLDER}/compare_*/corruptions_*.npz",
    *(f"{EXPORT_FOLDER}/{part}{name}" for part in ("", "with_*/") for name in _EXPORTED),
    *(f"{at}.*.tmp" for at in ("", "checkpoints/", "eval/", "eval/*/", "eval/*/*/", "export/")),
)
# Settings that must not change when a run is resumed.
FIXED = (
    *("data.", "model.", "attention_code:", "optim.name:", "optim.layer_decay:"),
    *("train.batch_size:", "train.budget_minutes:", "train.freeze:", "train.seed:"),
)


@contextlib.contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock a run folder against other processes, creating it if it does not exist.

    A process that dies leaves no lock behind. A folder that was created for the lock and is still
    empty at the end is removed.

    Raises:
        ValueError: Another process holds the lock, or `run` is a file.
    """
    if run.is_file():
        raise ValueError(f"out: {run} is a file; it must be a folder or not exist")
    created = [folder for folder in (run, *run.parents) if not folder.exists()]
    path = run / LOCK_FILE
    lock = FileLock(path, blocking=False)
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        advice = "wait for it, stop it, or train in another folder with --out"
        raise ValueError(f"out: {run} is being written by another process; {advice}") from None
    except OSError as error:
        problem = f"cannot write to {run} ({error.strerror})"
        raise ValueError(f"out: {problem}; use another --out") from None
    try:
        yield
    finally:
        # Removed while the lock is held, so that no other process locks a file that is about to go.
        # Windows cannot delete an open file; there, filelock removes it on release.
        with contextlib.suppress(PermissionError):
            path.unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # not empty: a run
            for folder in created:
                folder.rmdir()


def stored_config(run: Path) -> Config | None:
    """Read the config of a run of this or an earlier version; None if the folder is not a run.

    Raises:
        ValueError: A key is not known or a value is not allowed.
    """
    values = read_run_config(run)
    return None if values is None else parse(StoredConfig, values, run / CONFIG_FILE)


def unfinished_config(config: Config) -> Config | None:
    """Read the config of the unfinished run in `config.out`, if there is one."""
    run = Path(config.out)
    return stored_config(run) if checkpoint_paths(run) else None


def read_run_config(run: Path) -> dict[str, Any] | None:
    """Read the config of a run of any version as text; None if the folder is not a run."""
    try:
        values = read_yaml(require_file(run / CONFIG_FILE).read_bytes(), CONFIG_FILE)
    except (OSError, ValueError):
        return None
    groups = {"data", "model", "augment", "optim", "train", "track"}
    known = isinstance(values, dict) and all(isinstance(values.get(g), dict) for g in groups)
    return values if known and "out" in values else None


def lasting(values: dict[str, Any]) -> dict[str, Any]:
    """Drop what may differ when a run is resumed: folders, how files are read, and processes."""
    free = ("root", "download", "memory_gb", "workers")
    data = {key: value for key, value in values["data"].items() if key not in free}
    model = {**values["model"], "attention": PureWindowsPath(values["model"]["attention"]).name}
    # The number of processes is compared as a part of the environment, which has torchrun's too.
    others = ("processes", "timeout_minutes")
    train = {key: value for key, value in values["train"].items() if key not in others}
    return {**values, "data": data, "model": model, "train": train, "out": None}


def prepare_run(config: Config, resume: bool, step: int = 0) -> Path:
    """Create the run folder and write the config; unless resuming at `step`, delete an earlier run.

    Only files that this project writes are deleted. Comments in the config list earlier values.
    """
    run = Path(config.out)
    run.mkdir(parents=True, exist_ok=True)
    if not resume:
        for path in written_files(run):
            delete(path)
    values, path, comments = to_dict(config), run / CONFIG_FILE, []
    stored = stored_config(run) if resume else None
    if stored is not None:
        lines = path.read_text(errors="replace").splitlines()
        comments = [line for line in lines if line.startswith("#")]
        if changes := changed_keys(lasting(to_dict(stored)), lasting(values)):
            comments.append(f"# changed after step {step}: {'; '.join(changes)}")
    text = "\n".join([*comments, yaml.safe_dump(values, sort_keys=False)])
    write_atomically(path, text.encode())
    return run


def written_files(run: Path) -> list[Path]:
    """List what an earlier run and its evaluations have written, in the order of deletion.

    Raises:
        ValueError: A folder of theirs is a link, see `inside`.
    """
    paths = [*checkpoint_paths(run), *(path for name in _WRITTEN for path in run.glob(name))]
    folders = {path.relative_to(run).parent for path in paths}
    for folder in {*folders, Path(CHECKPOINT_FOLDER), Path(EVAL_FOLDER)}:
        inside(run, *folder.parts)
    return paths


def write_split(config: Config, training: ImageSet, held_out: ImageSet) -> None:
    """Write split.csv: which of the user's files a run trains on, holds out and tests on."""
    listed = dataclasses.replace(config.data, on_bad_image="error")  # so that no file is read
    parts = {"train": training, "val": held_out, "test": open_images(listed, train=False)}
    rows = (
        {"file": images.name(index), "label": images.classes[label], "part": part}
        for part, images in parts.items()
        for _, index, label in sorted(
            zip(images.origins, range(len(images)), images.labels.tolist(), strict=True)
        )
    )
    write_table(Path(config.out) / SPLIT_FILE, rows)


def _refuse_finished(run: Path) -> None:
    if (run / MODEL_FILE).exists():
        raise ValueError(
            f"out: {run} contains a finished run; evaluate it with "
            f"`{program('eval')} {argument(run)}`, train its weights further with "
            f"--model.pretrained {argument(run)} and another --out, or delete it and start over "
            "with --overwrite"
        )
    if (run / EVAL_FOLDER / REPORT_FILE).exists() and not checkpoint_paths(run):
        raise ValueError(
            f"out: {run} contains the report of a finished run without its {MODEL_FILE}; use "
            "another --out, or delete it and start over with --overwrite"
        )


def check_run(
    config: Config, overwrite: bool, environment: dict[str, Any], allow_changes: bool = False
) -> Checkpoint | None:
    """Decide whether to start or to resume a run, without changing the folder.

    The environment is what results depend on besides the config. Changes of either are allowed on
    request, except for the settings in `FIXED`.

    Returns:
        The checkpoint to resume from, or None to start a new run.

    Raises:
        ValueError: The folder contains a finished run, an unfinished run that cannot be resumed
            with this config, or other files.
    """
    run = Path(config.out)
    leftovers = (".*.tmp", LOCK_FILE)  # of an interrupted start
    if not run.exists() or all(any(map(path.match, leftovers)) for path in run.iterdir()):
        return None
    if read_run_config(run) is None:
        files = f"files other than a run, or a run without its {CONFIG_FILE}"
        raise ValueError(f"out: {run} contains {files}; use another --out")
    written_files(run)  # raises if a link leads out of the run
    if overwrite:
        return None
    _refuse_finished(run)
    newest, stored = latest_checkpoint(run), stored_config(run)
    if newest is None or stored is None:  # it was stopped before the first checkpoint
        return None
    # Checkpoints of earlier versions do not identify the code of the attention, or the threads.
    unknown = {key: environment.get(key) for key in ("attention_code", "threads")}
    began = {**unknown, **newest.environment}
    before = {**lasting(to_dict(stored)), **{key: began.get(key) for key in environment}}
    values = to_dict(config)
    if config.train.compile == "auto":  # the run goes on as it began
        values["train"]["compile"] = stored.train.compile
    if began.get("precision") == environment.get("precision"):  # whether auto chose it or not
        values["train"]["precision"] = stored.train.precision
    changes = changed_keys(before, {**lasting(values), **environment})
    fixed = any(change.startswith(FIXED) for change in changes)
    if changes and (fixed or not allow_changes):
        name = f"the code of {config.model.attention}"
        changes = [f"{name} has changed" if c.startswith("attention_code:") else c for c in changes]
        kind, allowed = "another config", " or with the new ones by --resume.allow_changes,"
        if fixed:
            kind, allowed = "other data or another model, seed, optimizer, batch size or budget", ""
        raise ValueError(
            f"out: {run} contains an unfinished run with {kind} ({'; '.join(changes)}); "
            f"resume it with its own values,{allowed} train in another folder with --out, or start "
            "over with --overwrite"
        )
    return newest
